"""Pipelines: sizes, statistics, determinism of evaluation."""

import numpy as np
import pytest
import torch
from PIL import Image

from instdisc.images.transforms import (
    InputSpec,
    eval_transform,
    finetune_transform,
    pretrain_transform,
)

PHOTO = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=np.uint8))


def test_every_pipeline_gives_the_size_asked_for() -> None:
    spec = InputSpec(size=32)
    for transform in (pretrain_transform(spec), finetune_transform(spec), eval_transform(spec)):
        tensor = transform(PHOTO)
        assert tensor.shape == (3, 32, 32)
        assert tensor.dtype == torch.float32


def test_evaluation_is_the_centre_crop_normalised_in_rgb() -> None:
    spec = InputSpec(size=60, crop_ratio=1.0, mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 1.0))
    expected = np.asarray(PHOTO)[:, 15:75].transpose(2, 0, 1) / 255
    expected = (expected - np.array([0.5, 0.25, 0.0])[:, None, None]) / np.array([0.5, 0.25, 1])[
        :, None, None
    ]
    found = eval_transform(spec)(PHOTO).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_older_files_know_neither_interpolation_nor_squash() -> None:
    spec = InputSpec(size=32, crop_ratio=0.9, interpolation="bicubic", squash=True)
    assert InputSpec.from_dict(spec.to_dict()) == spec
    old = {"size": 32, "mean": [0.5] * 3, "std": [0.5] * 3, "crop_ratio": 0.9}
    assert InputSpec.from_dict(old) == InputSpec(32, (0.5,) * 3, (0.5,) * 3, 0.9, "bilinear", False)
    with pytest.raises(ValueError, match="trilinear"):
        InputSpec.from_dict({**old, "interpolation": "trilinear"})


def test_flips_happen_half_of_the_time_or_never() -> None:
    """On a picture that is dark at left, the dark side says which way it was turned."""
    ramp = Image.fromarray(np.tile(np.arange(64, dtype=np.uint8) * 4, (64, 1))).convert("RGB")
    for flip, low, high in ((True, 0.35, 0.65), (False, 0.0, 0.0)):
        transform = pretrain_transform(InputSpec(size=16), flip=flip, min_scale=0.9)
        torch.manual_seed(0)
        turned = 0
        for _ in range(100):
            image = transform(ramp)
            turned += bool(image[..., :4].mean() > image[..., -4:].mean())
        assert low <= turned / 100 <= high


def test_the_spec_survives_a_checkpoint() -> None:
    spec = InputSpec(size=48, mean=(0.1, 0.2, 0.3), crop_ratio=1.0)
    assert InputSpec.from_dict(spec.to_dict()) == spec

"""Which features a network has, and their order over images and processes."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from instdisc.errors import UserError
from instdisc.features.extract import build_extractor, default_features, extract_features
from instdisc.images.sets import read_folder
from instdisc.images.transforms import InputSpec, eval_transform
from instdisc.networks.backbones import Embedding, build_backbone
from instdisc.networks.weights import Weights
from instdisc.training import dist
from instdisc.training.dist import Process, init_process
from instdisc.training.seed import seeded

SPEC = InputSpec(size=64)


def build_weights(arch: str = "resnet18") -> Weights:
    with seeded(0, "test"):
        model = Embedding(build_backbone(arch), 8).eval()
    return Weights("test", model.backbone, model, SPEC, {})


@torch.inference_mode()
def test_names_mean_what_they_say() -> None:
    weights = build_weights()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    expected = {
        "embedding": weights.embedding(images) if weights.embedding else None,
        "backbone": normalize(weights.backbone(images)),
        "conv3": normalize(weights.backbone.stages(images)["conv3"].mean((2, 3))),
    }
    for name, rows in expected.items():
        found = build_extractor(weights, name)(images)
        torch.testing.assert_close(found, rows)
        torch.testing.assert_close(found.norm(dim=1), torch.ones(2))
    kinds = {build_extractor(weights, name).what for name in expected}
    assert len(kinds) == 3


def test_networks_of_other_names_have_other_features() -> None:
    weights = build_weights()
    twin = dataclasses.replace(weights, backbone=build_backbone("resnet18", stem="small"))
    assert build_extractor(weights, "backbone").what != build_extractor(twin, "backbone").what


def test_network_without_projection() -> None:
    weights = dataclasses.replace(build_weights(), embedding=None)
    assert default_features(weights) == "backbone"
    assert default_features(build_weights()) == "embedding"
    with pytest.raises(UserError, match="use --features backbone"):
        build_extractor(weights, "embedding")


@torch.inference_mode()
def test_linear_layers_that_were_never_trained_are_not_used() -> None:
    """Those of an import that the file lacked are random."""
    whole = build_weights("alexnet")
    missing = {"missing": ["classifier.1.weight", "classifier.1.bias"]}
    weights = dataclasses.replace(whole, embedding=None, pretraining=missing)
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    found = build_extractor(weights, "backbone")
    features: torch.nn.Module = weights.backbone.trunk.features
    torch.testing.assert_close(found(images), normalize(features(images).mean((2, 3))))
    assert found.what != build_extractor(whole, "backbone").what


def test_rows_are_in_the_order_of_the_images(image_tree: Path) -> None:
    images = read_folder(image_tree / "train", "images", "train")
    process = Process(0, 1, torch.device("cpu"))
    rows = extract_features(
        lambda x: x.mean((2, 3)), images, SPEC, process, batch_size=5, workers=1
    )
    transform = eval_transform(SPEC)
    expected = torch.stack([transform(images.open(i)).mean((1, 2)) for i in range(len(images))])
    torch.testing.assert_close(rows, expected)


def test_unreadable_image_is_named(image_tree: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "bad.png").write_bytes(b"nothing")
    images = read_folder(tmp_path, "images", "train")
    with pytest.raises(UserError, match=r"bad\.png"):
        extract_features(lambda x: x, images, SPEC, Process(0, 1, torch.device("cpu")))


def test_more_processes_than_images(
    image_tree: Path, run_ranks: Callable[[Callable[[int], object]], list[int | None]]
) -> None:
    images = read_folder(image_tree / "val", "images", "val").subset([3])
    alone = Process(0, 1, torch.device("cpu"))
    expected = extract_features(lambda x: x.mean((2, 3)), images, SPEC, alone)

    def work(rank: int) -> None:
        process = init_process("cpu")
        rows = extract_features(lambda x: x.mean((2, 3)), images, SPEC, process)
        torch.testing.assert_close(rows, expected)
        dist.close()

    assert run_ranks(work) == [0, 0]

"""Converted weights through Detectron2's checkpointer into the detectors of detection_configs/."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.modeling import build_backbone, build_model
from torch import Tensor

from instdisc.export import detectron2_backbones  # noqa: F401 # registers AlexNet and VGG16
from instdisc.export.contract import Source
from instdisc.export.verify import reference_outputs
from transfer.detection import roi_heads  # noqa: F401 # registers the res5 head
from transfer.detection.recipe import adapt_to_weights, read_config
from transfer.detection.settings import find_config

CONFIGS = {"alexnet": "fast_alexnet", "vgg16": "fast_vgg16", "resnet50": "faster_r50"}
# Stages that a detector computes over the whole image, and the name of its output there.
SHOWN = {"alexnet": ("conv5", "conv5"), "vgg16": ("conv5", "conv5"), "resnet50": ("conv4", "res4")}


def detector_config(name: str, folder: Path) -> Any:
    cfg = read_config(find_config(Path(name)))
    cfg.MODEL.DEVICE = "cpu"
    adapt_to_weights(cfg, yaml.safe_load((folder / "detectron2.yaml").read_text()))
    return cfg


def load(model: Any, folder: Path) -> dict[str, Any]:
    """What the checkpointer could not place."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    checkpointer = DetectionCheckpointer(model)
    checkpointer.logger.disabled = True
    checkpointer.load(str(folder / "detectron2.pkl"))
    return model.state_dict()


def as_read(image: Tensor) -> list[dict[str, Tensor]]:
    return [{"image": image}]  # RGB, as FORMAT says


@pytest.mark.parametrize(
    "arch", ["alexnet", pytest.param("vgg16", marks=pytest.mark.slow), "resnet50"]
)
def test_the_papers_detectors_take_every_tensor_and_give_the_same_features(
    arch: str, source: Callable[..., Source], exported: Callable[..., Path]
) -> None:
    folder = exported(arch, "detectron2")
    cfg = detector_config(CONFIGS[arch], folder)
    assert cfg.INPUT.FORMAT == "RGB"
    model = build_model(cfg).eval()
    state = load(model, folder)
    # The detector's own new layers stay unset; nothing of the backbone does.
    unset = sorted(name for name, value in state.items() if not value.isfinite().all())
    new = ("proposal_generator.", "roi_heads.box_predictor.")
    assert [name for name in unset if not name.startswith(new)] == []
    image = torch.randint(0, 256, (3, 96, 112), dtype=torch.uint8)
    stage, name = SHOWN[arch]
    with torch.no_grad():
        found = model.backbone(model.preprocess_image(as_read(image)).tensor)[name]
        expected = reference_outputs(source(arch), image[None])[stage]
    scale = float(expected.abs().max())
    assert float((found[..., : expected.shape[2], : expected.shape[3]] - expected).abs().max()) < (
        1e-4 * scale
    )
    if arch == "resnet50":
        with torch.no_grad():
            last = model.roi_heads.res5(expected)
        reference = reference_outputs(source(arch), image[None])["conv5"]
        assert float((last - reference).abs().max()) < 1e-4 * float(reference.abs().max())


def test_resnet18s_backbone_loads_with_its_config(
    source: Callable[..., Source], exported: Callable[..., Path]
) -> None:
    folder = exported("resnet18", "detectron2")
    cfg = detector_config("faster_r18", folder)
    cfg.MODEL.RESNETS.OUT_FEATURES = ["res5"]
    model = build_backbone(cfg).eval()
    state = load(model, folder)
    assert all(value.isfinite().all() for value in state.values())
    original = source("resnet18")
    images = torch.randint(0, 256, (1, 3, 96, 96), dtype=torch.uint8)
    expected = reference_outputs(original, images)
    with torch.no_grad():
        found = model(expected["pixels"])["res5"]
    assert float((found - expected["conv5"]).abs().max()) < 1e-4 * float(expected["conv5"].max())

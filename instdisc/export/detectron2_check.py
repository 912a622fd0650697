"""Opens detectron2.pkl through Detectron2 itself, for verification.

The images take Detectron2's own way in: its channel order, its normalisation inside the model.
"""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import detectron2
import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import get_cfg
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.layers import ShapeSpec
from detectron2.modeling import GeneralizedRCNN, build_backbone, build_box_head
from torch import Tensor, nn
from torchvision.transforms.v2.functional import to_pil_image

from instdisc.export import detectron2_backbones  # noqa: F401 # registers AlexNet and VGG16
from instdisc.export.contract import Loaded, Source, build_unset, record_outputs
from instdisc.export.to_detectron2 import OUT_FEATURE, SIDECAR, WEIGHTS
from instdisc.names import STAGES

RESNET_STAGES = ("stem", "res2", "res3", "res4", "res5")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Detectron2 tells of missing tensors in its log only; `verify` tells of them itself."""
    loggers = [logging.getLogger(name) for name in ("detectron2", "fvcore")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _build_detector(cfg: Any) -> Any:
    """Backbone and box head inside Detectron2's detector, which normalises the images."""
    backbone: Any = build_unset(lambda: build_backbone(cfg))
    roi_heads = nn.Module()
    if OUT_FEATURE in backbone.output_shape():
        side = cfg.MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION
        channels = backbone.output_shape()[OUT_FEATURE].channels
        shape = ShapeSpec(channels=channels, height=side, width=side)
        roi_heads.box_head = build_unset(lambda: build_box_head(cfg, shape))
    return GeneralizedRCNN(
        backbone=backbone,
        proposal_generator=None,
        roi_heads=roi_heads,
        pixel_mean=cfg.MODEL.PIXEL_MEAN,
        pixel_std=cfg.MODEL.PIXEL_STD,
        input_format=cfg.INPUT.FORMAT,
    ).eval()


def _read(image: Tensor, channel_order: str) -> dict[str, Tensor]:
    """One RGB image `(3, H, W)` as Detectron2's dataset mapper hands it to the model."""
    array = convert_PIL_to_numpy(to_pil_image(image), channel_order)
    return {"image": torch.as_tensor(array.transpose(2, 0, 1).copy())}


def load_detectron2(folder: Path, source: Source) -> Loaded:
    """Opens weights and sidecar as a user would: config, builder, DetectionCheckpointer."""
    resnet = source.arch.startswith("resnet")
    cfg = get_cfg()
    cfg.merge_from_file(str(folder / SIDECAR))
    if resnet:
        cfg.MODEL.RESNETS.NORM = "FrozenBN"
        cfg.MODEL.RESNETS.OUT_FEATURES = list(RESNET_STAGES)
    model = _build_detector(cfg)
    with _quiet():
        DetectionCheckpointer(model).load(str(folder / WEIGHTS))

    def outputs(images: Tensor) -> dict[str, Tensor]:
        read = [_read(image, cfg.INPUT.FORMAT) for image in images]
        pixels = model.preprocess_image(read).tensor
        if resnet:
            with torch.no_grad():
                maps = model.backbone(pixels)
            found = {stage: maps[name] for stage, name in zip(STAGES, RESNET_STAGES, strict=True)}
        else:
            # One region, the whole image, pooled as in pretraining.
            maps = record_outputs(model.backbone, model.backbone.stage_modules, pixels)
            trunk = source.backbone.trunk
            last_pool = trunk.get_submodule("features")[-1]  # type: ignore[index] # Sequential
            region = trunk.get_submodule("avgpool")(last_pool(maps["conv5"]))
            taps = {"fc6": "fc_relu1", "fc7": "fc_relu2"}
            found = {**maps, **record_outputs(model.roi_heads.box_head, taps, region)}
        return {**found, "pixels": pixels}

    tensors = model.state_dict()
    if resnet:  # the file leaves the prefix out
        tensors = {name.removeprefix("backbone."): tensor for name, tensor in tensors.items()}
    return Loaded({"detectron2": detectron2.__version__}, tensors, outputs)

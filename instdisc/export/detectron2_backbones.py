"""AlexNet and VGG16 as Detectron2 backbones, which it does not ship (section 4.5, Fast R-CNN).

Importing this module registers `build_alexnet_backbone` and `build_vgg16_backbone`. Both give one
map, `conv5`, of stride 16: the last pooling is left out, the pooling of regions takes its place.
There are no norms; the converter folds them. `MODEL.BACKBONE.FREEZE_AT: 1` fixes conv1, as the
paper does.
"""

from typing import Any

import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone
from fvcore.nn import weight_init
from torch import Tensor, nn

from instdisc.export.to_detectron2 import OUT_FEATURE
from instdisc.names import STAGES
from instdisc.networks.backbones import build_backbone


class PlainBackbone(Backbone):
    """The convolutions of AlexNet or VGG16 under torchvision's names.

    Attributes:
        features: the layers up to conv5's last ReLU.
        stage_modules: where conv1..conv5 end, as names of submodules.
    """

    def __init__(self, arch: str, *, freeze_at: int = 0) -> None:
        super().__init__()
        with torch.device("meta"):  # the linear layers are built too, and are large
            network = build_backbone(arch, batch_norm=False)
        layers = network.trunk.get_submodule("features")
        assert isinstance(layers, nn.Sequential), f"{arch} is not a plain network"
        self.features = layers[:-1].to_empty(device="cpu")
        for layer in self.features:
            if isinstance(layer, nn.Conv2d):
                weight_init.c2_msra_fill(layer)  # as Detectron2 fills its own backbones
        self.stage_modules = dict(network.taps)
        self._out_features = [OUT_FEATURE]
        self._out_feature_channels = {OUT_FEATURE: network.channels[-1]}
        self._out_feature_strides = {OUT_FEATURE: 16}
        self.freeze(freeze_at)

    def freeze(self, freeze_at: int) -> "PlainBackbone":
        """Fixes the first `freeze_at` of conv1..conv5."""
        for stage in STAGES[:freeze_at]:
            end = int(self.stage_modules[stage].rpartition(".")[2])
            self.features[: end + 1].requires_grad_(False)
        return self

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Normalised images `(B, 3, H, W)` -> `{"conv5": (B, C, H / 16, W / 16)}`."""
        return {OUT_FEATURE: self.features(images)}


def _build(arch: str, cfg: Any, input_shape: ShapeSpec) -> PlainBackbone:
    assert input_shape.channels == 3, f"{arch} takes RGB images"
    return PlainBackbone(arch, freeze_at=cfg.MODEL.BACKBONE.FREEZE_AT)


@BACKBONE_REGISTRY.register()
def build_alexnet_backbone(cfg: Any, input_shape: ShapeSpec) -> PlainBackbone:
    """AlexNet from a Detectron2 config."""
    return _build("alexnet", cfg, input_shape)


@BACKBONE_REGISTRY.register()
def build_vgg16_backbone(cfg: Any, input_shape: ShapeSpec) -> PlainBackbone:
    """VGG16 from a Detectron2 config."""
    return _build("vgg16", cfg, input_shape)

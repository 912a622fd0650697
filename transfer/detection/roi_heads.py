"""The C4 box head for every ResNet here: res5 on each region, then the predictor.

Detectron2's own Res5ROIHeads builds bottleneck blocks only, so a ResNet-18 cannot have one, and has
no place for the extra norm of MoCo's recipe. Both are registered here as one head.
"""

from typing import Any

from detectron2.layers import get_norm
from detectron2.modeling import ROI_HEADS_REGISTRY
from detectron2.modeling.backbone.resnet import BasicBlock, ResNet
from detectron2.modeling.roi_heads import Res5ROIHeads
from torch import nn

BASIC_DEPTHS = (18, 34)


@ROI_HEADS_REGISTRY.register()
class TransferRes5ROIHeads(Res5ROIHeads):
    """Res5ROIHeads with basic blocks for ResNet-18, and `TRANSFER.RES5_NORM` after them."""

    @classmethod
    def _build_res5_block(cls, cfg: Any) -> tuple[nn.Sequential, int]:
        resnets = cfg.MODEL.RESNETS
        if resnets.DEPTH in BASIC_DEPTHS:
            channels = 8 * resnets.RES2_OUT_CHANNELS
            blocks = ResNet.make_stage(
                BasicBlock,
                2,
                stride_per_block=[2, 1],
                in_channels=channels // 2,
                out_channels=channels,
                norm=resnets.NORM,
            )
            res5 = nn.Sequential(*blocks)
        else:
            res5, channels = super()._build_res5_block(cfg)
        if cfg.TRANSFER.RES5_NORM:
            res5.add_module("norm", get_norm(cfg.TRANSFER.RES5_NORM, channels))
        return res5, channels

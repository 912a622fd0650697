"""Heads that Detectron2 lacks: res5 for every ResNet here, and dropout after fc6 and fc7.

Its own Res5ROIHeads builds bottleneck blocks only, so a ResNet-18 cannot have one, and has no place
for the extra norm of MoCo's recipe. Both are registered here as one head.
"""

from typing import Any

from detectron2.layers import get_norm
from detectron2.modeling import ROI_HEADS_REGISTRY
from detectron2.modeling.backbone.resnet import BasicBlock, ResNet
from detectron2.modeling.roi_heads import Res5ROIHeads
from torch import nn

from instdisc.errors import UserError

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


def add_dropout(model: nn.Module, share: float) -> None:
    """Puts dropout after the linear layers of the box head; no tensor gets another name."""
    if not share:
        return
    head: Any = getattr(model.roi_heads, "box_head", None)
    layers = (
        [name for name, _ in head.named_children() if name.startswith("fc_relu")] if head else []
    )
    if not layers or not 0 < share < 1:
        raise UserError(
            f"TRANSFER.FC_DROPOUT {share:g}: expected a share from 0 to 1, and a box head with "
            "linear layers (MODEL.ROI_BOX_HEAD.NUM_FC)"
        )
    for name in layers:
        setattr(head, name, nn.Sequential(getattr(head, name), nn.Dropout(share)))

"""timm's networks as Detectron2 backbones with a feature pyramid.

Importing this module registers `build_timm_fpn_backbone`. The network is `TRANSFER.TIMM`; its maps
of strides 4, 8, 16 and 32 are called res2 to res5, so that every config with FPN fits.
"""

import pickle
from pathlib import Path
from typing import Any

import torch
import yaml
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone
from detectron2.modeling.backbone.fpn import FPN, LastLevelMaxPool
from torch import Tensor, nn

from instdisc.errors import UserError
from instdisc.export.to_detectron2 import AUTHOR, SIDECAR, WEIGHTS
from instdisc.images.transforms import InputSpec
from instdisc.names import TIMM
from instdisc.networks.timm_backbones import TimmBackbone, build_timm
from instdisc.runs.folders import atomic_file, write_text

LEVELS = {4: "res2", 8: "res3", 16: "res4", 32: "res5"}
PROBE = (64, 96)  # an image whose sides differ, as a detector's do
PLACE = "backbone.bottom_up.network.trunk."  # of the network's tensors in a detector


class TimmPyramid(Backbone):
    """A timm network's maps by stride.

    Attributes:
        network: the network; of layers after the last map the tensors are kept, and fixed.
        stages: name of the map -> stage of the network.
    """

    def __init__(self, network: TimmBackbone, *, norm: str, freeze_at: int) -> None:
        super().__init__()
        self.network = network
        self.stages = find_levels(network)
        channels = dict(zip(network.stage_names, network.channels, strict=True))
        self._out_features = list(self.stages)
        self._out_feature_channels = {name: channels[s] for name, s in self.stages.items()}
        self._out_feature_strides = {name: stride for stride, name in LEVELS.items()}
        self._set_norms(norm, freeze_at)
        self._fix(freeze_at)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Normalised images `(B, 3, H, W)` -> res2 to res5, `(B, C, H / stride, W / stride)`."""
        maps = self.network.stages(images)
        return {name: maps[stage] for name, stage in self.stages.items()}

    def _set_norms(self, norm: str, freeze_at: int) -> None:
        from timm.layers.norm_act import convert_sync_batchnorm, freeze_batch_norm_2d

        if norm == "FrozenBN":
            freeze_batch_norm_2d(self.network.trunk)
        elif norm in ("BN", "SyncBN") and not freeze_at:
            if norm == "SyncBN":
                self.network.trunk = convert_sync_batchnorm(self.network.trunk)
        else:
            raise UserError(
                f"MODEL.RESNETS.NORM {norm} with MODEL.BACKBONE.FREEZE_AT {freeze_at}: a timm "
                "network takes FrozenBN, or BN or SyncBN (of one or more GPUs) with FREEZE_AT 0"
            )

    def _fix(self, freeze_at: int) -> None:
        """Fixes what feeds res2, ... up to `freeze_at`, and what feeds no map at all."""
        if freeze_at == 1:
            raise UserError(
                "MODEL.BACKBONE.FREEZE_AT 1: the stem of a timm network has no name: give 0, or 2 "
                "to fix everything up to the map of stride 4"
            )
        self.network.eval()
        with torch.enable_grad():
            maps = self(torch.zeros(1, 3, *PROBE))
        named = [p for p in self.network.parameters() if p.requires_grad]
        used = {id(p) for p in _inputs(list(maps.values()), named)}
        fixed = _inputs([maps[name] for name in list(maps)[: max(freeze_at - 1, 0)]], named)
        for parameter in (*fixed, *(p for p in named if id(p) not in used)):
            parameter.requires_grad_(False)


def _inputs(outputs: list[Tensor], parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that some outputs depend on."""
    total = [output.sum() for output in outputs if output.requires_grad]
    if not total or not parameters:
        return []
    found = torch.autograd.grad(
        torch.stack(total).sum(), parameters, allow_unused=True, retain_graph=True
    )
    return [p for p, gradient in zip(parameters, found, strict=True) if gradient is not None]


@torch.no_grad()
def find_levels(network: TimmBackbone) -> dict[str, str]:
    """res2 to res5 -> the stage of that stride, found by trying.

    Raises:
        UserError: the network has no such maps, or takes images of one size only.
    """
    try:
        maps = network.eval().stages(torch.zeros(1, 3, *PROBE))
    except (RuntimeError, AssertionError, ValueError, IndexError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{network.arch} does not take images of any size ({reason}): a detector needs that; "
            "take a convolutional network, such as timm:convnext_tiny"
        ) from None
    strides = {
        stage: PROBE[0] / found.shape[-2]
        for stage, found in maps.items()
        if PROBE[0] * found.shape[-1] == PROBE[1] * found.shape[-2]
    }
    levels = {
        name: stage
        for stride, name in LEVELS.items()
        for stage, own in strides.items()
        if own == stride  # of several the last
    }
    if len(levels) < len(LEVELS):
        found = ", ".join(f"{stride:g}" for stride in strides.values()) or "none"
        raise UserError(
            f"{network.arch} has maps of strides {found}, and a feature pyramid needs 4, 8, 16 and "
            "32: take a convolutional network, such as timm:convnext_tiny"
        )
    return levels


@BACKBONE_REGISTRY.register()
def build_timm_fpn_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> FPN:
    """A pyramid on the network of `TRANSFER.TIMM`, random until its weights are loaded."""
    assert input_shape.channels == 3, "timm's networks take RGB images"
    pyramid = TimmPyramid(
        build_timm(cfg.TRANSFER.TIMM),
        norm=cfg.MODEL.RESNETS.NORM,
        freeze_at=cfg.MODEL.BACKBONE.FREEZE_AT,
    )
    return FPN(
        bottom_up=pyramid,
        in_features=cfg.MODEL.FPN.IN_FEATURES,
        out_channels=cfg.MODEL.FPN.OUT_CHANNELS,
        norm=cfg.MODEL.FPN.NORM,
        top_block=LastLevelMaxPool(),
        fuse_type=cfg.MODEL.FPN.FUSE_TYPE,
    )


def save_timm(folder: Path, network: TimmBackbone, spec: InputSpec) -> None:
    """Writes a network's tensors under a detector's names, and what the config must be told."""
    find_levels(network)
    tensors = {
        PLACE + name: tensor.cpu().numpy()
        for name, tensor in network.trunk.state_dict().items()
        if not name.endswith("num_batches_tracked")
    }
    content: dict[str, Any] = {
        "model": tensors,
        "__author__": AUTHOR,
        "matching_heuristics": False,
    }
    with atomic_file(folder / WEIGHTS) as file:
        pickle.dump(content, file, protocol=4)
    told = {
        "VERSION": 2,
        "INPUT": {"FORMAT": "RGB"},
        "MODEL": {
            "PIXEL_MEAN": [round(255 * value, 6) for value in spec.mean],
            "PIXEL_STD": [round(255 * value, 6) for value in spec.std],
            "BACKBONE": {"NAME": "build_timm_fpn_backbone"},
        },
        "TRANSFER": {"TIMM": network.arch.removeprefix(TIMM)},
    }
    write_text(folder / SIDECAR, yaml.safe_dump(told, sort_keys=True))

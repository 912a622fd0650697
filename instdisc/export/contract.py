"""What the converters share: the network to convert, and what a library made of its file."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from instdisc.errors import UserError
from instdisc.images.transforms import InputSpec
from instdisc.networks.backbones import (
    AnyBackbone,
    Backbone,
    Embedding,
    restore_backbone,
)
from instdisc.networks.recording import recorded_outputs
from instdisc.networks.timm_backbones import TimmBackbone
from instdisc.runs.checkpoint import load_checkpoint, weights_hash

# The linear layers that transfer with AlexNet and VGG16, and the ReLU behind each.
FC_LAYERS = {
    "alexnet": {"fc6": "classifier.1", "fc7": "classifier.4"},
    "vgg16": {"fc6": "classifier.0", "fc7": "classifier.3"},
}
FC_TAPS = {
    "alexnet": {"fc6": "classifier.2", "fc7": "classifier.5"},
    "vgg16": {"fc6": "classifier.1", "fc7": "classifier.4"},
}


@dataclasses.dataclass(frozen=True)
class Source:
    """The network to convert.

    Attributes:
        backbone: in eval mode, float32, on the CPU, without its projection.
        spec: the pixels it wants.
        weights_sha256: hash of the checkpoint's trunk.
        hashes: those by which result rows may name it: with its projection, and without.
        pretraining: what the checkpoint knows of its training.
    """

    backbone: AnyBackbone
    spec: InputSpec
    weights_sha256: str
    hashes: frozenset[str] = frozenset()
    pretraining: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def arch(self) -> str:
        """Its name in `instdisc.networks.backbones.ARCHS`, or timm:NAME."""
        return self.backbone.arch

    @property
    def small_stem(self) -> bool:
        """Whether its first layers are those for 32 pixels; VGG16 has only one kind."""
        return self.backbone.stem == "small" and self.arch != "vgg16"

    @property
    def taps(self) -> dict[str, str]:
        """Where one of the paper's networks computes conv1..conv5."""
        assert isinstance(self.backbone, Backbone)
        return dict(self.backbone.taps)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights under torchvision's names, or timm's."""
        return {k: v.detach() for k, v in self.backbone.trunk.state_dict().items()}


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A converted file after the target library opened it.

    Attributes:
        library: name and version.
        tensors: every backbone tensor of the library's model, under the file's names.
        outputs: RGB bytes `(B, 3, H, W)` -> what the library computes from them: the stages, and
            where the library has them `fc6`, `fc7`, `features`, `pixels` (the normalised
            images) and `transform` (the images after its evaluation pipeline).
    """

    library: dict[str, str]
    tensors: dict[str, Tensor]
    outputs: Callable[[Tensor], dict[str, Tensor]]


def build_source(payload: Mapping[str, Any]) -> Source:
    """Rebuilds the network of a backbone checkpoint for conversion."""
    model = restore_backbone(payload)
    backbone = model.backbone if isinstance(model, Embedding) else model
    source = Source(
        backbone.eval(),
        InputSpec.from_dict(payload["input"]),
        weights_hash(payload["trunk"]),
        frozenset(weights_hash(each.state_dict()) for each in (model, backbone)),
        payload.get("pretraining") or {},
    )
    broken = [name for name, tensor in source.tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise UserError(
            f"{len(broken)} tensors hold NaN or infinity, {broken[0]} first: train anew"
        )
    return source


def load_source(path: Path) -> Source:
    """Reads a backbone.pt for conversion."""
    return build_source(load_checkpoint(path, "backbone"))


def require_buildable(source: Source, library: str) -> None:
    """Refuses timm's networks and the 32-pixel stem, which the library cannot build."""
    if not isinstance(source.backbone, Backbone):
        raise UserError(
            f"{library} does not build {source.arch}, only the paper's networks: export it with "
            "`--to timm`"
        )
    if source.small_stem:
        raise UserError(
            f"{library} builds {source.arch} only with the ImageNet stem, and this one was trained "
            "with the 32-pixel stem: export it with `--to timm`, or pretrain with --stem imagenet"
        )


def normalize(images: Tensor, mean: Any, std: Any) -> Tensor:
    """Bytes -> [0, 1] -> zero mean, unit variance; `(B, 3, H, W)`."""
    pixels = images.float() / 255
    return (pixels - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)


@torch.no_grad()
def record_outputs(model: nn.Module, taps: Mapping[str, str], inputs: Tensor) -> dict[str, Tensor]:
    """Outputs of the named modules in one forward pass, and `features`, the model's own."""
    modules = {label: model.get_submodule(name) for label, name in taps.items()}
    with recorded_outputs(modules) as found:
        features = model(inputs)
    return {**found, "features": features}


@torch.no_grad()
def record_timm(backbone: TimmBackbone, inputs: Tensor) -> dict[str, Tensor]:
    """The same of a timm network, as timm itself gives them."""
    return {**backbone.stages(inputs), "features": backbone(inputs)}


def build_unset(build: Callable[[], nn.Module]) -> nn.Module:
    """Builds a model full of NaN, so that a tensor which no file fills cannot look right.

    It also saves the random initialisation: three seconds for VGG16.
    """
    with torch.device("meta"):
        model = build()
    model = model.to_empty(device="cpu")
    for tensor in model.state_dict().values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
    return model.eval()

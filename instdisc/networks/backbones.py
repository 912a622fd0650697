"""The paper's four backbones, their conv1..conv5 taps, and the loading of any (section 4.2).

The networks are torchvision's, their weights keep torchvision's names. AlexNet and VGG16 get batch
norm after every convolution, so that they train from random initialisation; the converters fold
it away where the target has none.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from instdisc.errors import UserError
from instdisc.names import ARCH_CHOICES, STAGES, TIMM, Stem
from instdisc.networks.recording import recorded_outputs
from instdisc.networks.timm_backbones import TimmBackbone, build_timm
from instdisc.training.seed import seeded


def _resnet(depth: int) -> Callable[[Stem, bool], nn.Module]:
    def build(stem: Stem, batch_norm: bool) -> nn.Module:
        if not batch_norm:
            raise UserError("a ResNet without batch norm is not one of the paper's backbones")
        trunk = getattr(torchvision.models, f"resnet{depth}")(weights=None)
        if stem == "small":  # 32-pixel images: no early downsampling
            # torch's default initialisation, as in the authors' code
            trunk.conv1 = nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)
            trunk.maxpool = nn.Identity()
        trunk.fc = nn.Identity()
        return trunk

    return build


def _with_batch_norm(features: nn.Sequential) -> nn.Sequential:
    layers: list[nn.Module] = []
    for layer in features:
        layers.append(layer)
        if isinstance(layer, nn.Conv2d):
            layers.append(nn.BatchNorm2d(layer.out_channels))
    return nn.Sequential(*layers)


def _alexnet(stem: Stem, batch_norm: bool) -> nn.Module:
    trunk = torchvision.models.alexnet(weights=None)
    if stem == "small":
        trunk.features[0] = nn.Conv2d(3, 64, 3, stride=1, padding=1)
    if batch_norm:
        trunk.features = _with_batch_norm(trunk.features)
    trunk.classifier = trunk.classifier[:-1]  # fc6 and fc7 stay, fc8 is the task's
    return trunk


def _vgg16(stem: Stem, batch_norm: bool) -> nn.Module:
    # The 3x3 stem suits 32 pixels as it is; `stem` changes nothing.
    build = torchvision.models.vgg16_bn if batch_norm else torchvision.models.vgg16
    trunk = build(weights=None)
    trunk.classifier = trunk.classifier[:-1]
    return trunk


@dataclasses.dataclass(frozen=True)
class Arch:
    """What the rest of the suite may know of a network.

    Attributes:
        build: makes the trunk from (stem, batch_norm).
        feature_dim: width of the trunk's output, before the 128-d projection.
        channels: width of conv1..conv5.
        taps: where conv1..conv5 are read: module names, or the number of a ReLU in `features`.
    """

    build: Callable[[Stem, bool], nn.Module]
    feature_dim: int
    channels: tuple[int, int, int, int, int]
    taps: tuple[str, ...] | tuple[int, ...]


# ResNet's conv1 is read after its max pooling, where Detectron2's stem ends too.
_RESNET_TAPS = ("maxpool", "layer1", "layer2", "layer3", "layer4")
ARCHS: dict[str, Arch] = {
    "alexnet": Arch(_alexnet, 4096, (64, 192, 384, 256, 256), (0, 1, 2, 3, 4)),
    "vgg16": Arch(_vgg16, 4096, (64, 128, 256, 512, 512), (1, 3, 6, 9, 12)),
    "resnet18": Arch(_resnet(18), 512, (64, 64, 128, 256, 512), _RESNET_TAPS),
    "resnet50": Arch(_resnet(50), 2048, (64, 256, 512, 1024, 2048), _RESNET_TAPS),
}


class Backbone(nn.Module):
    """A trunk with declared taps: `forward` gives the features, `stages` conv1..conv5."""

    def __init__(self, arch: str, *, stem: Stem = "imagenet", batch_norm: bool = True) -> None:
        super().__init__()
        entry = ARCHS[arch]
        self.arch = arch
        self.stem = stem
        self.batch_norm = batch_norm
        self.feature_dim = entry.feature_dim
        self.channels = entry.channels
        self.trunk = entry.build(stem, batch_norm)
        self.taps = dict(zip(STAGES, self._tap_names(entry.taps), strict=True))

    def _tap_names(self, taps: tuple[str, ...] | tuple[int, ...]) -> list[str]:
        if isinstance(taps[0], str):
            return [str(name) for name in taps]
        layers = self.trunk.features.named_children()  # type: ignore[union-attr] # Sequential
        relus = [f"features.{name}" for name, layer in layers if isinstance(layer, nn.ReLU)]
        return [relus[int(number)] for number in taps]

    @property
    def stage_names(self) -> tuple[str, ...]:
        """What the stages are called."""
        return STAGES

    def forward(self, images: Tensor) -> Tensor:
        """Features before the projection, `(B, feature_dim)`."""
        return self.trunk(images)

    def stages(self, images: Tensor) -> dict[str, Tensor]:
        """Feature maps conv1..conv5, each `(B, C, H, W)`, from one forward pass."""
        modules = {stage: self.trunk.get_submodule(name) for stage, name in self.taps.items()}
        with recorded_outputs(modules) as maps:
            self.trunk(images)
        return maps


AnyBackbone = Backbone | TimmBackbone


def build_backbone(arch: str, *, stem: Stem = "imagenet", batch_norm: bool = True) -> Backbone:
    """Builds one of the paper's backbones by name, randomly initialised."""
    if arch not in ARCHS:
        raise UserError(f"unknown arch {arch!r}: choose one of {', '.join(ARCHS)}")
    return Backbone(arch, stem=stem, batch_norm=batch_norm)


def build_any(
    arch: str, *, stem: Stem = "imagenet", batch_norm: bool = True, size: int | None = None
) -> AnyBackbone:
    """Builds any backbone by name, randomly initialised; `size` is what some of timm's need."""
    if not arch.startswith(TIMM):
        return build_backbone(arch, stem=stem, batch_norm=batch_norm)
    name = arch.removeprefix(TIMM)
    # A name of timm's own registry: a checkpoint must not lead to other files, nor to a download.
    if not re.fullmatch(r"\w[\w.]*", name):
        raise UserError(f"unknown arch {arch!r}: choose one of {', '.join(ARCH_CHOICES)}")
    return build_timm(name, size=size)


class StandardizedLinear(nn.Linear):
    """A linear layer with outputs of mean 0 and variance 1 over the batch, as batch norm has them.

    In evaluation, and for a single image, the running statistics take the batch's place.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.register_buffer("running_mean", torch.zeros(out_features))
        self.register_buffer("running_var", torch.ones(out_features))

    def forward(self, inputs: Tensor) -> Tensor:
        """`(B, in_features)` to `(B, out_features)`, in float32."""
        outputs = super().forward(inputs).float()
        over_batch = self.training and len(outputs) > 1
        return nn.functional.batch_norm(
            outputs, self.running_mean, self.running_var, training=over_batch
        )


class Embedding(nn.Module):
    """Backbone, linear projection, L2 normalisation: v = f(x), `(B, D)` unit rows (section 3).

    Args:
        backbone: gives `(B, feature_dim)`.
        dim: of the projection.
        standardized: the projection's dimensions are standardised over the batch.
    """

    def __init__(
        self, backbone: AnyBackbone, dim: int = 128, *, standardized: bool = False
    ) -> None:
        super().__init__()
        self.backbone = backbone
        layer = StandardizedLinear if standardized else nn.Linear
        self.projection = layer(backbone.feature_dim, dim)

    def forward(self, images: Tensor, *, normalized: bool = True) -> Tensor:
        """Unit vectors in float32, also under autocast: the objectives exponentiate them.

        Equation 1, the parametric softmax, has no normalisation: it takes the projection itself.
        """
        projected = self.projection(self.backbone(images)).float()
        return nn.functional.normalize(projected, dim=1) if normalized else projected


def build_untrained(config: Mapping[str, Any]) -> Embedding:
    """The network that a pretraining run of this configuration starts from."""
    with seeded(config["seed"], "init"):
        backbone = build_any(config["arch"], stem=config["stem"], size=config.get("image_size"))
        standardized = config.get("standardize_projection", False)  # older runs have no such key
        return Embedding(backbone, config["embedding_dim"], standardized=standardized)


def backbone_payload(model: Embedding | AnyBackbone) -> dict[str, Any]:
    """The network's part of a backbone checkpoint."""
    backbone = model.backbone if isinstance(model, Embedding) else model
    projection = None
    if isinstance(model, Embedding):
        projection = {k: v.detach().cpu() for k, v in model.projection.state_dict().items()}
    return {
        "arch": backbone.arch,
        "stem": backbone.stem,
        "batch_norm": backbone.batch_norm,
        "trunk": {k: v.detach().cpu() for k, v in backbone.trunk.state_dict().items()},
        "projection": projection,
    }


def restore_backbone(payload: Mapping[str, Any]) -> AnyBackbone | Embedding:
    """Rebuilds the network of a backbone checkpoint; with its projection if it has one."""
    backbone = build_any(
        payload["arch"],
        stem=payload["stem"],
        batch_norm=payload["batch_norm"],
        size=payload["input"]["size"] if payload["arch"].startswith(TIMM) else None,
    )
    backbone.trunk.load_state_dict(payload["trunk"], strict=True)
    projection = payload["projection"]
    if projection is None:
        return backbone
    dim, standardized = len(projection["weight"]), "running_mean" in projection
    model = Embedding(backbone, dim, standardized=standardized)
    model.projection.load_state_dict(projection, strict=True)
    return model


@torch.no_grad()
def num_parameters(model: nn.Module) -> int:
    """How many parameters a model has."""
    return sum(p.numel() for p in model.parameters())

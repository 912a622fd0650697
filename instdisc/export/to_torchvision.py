"""backbone.pt -> torchvision.pth, a state dict of torchvision's own network without its head.

    model = torchvision.models.resnet50()
    model.fc = torch.nn.Identity()      # AlexNet and VGG16: model.classifier[6]
    model.load_state_dict(torch.load("torchvision.pth", weights_only=True), strict=True)

VGG16 with batch norm is torchvision's `vgg16_bn`, bit for bit; AlexNet has no such twin there, so
its batch norms are folded.
"""

from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn

from instdisc.export.contract import (
    FC_TAPS,
    Loaded,
    Source,
    build_unset,
    normalize,
    record_outputs,
    require_buildable,
)
from instdisc.export.fold import fold_trunk
from instdisc.runs.checkpoint import torch_file

FILE = "torchvision.pth"


def torchvision_name(source: Source) -> str:
    """The builder in torchvision.models that takes the weights."""
    bn = "_bn" if source.arch == "vgg16" and source.backbone.batch_norm else ""
    return source.arch + bn


def to_torchvision(source: Source) -> dict[str, Tensor]:
    """Weights under the names of the builder that `torchvision_name` gives."""
    require_buildable(source, "torchvision")
    if source.arch == "alexnet":
        return fold_trunk(source.backbone.trunk)
    return source.tensors


def save_torchvision(folder: Path, source: Source) -> None:
    """Writes the state dict."""
    with torch_file(folder / FILE) as file:
        torch.save(to_torchvision(source), file)


def _taps(model: nn.Module, source: Source) -> dict[str, str]:
    """Where torchvision's network computes conv1..conv5."""
    if source.arch.startswith("resnet"):
        return source.taps
    features = model.get_submodule("features")
    relus = [
        f"features.{n}" for n, layer in features.named_children() if isinstance(layer, nn.ReLU)
    ]
    own = source.backbone.trunk.get_submodule("features").named_children()
    numbers = [f"features.{n}" for n, layer in own if isinstance(layer, nn.ReLU)]
    taps = {stage: relus[numbers.index(name)] for stage, name in source.taps.items()}
    return {**taps, **FC_TAPS[source.arch]}


def load_torchvision(folder: Path, source: Source) -> Loaded:
    """Opens the state dict as a user would: torchvision's builder, strict loading."""

    def build() -> nn.Module:
        model = getattr(torchvision.models, torchvision_name(source))(weights=None)
        if source.arch.startswith("resnet"):
            model.fc = nn.Identity()
        else:
            model.classifier[6] = nn.Identity()
        return model

    model = build_unset(build)
    state = torch.load(folder / FILE, map_location="cpu", weights_only=True)
    model.load_state_dict(state, strict=True)
    taps = _taps(model, source)

    def outputs(images: Tensor) -> dict[str, Tensor]:
        # A state dict carries no pixel statistics: the user brings the checkpoint's.
        return record_outputs(model, taps, normalize(images, source.spec.mean, source.spec.std))

    return Loaded({"torchvision": torchvision.__version__}, model.state_dict(), outputs)

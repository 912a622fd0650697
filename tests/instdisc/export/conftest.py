"""Networks to convert whose batch norms are far from the identity, and their converted files."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.v2.functional import pil_to_tensor

from instdisc.export.contract import Source
from instdisc.export.verify import CONVERTERS
from instdisc.images.transforms import InputSpec
from instdisc.networks.backbones import Backbone, backbone_payload, build_backbone

# None of the numbers is ImageNet's, so that no default of a library can pass for them.
SPEC = InputSpec(size=96, mean=(0.5, 0.45, 0.4), std=(0.25, 0.2, 0.3), crop_ratio=0.875)


def random_backbone(arch: str, **kwargs: Any) -> Backbone:
    """A network in which no tensor is what a library would start with."""
    generator = torch.Generator().manual_seed(1)
    with torch.device("meta"):  # its own initialisation is slow
        backbone = build_backbone(arch, **kwargs)
    backbone.to_empty(device="cpu")

    def uniform(tensor: Tensor, low: float, high: float) -> None:
        tensor.detach().uniform_(low, high, generator=generator)

    for module in backbone.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            bound = (6 / module.weight[0].numel()) ** 0.5  # keeps the variance behind a ReLU
            uniform(module.weight, -bound, bound)
            if module.bias is not None:
                uniform(module.bias, -0.1, 0.1)
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            uniform(module.weight, 0.5, 1.5)
            uniform(module.bias, -0.3, 0.3)
            uniform(module.running_mean, -0.5, 0.5)
            uniform(module.running_var, 0.3, 2.0)
            module.num_batches_tracked.fill_(7)
    return backbone


def make_payload(arch: str, **kwargs: Any) -> dict[str, Any]:
    backbone = random_backbone(arch, **kwargs)
    pretraining = {"config": {"epochs": 200}, "dataset": "noise", "epoch": 3, "demo": True}
    return {**backbone_payload(backbone), "input": SPEC.to_dict(), "pretraining": pretraining}


@pytest.fixture(scope="session")
def payload() -> Callable[..., dict[str, Any]]:
    """Makes the payload of a backbone checkpoint."""
    return make_payload


@pytest.fixture(scope="session")
def source() -> Callable[..., Source]:
    """Makes a network to convert; the same one for the same arguments."""
    made: dict[tuple[Any, ...], Source] = {}

    def make(arch: str, **kwargs: Any) -> Source:
        key = (arch, *sorted(kwargs.items()))
        if key not in made:
            made[key] = Source(random_backbone(arch, **kwargs).eval(), SPEC, "")
        return made[key]

    return make


@pytest.fixture(scope="session")
def exported(
    source: Callable[..., Source], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Path]]:
    """Makes a folder with the files of one target; do not write into it."""
    made: dict[tuple[str, str], Path] = {}

    def make(arch: str, target: str) -> Path:
        if (arch, target) not in made:
            folder = tmp_path_factory.mktemp(f"{arch}-{target}")
            CONVERTERS[target].save(folder, source(arch))  # type: ignore[index] # a Literal
            made[arch, target] = folder
        return made[arch, target]

    yield make
    for folder in made.values():  # VGG16 is half a gigabyte each time
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def photos(shared_data: Path) -> Tensor:
    """Two photographs as RGB bytes, `(2, 3, 64, 64)`."""
    paths = sorted((shared_data / "imagenet-sample-100").glob("*.JPEG"))[:2]
    images = [Image.open(path).convert("RGB").resize((64, 64)) for path in paths]
    return torch.stack([pil_to_tensor(image) for image in images])

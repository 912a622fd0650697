"""Which of the paper's networks a set of tensors is, told by names and shapes (section 4.2)."""

import dataclasses
import re
from collections.abc import Mapping

from instdisc.errors import UserError
from instdisc.names import Stem
from instdisc.networks.backbones import ARCHS

Shapes = Mapping[str, tuple[int, ...]]
# Residual blocks per stage, whether they are bottlenecks -> depth.
RESNET_DEPTHS: dict[tuple[tuple[int, ...], bool], int] = {
    ((2, 2, 2, 2), False): 18,
    ((3, 4, 6, 3), False): 34,
    ((3, 4, 6, 3), True): 50,
    ((3, 4, 23, 3), True): 101,
    ((3, 8, 36, 3), True): 152,
    ((3, 24, 36, 3), True): 200,
}
VGG_DEPTHS = {8: 11, 10: 13, 13: 16, 16: 19}
# The linear layers, which torchvision numbers differently because of its dropout layers.
FC_NAMES = {
    "alexnet": {"fc6": "classifier.1", "fc7": "classifier.4"},
    "vgg16": {"fc6": "classifier.0", "fc7": "classifier.3"},
}


@dataclasses.dataclass(frozen=True)
class Network:
    """Arguments of `build_backbone`."""

    arch: str
    stem: Stem
    batch_norm: bool


def _shape(shapes: Shapes, name: str, dims: int) -> tuple[int, ...]:
    shape = shapes.get(name, ())
    if len(shape) != dims:
        raise UserError(f"{name} is missing or of another shape: the file holds no whole network")
    return shape


def _resnet(shapes: Shapes) -> Network:
    blocks = []
    for stage in range(1, 5):
        numbers = {name.split(".")[1] for name in shapes if name.startswith(f"layer{stage}.")}
        blocks.append(len(numbers))
    bottleneck = "layer1.0.conv3.weight" in shapes
    depth = RESNET_DEPTHS.get((tuple(blocks), bottleneck))
    stem = _shape(shapes, "conv1.weight", 4)
    inner = _shape(shapes, "layer1.0.conv2.weight", 4)
    looks = f"a ResNet-{depth}" if depth else f"a residual network of {blocks} blocks"
    if stem[1] != 3:
        looks += f" for {stem[1]}-channel images"
    if inner[0] != inner[1]:
        looks += f" with grouped convolutions (ResNeXt, {inner[0] // max(inner[1], 1)} groups)"
    elif (stem[0], inner[0]) != (64, 64):
        looks += f" {max(stem[0], inner[0]) / 64:g} times as wide"
    if stem[2:] not in ((7, 7), (3, 3)):
        looks += f" with a {stem[2]}x{stem[3]} stem"
    if looks not in ("a ResNet-18", "a ResNet-50"):
        raise _not_ours(looks)
    return Network(f"resnet{depth}", "imagenet" if stem[2] == 7 else "small", True)


def _plain(shapes: Shapes) -> Network:
    convolutions = sorted(
        (int(match[1]), shape)
        for name, shape in shapes.items()
        if (match := re.fullmatch(r"features\.(\d+)\.weight", name)) and len(shape) == 4
    )
    kernels = [shape[2] for _, shape in convolutions]
    widths = tuple(shape[0] for _, shape in convolutions)
    batch_norm = any(name.endswith("running_mean") for name in shapes)
    if kernels[1:] == [5, 3, 3, 3]:
        if widths != ARCHS["alexnet"].channels:
            raise _not_ours(f"an AlexNet of widths {widths}")
        if kernels[0] not in (11, 3):
            raise _not_ours(f"an AlexNet with a {kernels[0]}x{kernels[0]} stem")
        return Network("alexnet", "imagenet" if kernels[0] == 11 else "small", batch_norm)
    depth = VGG_DEPTHS.get(len(kernels)) if set(kernels) == {3} else None
    if depth != 16:
        raise _not_ours(f"a VGG-{depth}" if depth else f"a plain network of kernels {kernels}")
    return Network("vgg16", "imagenet", batch_norm)


def _not_ours(looks: str) -> UserError:
    return UserError(
        f"the file holds {looks}, which is none of the paper's backbones ({', '.join(ARCHS)}): "
        "import one of these"
    )


def recognise(shapes: Shapes) -> Network:
    """Finds the network, or says what the tensors look like instead.

    Args:
        shapes: shapes of the tensors under torchvision's names.
    """
    if "layer1.0.conv1.weight" in shapes:
        return _resnet(shapes)
    if "features.0.weight" in shapes:
        return _plain(shapes)
    raise _not_ours("neither a ResNet nor a network of plain `features`")

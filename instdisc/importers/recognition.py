"""Which of the paper's networks a set of tensors is, told by names and shapes (section 4.2).

Imports no torch, so that a file can be inspected at once; a test compares the shapes with the
networks themselves.
"""

import dataclasses
import re
import typing
from collections.abc import Mapping

from instdisc.errors import UserError
from instdisc.names import ArchName, Stem

ARCHS = typing.get_args(ArchName)
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
# Widths of the convolutions; M is a max pooling.
PLAIN = {
    "alexnet": "64 M 192 M 384 256 256 M",
    "vgg16": "64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M",
}
FEATURE_DIMS = {"alexnet": 4096, "vgg16": 4096, "resnet18": 512, "resnet50": 2048}
_LAYOUTS = {depth: layout for layout, depth in RESNET_DEPTHS.items()}
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

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the trunk's tensors, in the order of its state dict."""
        return self._plain() if self.arch in PLAIN else self._resnet(int(self.arch[6:]))

    def _resnet(self, depth: int) -> dict[str, tuple[int, ...]]:
        (blocks, bottleneck), width = _LAYOUTS[depth], 64
        kernel = 7 if self.stem == "imagenet" else 3
        shapes = {"conv1.weight": (64, 3, kernel, kernel), **_norm("bn1", 64)}
        for stage, count in enumerate(blocks, 1):
            inner = 32 * 2**stage
            outer = 4 * inner if bottleneck else inner
            for block in range(count):
                start = f"layer{stage}.{block}."
                sizes = [(inner, width, 3), (inner, inner, 3)]
                if bottleneck:
                    sizes = [(inner, width, 1), (inner, inner, 3), (outer, inner, 1)]
                for i, (rows, columns, side) in enumerate(sizes, 1):
                    shapes[f"{start}conv{i}.weight"] = (rows, columns, side, side)
                    shapes |= _norm(f"{start}bn{i}", rows)
                if width != outer:
                    shapes[f"{start}downsample.0.weight"] = (outer, width, 1, 1)
                    shapes |= _norm(f"{start}downsample.1", outer)
                width = outer
        return shapes

    def _plain(self) -> dict[str, tuple[int, ...]]:
        first = 11 if self.stem == "imagenet" else 3
        kernels = [first, 5, 3, 3, 3] if self.arch == "alexnet" else [3] * 13
        shapes: dict[str, tuple[int, ...]] = {}
        place, width = 0, 3
        for layer in PLAIN[self.arch].split():
            if layer == "M":
                place += 1
                continue
            rows, side = int(layer), kernels.pop(0)
            shapes[f"features.{place}.weight"] = (rows, width, side, side)
            shapes[f"features.{place}.bias"] = (rows,)
            if self.batch_norm:
                shapes |= _norm(f"features.{place + 1}", rows)
            place, width = place + 2 + self.batch_norm, rows
        columns = width * (36 if self.arch == "alexnet" else 49)
        for name in FC_NAMES[self.arch].values():
            shapes |= {f"{name}.weight": (4096, columns), f"{name}.bias": (4096,)}
            columns = 4096
        return shapes


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    parts = ("weight", "bias", "running_mean", "running_var")
    shapes: dict[str, tuple[int, ...]] = {f"{name}.{part}": (width,) for part in parts}
    return {**shapes, f"{name}.num_batches_tracked": ()}


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
    batch_norm = any(re.fullmatch(r"features\.\d+\.running_mean", name) for name in shapes)
    if kernels[1:] == [5, 3, 3, 3]:
        if widths != (64, 192, 384, 256, 256):
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

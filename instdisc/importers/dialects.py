"""What there is to say about a dialect: how one peer lays out and names its checkpoints.

Names of tensors are those after a `module.` of data parallelism was taken away.
"""

import dataclasses
import re
from collections.abc import Callable, Collection

from instdisc.images.transforms import InputSpec


@dataclasses.dataclass(frozen=True)
class Evidence:
    """What a file must have to be recognised; every part that is given must hold.

    Attributes:
        top: entries of the file itself, all of them.
        any_top: entries of the file itself, at least one.
        no_top: entries that it must not have.
        keys: beginnings of tensor names, all of them.
        any_keys: beginnings of tensor names, at least one.
        no_keys: beginnings that no tensor may have.
    """

    top: tuple[str, ...] = ()
    any_top: tuple[str, ...] = ()
    no_top: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    any_keys: tuple[str, ...] = ()
    no_keys: tuple[str, ...] = ()

    def holds(self, top: Collection[str], names: Collection[str]) -> bool:
        """Whether a file with these entries and tensors shows it."""

        def has(start: str) -> bool:
            return any(name.startswith(start) for name in names)

        return (
            all(entry in top for entry in self.top)
            and (not self.any_top or any(entry in top for entry in self.any_top))
            and not any(entry in top for entry in self.no_top)
            and all(has(start) for start in self.keys)
            and (not self.any_keys or any(has(start) for start in self.any_keys))
            and not any(has(start) for start in self.no_keys)
        )


def same(name: str) -> str:
    """Torchvision's names already."""
    return name


def from_kuangliu(name: str) -> str:
    """CIFAR ResNets, and networks whose `features` alone were data parallel."""
    name = name.replace("shortcut.", "downsample.").replace("features.module.", "features.")
    return re.sub(r"^linear\.", "fc.", name)


def from_timm(name: str) -> str:
    """VGG's linear layers are convolutions in timm."""
    return name.replace("pre_logits.fc1.", "fc6.").replace("pre_logits.fc2.", "fc7.")


def from_sequential(name: str) -> str:
    """`nn.Sequential(*resnet.children())`: conv1, bn1, relu, maxpool, layer1..layer4."""
    number, _, rest = name.partition(".")
    names = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3", "7": "layer4"}
    return f"{names.get(number, number)}.{rest}"


_DETECTRON2_NAMES: tuple[tuple[str, str], ...] = (
    (r"^roi_heads\.box_head\.fc1\.", "fc6."),
    (r"^roi_heads\.box_head\.fc2\.", "fc7."),
    (r"^(backbone\.bottom_up\.|backbone\.|roi_heads\.(?=res5))", ""),
    (r"^stem\.conv1\.norm\.", "bn1."),
    (r"^stem\.", ""),
    (r"^res2\.", "layer1."),
    (r"^res3\.", "layer2."),
    (r"^res4\.", "layer3."),
    (r"^res5\.", "layer4."),
    (r"\.shortcut\.norm\.", ".downsample.1."),
    (r"\.shortcut\.", ".downsample.0."),
    (r"\.conv([123])\.norm\.", r".bn\1."),
)


def from_detectron2(name: str) -> str:
    """Backbone files, C4 detectors (res5 is in the heads) and FPN detectors."""
    for pattern, replacement in _DETECTRON2_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


@dataclasses.dataclass(frozen=True)
class Dialect:
    """One way to lay out a checkpoint.

    Attributes:
        name: what `--format` calls it.
        source: the public code that writes such files.
        roots: where the state dict may lie, as a path of keys; () is the file itself.
        prefixes: what may stand in front of the backbone's names; the first that fits counts.
        evidence: any of these identifies a file; none means: only when asked for.
        rename: turns a name behind the prefix into torchvision's; `fc6.` and `fc7.` stand for the
            linear layers of AlexNet and VGG16, which torchvision numbers differently.
        drop: beginnings of full names that are known and left out.
        heads: beginnings of renamed backbone names that are known and left out.
        siblings: entries beside the state dict that hold tensors and are left out.
        projection: a linear head followed by L2 normalisation, which is our projection: beginning
            of its full names, and a name whose presence makes it part of something deeper.
        input: how its networks were fed, where that is not ImageNet's customary way.
        small_input: the same for a 3x3 stem; None where such a stem is not known to be ours.
        refusal: why such files cannot be imported, if they cannot.
    """

    name: str
    source: str
    roots: tuple[tuple[str, ...], ...]
    prefixes: tuple[str, ...] = ("",)
    evidence: tuple[Evidence, ...] = ()
    rename: Callable[[str], str] = same
    drop: tuple[str, ...] = ()
    heads: tuple[str, ...] = ("fc.", "classifier.6.")
    siblings: tuple[str, ...] = ()
    projection: tuple[tuple[str, str], ...] = ()
    input: InputSpec = InputSpec()
    small_input: InputSpec | None = None
    refusal: str = ""

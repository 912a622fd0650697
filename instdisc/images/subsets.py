"""Which training images keep their labels (section 4.3), and which of those are held out.

A subset is a function of the sorted image list, the fraction and the seed: every machine that has
the same images gets the same one, and a smaller fraction of a seed lies inside a larger one.
"""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from instdisc.errors import UserError
from instdisc.images.sets import ImageSet
from instdisc.names import SubsetMode
from instdisc.runs.log import LOGGER
from instdisc.training.seed import generator
from instdisc.untrusted.limits import read_limited

MIN_FRACTION = 0.001


@dataclasses.dataclass(frozen=True)
class LabeledSubset:
    """The images whose labels may be used.

    Attributes:
        images: those images, in the order of the whole set.
        indices: their places in the whole set, ascending, `(n,)`.
        mode: `random`, `balanced`, or `list` for a file.
        fraction: part of the whole set: as asked for, or what the list amounts to.
    """

    images: ImageSet
    indices: np.ndarray
    mode: str
    fraction: float

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def text(self) -> str:
        """The list as a file that `read_list` takes: a name per line, class folder included."""
        return "".join(os.fsdecode(name) + "\n" for name in self.images.names)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the list."""
        return hashlib.sha256(os.fsencode(self.text)).hexdigest()


def _permutation(count: int, seed: int, *key: int | str) -> np.ndarray:
    return torch.randperm(count, generator=generator(seed, "labels", *key)).numpy()


def _random_order(labels: np.ndarray, num_classes: int, seed: int) -> np.ndarray:
    return _permutation(len(labels), seed)


def _members(groups: np.ndarray) -> list[np.ndarray]:
    """The places of group 0, of group 1, ..., ascending."""
    order = np.argsort(groups, kind="stable")
    return np.split(order, np.cumsum(np.bincount(groups))[:-1])


def _balanced_order(labels: np.ndarray, num_classes: int, seed: int) -> np.ndarray:
    """Rounds over the classes, one image of each, classes in a new random order each round."""
    rounds = np.empty(len(labels), dtype=np.int64)
    for label, members in enumerate(_members(labels)):
        rounds[members] = _permutation(len(members), seed, "class", label)
    turns = np.empty(len(labels), dtype=np.int64)
    for number, members in enumerate(_members(rounds)):
        turns[members] = _permutation(num_classes, seed, "round", number)[labels[members]]
    return np.lexsort((turns, rounds))


def choose_labeled(
    images: ImageSet, fraction: float, *, mode: SubsetMode = "random", seed: int = 0
) -> LabeledSubset:
    """Draws the labelled images.

    Args:
        images: the whole training set.
        fraction: part of all images, 0.001 to 1; 0.01 of ImageNet is the customary 12,811.
        mode: `random` over all images, as in the paper; `balanced` gives every class the same
            number, or one more (class-balanced lists are what most later work uses).
        seed: of the draw.

    Raises:
        UserError: the fraction is out of range, or some class gets no image.
    """
    if not MIN_FRACTION <= fraction <= 1:
        raise UserError(f"a labelled fraction of {fraction:g}: choose one from {MIN_FRACTION} to 1")
    # Down, as published subsets do; the summand undoes 0.29 * 100 = 28.999...
    count = int(len(images) * fraction + 1e-9)
    orders = {"random": _random_order, "balanced": _balanced_order}
    order = orders[mode](images.labels, len(images.classes), seed)
    indices = np.sort(order[:count])
    missing = _missing_classes(images, indices)
    if missing:
        remedies = "raise the fraction"
        if mode == "random" and count >= len(images.classes):
            remedies += ", or use --subset balanced"
        raise UserError(
            f"{fraction:g} of {len(images):,} images is {count}, and seed {seed} gives no image "
            f"of {_few(missing)}: {remedies}"
        )
    return LabeledSubset(images.subset(indices), indices, mode, fraction)


def _missing_classes(images: ImageSet, indices: np.ndarray) -> list[str]:
    counts = np.bincount(images.labels[indices], minlength=len(images.classes))
    return [f"class {images.classes[label]}" for label in np.flatnonzero(counts == 0)]


def _few(items: Sequence[str]) -> str:
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")


def read_list(images: ImageSet, path: Path) -> LabeledSubset:
    """Reads a list of labelled images: a file name per line, as the published 1% and 10% lists.

    A name may carry its class folder (`n01440764/n01440764_10026.JPEG`), further folders before it,
    and a class number after it, which must then be right.

    Raises:
        UserError: the list is empty, or names images that this data set does not have.
    """
    try:
        lines = read_limited(path).splitlines()
    except FileNotFoundError:
        raise UserError(f"--list {path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"--list {path} is a folder: name a file of image names") from None
    lines = [line.strip() for line in lines if line.strip()]
    if not lines:
        raise UserError(f"--list {path} is empty: expected a file name of an image per line")
    finder = _Finder(images)
    found = [finder.find(line, path) for line in lines]
    missing = [os.fsdecode(n) for n, index in zip(lines, found, strict=True) if index is None]
    if missing:
        how_many = "none" if len(missing) == len(lines) else f"{len(missing):,} not"
        raise UserError(
            f"--list {path}: of its {len(lines):,} names {how_many} among the {len(images):,} "
            f"training images of {images.dataset} ({_few(missing)}): is it of another data set?"
        )
    indices = np.unique(np.array(found, dtype=np.int64))
    if len(indices) < len(lines):
        LOGGER.warning(f"{path} names {len(lines) - len(indices)} images more than once")
    absent = _missing_classes(images, indices)
    if absent:
        raise UserError(f"--list {path} has no image of {_few(absent)}: add some to the list")
    fraction = len(indices) / len(images)
    return LabeledSubset(images.subset(indices), indices, "list", fraction)


class _Finder:
    """Finds images by name, with or without their folders."""

    def __init__(self, images: ImageSet) -> None:
        self.images = images
        names = images.names.tolist()
        self.by_name = {name: index for index, name in enumerate(names)}
        self.by_file: dict[bytes, list[int]] = {}
        for index, name in enumerate(names):
            self.by_file.setdefault(name.rpartition(b"/")[2], []).append(index)

    def find(self, line: bytes, path: Path) -> int | None:
        """The place of the image that a line names; None if there is none."""
        index = self._find_name(line, path)
        if index is not None:
            return index
        name, _, label = line.rpartition(b" ")
        if not label.isdigit():
            return None
        index = self._find_name(name.strip(), path)
        if index is not None and self.images.labels[index] != int(label):
            raise UserError(
                f"--list {path}: {os.fsdecode(name)} has class number {int(label)} there and "
                f"{self.images.labels[index]} here: the list is of another data set, or remove "
                "its numbers"
            )
        return index

    def _find_name(self, name: bytes, path: Path) -> int | None:
        rest = name
        while rest:
            if rest in self.by_name:
                return self.by_name[rest]
            rest = rest.partition(b"/")[2]
        if b"/" in name:  # its folder is another one, so it is another image
            return None
        places = self.by_file.get(name, [])
        if len(places) > 1:
            raise UserError(
                f"--list {path}: {os.fsdecode(name)} is in {len(places)} class folders: "
                "write the class folder before the name"
            )
        return places[0] if places else None


def hold_out(labels: np.ndarray, fraction: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits images into those to train on and those to choose settings on, class by class.

    Every class keeps at least one image; a class of one image holds none out.

    Args:
        labels: class numbers, `(n,)`.
        fraction: part that is held out.
        seed: of the draw.

    Returns:
        Places that are kept and places that are held out, ascending.
    """
    held: list[np.ndarray] = []
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = min(max(round(len(members) * fraction), 1), len(members) - 1)
        held.append(members[_permutation(len(members), seed, "held", int(label))[:count]])
    out = np.sort(np.concatenate(held))
    return np.setdiff1d(np.arange(len(labels)), out), out

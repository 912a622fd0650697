"""Image sets with a fixed order and a fingerprint.

The memory bank has a row per image, so "which image is number i" is part of a run's meaning: names
are sorted byte by byte, and the fingerprint of the list is kept with the bank.
"""

import contextlib
import dataclasses
import hashlib
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image

from instdisc.errors import UserError, is_out_of_memory
from instdisc.images import archives, demo
from instdisc.images.decode import to_rgb
from instdisc.images.locations import DataLocation
from instdisc.runs.folders import runs_root
from instdisc.training.seed import generator

Split = Literal["train", "val"]
EXTENSIONS = (b".jpg", b".jpeg", b".png", b".bmp", b".ppm", b".pgm", b".tif", b".tiff", b".webp")
SCANNED = 5000  # images that are decoded before training; evenly spaced if there are more
# What Pillow raises for bytes that are no good image; its decoders do not agree on one kind.
IMAGE_ERRORS = (
    *(OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError),
    *(struct.error, zlib.error, LookupError, TypeError, ArithmeticError),
)


@dataclasses.dataclass(frozen=True)
class ImageSet:
    """A list of images in a fixed order.

    Attributes:
        dataset: what it is called in results; `demo` for the embedded images.
        split: `train` or `val`.
        classes: class names, in label order.
        names: file names relative to the root, or record names, `(N,)` of bytes.
        labels: class numbers, `(N,)`.
        sizes: bytes per file, `(N,)`; zero for records inside an archive.
        root: folder that `names` are relative to.
        pixels: `(N, H, W)` or `(N, H, W, 3)` uint8 for archives of small images, else None.
        skipped: files that were left out because they are no images.
    """

    dataset: str
    split: str
    classes: tuple[str, ...]
    names: np.ndarray
    labels: np.ndarray
    sizes: np.ndarray
    root: Path | None = None
    pixels: np.ndarray | None = None
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    @property
    def is_demo(self) -> bool:
        """Whether results on it are demo results."""
        return self.dataset == "demo"

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of names, labels, and file sizes or pixels; the same on every machine."""
        digest = hashlib.sha256(repr(self.classes).encode())
        digest.update(b"\n".join(self.names.tolist()))
        digest.update(self.labels.astype("<i8").tobytes())
        digest.update(self.sizes.astype("<i8").tobytes())
        if self.pixels is not None:
            digest.update(np.ascontiguousarray(self.pixels).data)
        return digest.hexdigest()

    def name(self, index: int) -> str:
        """What to call image `index` in a message."""
        name = os.fsdecode(self.names[index])
        return str(self.root / name) if self.root is not None else name

    @contextlib.contextmanager
    def opened(self, index: int) -> Iterator[Image.Image]:
        """Image `index` with its size known and its pixels perhaps not decoded yet.

        Raises:
            UserError: opening or decoding it in the block failed; the message names the file.
            MemoryError: there is too little for it, which says nothing about the file.
        """
        if self.pixels is not None:
            yield Image.fromarray(self.pixels[index])
            return
        try:
            with Image.open(self.name(index)) as image:
                yield image
        except (*IMAGE_ERRORS, MemoryError) as error:
            if is_out_of_memory(error):
                raise MemoryError(f"{self.name(index)} did not fit") from None
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise UserError(f"{self.name(index)} is not a readable image ({reason})") from None

    def open(self, index: int) -> Image.Image:
        """Decodes image `index` to RGB.

        Raises:
            UserError: the file is no readable image; the message names it.
        """
        with self.opened(index) as image:
            return to_rgb(image)

    def subset(self, indices: Sequence[int] | np.ndarray) -> "ImageSet":
        """The images of `indices`, in that order."""
        chosen = np.asarray(indices)
        return dataclasses.replace(
            self,
            names=self.names[chosen],
            labels=self.labels[chosen],
            sizes=self.sizes[chosen],
            pixels=None if self.pixels is None else self.pixels[chosen],
        )


def _list_class(root: Path, folder: str) -> list[tuple[bytes, int]]:
    """Files below a class folder as (relative name, bytes); links are followed, not in circles."""
    found: list[tuple[bytes, int]] = []
    seen: set[str] = set()

    def refuse(error: OSError) -> None:  # os.walk would pass over the folder in silence
        raise UserError(
            f"{error.filename} cannot be listed ({error.strerror}): make it readable, or remove it"
        )

    for parent, folders, files in os.walk(root / folder, followlinks=True, onerror=refuse):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        for file in files:
            if not file.startswith("."):
                path = Path(parent, file)
                size = path.stat().st_size if path.exists() else -1
                found.append((os.fsencode(path.relative_to(root)), size))
    return found


def read_folder(root: Path, dataset: str, split: Split, *, skip_bad: bool = False) -> ImageSet:
    """Lists an ImageFolder tree: `root/<class>/<image>`, sorted byte by byte.

    Args:
        root: the folder that holds the class folders.
        dataset: what results call it.
        split: `train` or `val`.
        skip_bad: leave out empty files and files that are no images, instead of refusing.
    """
    if not root.is_dir():
        raise UserError(f"{root} does not exist: expected <data>/train/<class>/<image>")
    # Unlike an entry's own is_dir, that of a path takes a link that leads to itself for no folder.
    classes = sorted((p.name for p in root.iterdir() if p.is_dir()), key=os.fsencode)
    classes = [name for name in classes if not name.startswith(".")]
    if not classes:
        raise UserError(
            f"{root} holds no class folders: expected <data>/train/<class>/<image>, "
            "or the official files of CIFAR or Fashion-MNIST"
        )
    with ThreadPoolExecutor(min(32, len(classes))) as pool:
        listings = list(pool.map(lambda name: _list_class(root, name), classes))
    rows = [(n, size, label) for label, files in enumerate(listings) for n, size in files]
    bad = [n for n, size, _ in rows if size <= 0 or not n.lower().endswith(EXTENSIONS)]
    skipped = [str(root / os.fsdecode(name)) for name in sorted(bad)]
    if skipped and not skip_bad:
        raise UserError(bad_images_message(skipped))
    refused = set(bad)
    rows = sorted(row for row in rows if row[0] not in refused)
    if not rows:
        raise UserError(f"{root} holds no images: expected <data>/train/<class>/<image>")
    names, sizes, labels = zip(*rows, strict=True)
    return ImageSet(
        dataset=dataset,
        split=split,
        classes=tuple(classes),
        names=np.array(names, dtype=np.bytes_),
        labels=np.array(labels, dtype=np.int64),
        sizes=np.array(sizes, dtype=np.int64),
        root=root,
        skipped=tuple(skipped),
    )


def bad_images_message(names: Sequence[str]) -> str:
    """One line about files that are no readable images."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"{len(names)} of the files are not readable images: {shown}: "
        "remove or replace them, or pass --skip-bad-images"
    )


def load_images(location: DataLocation, split: Split, *, skip_bad: bool = False) -> ImageSet:
    """Opens a split of a data set; makes the demo set first if that is what is asked for.

    A folder without `train/` is itself the training set and has no validation split.
    """
    if location.kind == "demo":
        root = demo.write_classification(runs_root() / "demo-data")
        return read_folder(root / split, "demo", split)
    assert location.root is not None
    if location.kind != "folder":
        name, classes, pixels, labels = archives.read(location.kind, location.root, split)
        names = np.array([f"{split}/{i:06d}".encode() for i in range(len(labels))])
        sizes = np.zeros(len(labels), dtype=np.int64)
        return ImageSet(name, split, classes, names, labels, sizes, pixels=pixels)
    inner = location.root / split
    if split == "train" and not inner.is_dir():
        inner = location.root
    return read_folder(inner, location.root.resolve().name, split, skip_bad=skip_bad)


def has_split(location: DataLocation, split: Split) -> bool:
    """Whether a data set has this split."""
    if location.kind != "folder" or split == "train":
        return True
    assert location.root is not None
    return (location.root / split).is_dir() and (location.root / "train").is_dir()


def find_bad_images(images: ImageSet, limit: int = SCANNED) -> list[int]:
    """Decodes up to `limit` evenly spaced images; returns the indices of those that fail."""
    if images.pixels is not None:
        return []
    chosen = np.unique(np.linspace(0, len(images) - 1, min(limit, len(images))).astype(int))

    def is_bad(index: int) -> bool:
        try:
            images.open(int(index))
        except UserError:
            return True
        return False

    with ThreadPoolExecutor(min(32, (os.cpu_count() or 1) * 2)) as pool:
        return [int(i) for i, bad in zip(chosen, pool.map(is_bad, chosen), strict=True) if bad]


def random_subset(images: ImageSet, fraction: float, seed: int) -> ImageSet:
    """A random part of the images; a smaller fraction is inside a larger one of the same seed."""
    if fraction == 1.0:
        return images
    count = round(len(images) * fraction)
    if count < 2:
        raise UserError(
            f"a fraction of {fraction} of {len(images)} images leaves {count}: raise it"
        )
    order = torch.randperm(len(images), generator=generator(seed, "subset"))
    return images.subset(np.sort(order[:count].numpy()))

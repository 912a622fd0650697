"""Image sets with a fixed order and a fingerprint.

The memory bank has a row per image, so "which image is number i" is part of a run's meaning: names
are sorted byte by byte, and the fingerprint of the list is kept with the bank.
"""

import contextlib
import dataclasses
import hashlib
import io
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from instdisc.errors import DISK_ERRORS, UserError, is_out_of_memory, some_of
from instdisc.images import archives, demo
from instdisc.images.catalog import load_listing
from instdisc.images.decode import Jpeg, open_image, to_rgb
from instdisc.images.listing import Listing, list_folder
from instdisc.images.locations import IN_FILES, DataLocation
from instdisc.images.mapped import map_arrays, map_shared, write_arrays
from instdisc.runs.folders import runs_root
from instdisc.runs.log import LOGGER
from instdisc.training.cores import num_cores
from instdisc.training.seed import generator

Split = Literal["train", "val"]
UNLABELLED = ("",)  # the classes of a set without any
HASHED = 1 << 16  # images whose names are Python's at a time
MAPPED_FROM = 1 << 22  # images; the lists of fewer are sent to every process
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
        sizes: bytes per file, `(N,)`; zero for records of the official archives.
        root: folder that `names` are relative to; an archive, or a folder of archives.
        pixels: `(N, H, W)` or `(N, H, W, 3)` uint8 for archives of small images, else None.
        shards: tar archives that hold the files; none for files of their own.
        places: number of the archive and first byte in it, `(N, 2)`, where there are archives.
        skipped: files that were left out because they are no images.
        mapped: the file that names, labels, sizes and places are mapped from (`share_lists`).
    """

    dataset: str
    split: str
    classes: tuple[str, ...]
    names: np.ndarray
    labels: np.ndarray
    sizes: np.ndarray
    root: Path | None = None
    pixels: np.ndarray | None = None
    shards: tuple[Path, ...] = ()
    places: np.ndarray | None = None
    skipped: tuple[str, ...] = ()
    mapped: Path | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __getstate__(self) -> dict[str, Any]:
        """What is sent to other processes: mapped lists by the name of their file."""
        left_out = () if self.mapped is None else self._lists
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes over what was sent."""
        vars(self).update(state)
        if self.mapped is not None:
            vars(self).update(map_shared(self.mapped, self._lists))

    @property
    def _lists(self) -> tuple[str, ...]:
        return ("names", "labels", "sizes", *(("places",) if self.shards else ()))

    @property
    def is_demo(self) -> bool:
        """Whether results on it are demo results."""
        return self.dataset == "demo"

    @property
    def is_labelled(self) -> bool:
        """Whether its images have classes."""
        return self.classes != UNLABELLED

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of names, labels, and file sizes or pixels; the same on every machine."""
        digest = hashlib.sha256(repr(self.classes).encode())
        parts = [slice(first, first + HASHED) for first in range(0, len(self), HASHED)]
        for part in parts:
            digest.update((b"\n" if part.start else b"") + b"\n".join(self.names[part].tolist()))
        for numbers in (self.labels, self.sizes):
            for part in parts:
                digest.update(numbers[part].astype("<i8").tobytes())
        if self.pixels is not None:
            digest.update(np.ascontiguousarray(self.pixels).data)
        return digest.hexdigest()

    def name(self, index: int) -> str:
        """What to call image `index` in a message."""
        name = os.fsdecode(self.names[index])
        if self.places is not None:
            return str(self.shards[self.places[index, 0]] / name)
        return str(self.root / name) if self.root is not None else name

    @property
    def files(self) -> list[bytes]:
        """Paths of all files that the images are in."""
        if self.shards:
            return [os.fsencode(path) for path in self.shards]
        root = os.fsencode(self.root or "")
        return [os.path.join(root, name) for name in self.names.tolist()]  # noqa: PTH118 (bytes)

    def _read(self, index: int) -> str | io.BytesIO:
        """What can be opened: a file's name, or the bytes of a member of an archive."""
        if self.places is None:
            # Not a Path: joining one takes longer than opening the file.
            return os.path.join(str(self.root or ""), os.fsdecode(self.names[index]))  # noqa: PTH118
        shard, offset = self.places[index].tolist()
        with self.shards[shard].open("rb") as file:
            file.seek(offset)
            return io.BytesIO(file.read(int(self.sizes[index])))

    @contextlib.contextmanager
    def opened(self, index: int) -> Iterator[Image.Image | Jpeg]:
        """Image `index` with its size known and its pixels perhaps not decoded yet.

        Raises:
            UserError: opening or decoding it in the block failed; the message names the file.
            MemoryError: there is too little for it, which says nothing about the file.
            OSError: the disk fails, which says nothing about the file either.
        """
        if self.pixels is not None:
            yield Image.fromarray(self.pixels[index])
            return
        try:
            with open_image(self._read(index)) as image:
                yield image
        except (*IMAGE_ERRORS, MemoryError) as error:
            if is_out_of_memory(error):
                raise MemoryError(f"{self.name(index)} did not fit") from None
            if isinstance(error, OSError) and error.errno in DISK_ERRORS:
                raise OSError(error.errno, error.strerror, self.name(index)) from None
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
            places=None if self.places is None else self.places[chosen],
            mapped=None,
        )


def build_set(
    listing: Listing,
    root: Path,
    dataset: str,
    split: str,
    *,
    skip_bad: bool = False,
    classes: bool | None = None,
) -> ImageSet:
    """The images of a listing, with the classes that it gives them, if it does.

    Labels of a list file make the classes; else the folders in the root do.

    Args:
        listing: what there is.
        root: what was listed: a folder, a list file, an archive.
        dataset: what results call it.
        split: `train` or `val`.
        skip_bad: leave out empty files and files that are no images, instead of refusing.
        classes: whether folders are classes; None for "unless images lie beside them".
    """
    used = np.ones(len(listing.names), dtype=bool)
    inside, is_list = listing.tops >= 0, not listing.shards.size and not root.is_dir()
    folder = root.parent if is_list else root
    if classes is None:
        classes = not bool((listing.endings & ~inside).any())
    names: tuple[str, ...] = UNLABELLED
    labels = np.zeros(len(used), dtype=np.int64)
    if listing.labels.size:
        found, labels = np.unique(listing.labels, return_inverse=True)
        names = tuple(os.fsdecode(name) for name in found.tolist())
    elif classes and listing.folders.size:
        names, labels = tuple(os.fsdecode(n) for n in listing.folders.tolist()), listing.tops
        used = inside
        if stray := int((listing.endings & ~inside).sum()):
            LOGGER.warning(f"{stray} images beside the class folders of {root} are left out")
    elif not is_list:
        used = listing.endings & ~listing.hidden
        if others := int((~listing.endings & ~listing.hidden).sum()):
            LOGGER.info(f"{others} files of {root} are left out: their endings are no image's")
    bad = used & ((listing.sizes <= 0) | ~listing.endings)
    skipped = [str(folder / os.fsdecode(name)) for name in listing.names[bad].tolist()]
    if skipped and not skip_bad:
        gone = [os.fsdecode(n) for n in listing.names[listing.sizes < 0].tolist()]
        if is_list and gone:
            raise UserError(
                f"{root} names {len(gone)} files that do not exist: {some_of(gone)}: correct it, "
                "or pass --skip-bad-images"
            )
        raise UserError(bad_images_message(skipped))
    used = used & ~bad
    if not used.any():
        what = "no images" if classes and listing.folders.size else "no class folders and no images"
        raise UserError(
            f"{root} holds {what}: expected <data>/train/<class>/<image>, images in any folders, "
            ".tar archives, or the official files of CIFAR or Fashion-MNIST"
        )
    return ImageSet(
        dataset=dataset,
        split=split,
        classes=names,
        names=listing.names[used],
        labels=labels[used],
        sizes=listing.sizes[used],
        root=folder,
        shards=tuple(Path(os.fsdecode(path)) for path in listing.shards.tolist()),
        places=listing.places[used] if listing.shards.size else None,
        skipped=tuple(skipped),
    )


def read_folder(root: Path, dataset: str, split: Split, *, skip_bad: bool = False) -> ImageSet:
    """Lists an ImageFolder tree, `root/<class>/<image>`, anew; see `build_set`."""
    if not root.is_dir():
        raise UserError(f"{root} does not exist: expected <data>/train/<class>/<image>")
    return build_set(list_folder(root), root, dataset, split, skip_bad=skip_bad, classes=True)


def bad_images_message(names: Sequence[str]) -> str:
    """One line about files that are no readable images."""
    return (
        f"{len(names)} of the files are not readable images: {some_of(names)}: "
        "remove or replace them, or pass --skip-bad-images"
    )


def find_split(location: DataLocation, split: Split) -> Path | None:
    """The folder, list or archive of a split of images in files; None if there is none.

    A folder without `train/`, and a list or archive, is itself the training set; the validation
    set of `train.txt` is `val.txt` beside it, and so for every other ending.
    """
    root = location.root
    assert root is not None
    if root.is_dir():
        inner, has_splits = root / split, (root / "train").is_dir()
    else:
        inner, has_splits = root.with_name(split + root.suffix), root.stem == "train"
    if has_splits:
        return inner if inner.exists() else None
    return root if split == "train" else None


def load_images(location: DataLocation, split: Split, *, skip_bad: bool = False) -> ImageSet:
    """Opens a split of a data set; makes the demo set first if that is what is asked for."""
    if location.kind == "demo":
        root = demo.write_classification(runs_root() / "demo-data")
        return read_folder(root / split, "demo", split)
    assert location.root is not None
    if location.kind not in IN_FILES:
        name, classes, pixels, labels = archives.read(location.kind, location.root, split)
        names = np.array([f"{split}/{i:06d}".encode() for i in range(len(labels))])
        sizes = np.zeros(len(labels), dtype=np.int64)
        return ImageSet(name, split, classes, names, labels, sizes, pixels=pixels)
    path = find_split(location, split)
    if path is None:
        raise UserError(f"{location.root} has no {split}/: expected <data>/{split}/<class>/<image>")
    whole = location.root.resolve()
    name = whole.parent.name if whole.stem == "train" else whole.stem
    return build_set(
        load_listing(path),
        path,
        whole.name if whole.is_dir() else name,
        split,
        skip_bad=skip_bad,
        # In train/ and val/ there are class folders, and a picture beside them is none of the set.
        classes=True if path.is_dir() and path != location.root else None,
    )


def has_split(location: DataLocation, split: Split) -> bool:
    """Whether a data set has this split."""
    return location.kind not in IN_FILES or find_split(location, split) is not None


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

    with ThreadPoolExecutor(min(32, num_cores() * 2)) as pool:
        return [int(i) for i, bad in zip(chosen, pool.map(is_bad, chosen), strict=True) if bad]


def share_lists(images: ImageSet) -> ImageSet:
    """The same images, with the lists of a large set in a file that all processes can map.

    Where it cannot be written, each process has a copy of its own.
    """
    if len(images) < MAPPED_FROM or images.pixels is not None:
        return images
    lists = {name: getattr(images, name) for name in images._lists}
    digest = hashlib.sha256(images.fingerprint.encode())
    if images.places is not None:
        digest.update(np.ascontiguousarray(images.places, "<i8").data)
    path = (runs_root() / "listings" / f"{digest.hexdigest()[:32]}.lists").absolute()
    try:
        found = map_arrays(path, images._lists)
        fits = all(np.array_equal(found[name], each) for name, each in lists.items())
    except (OSError, ValueError):
        fits = False
    try:
        if not fits:
            write_arrays(path, lists)
        changes: dict[str, Any] = {"mapped": path, **map_arrays(path, images._lists)}
    except OSError:
        return images
    shared = dataclasses.replace(images, **changes)
    vars(shared)["fingerprint"] = images.fingerprint  # computed once
    return shared


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

"""Any folder of images as an image set: nested or flat, with or without classes."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from instdisc.errors import UserError
from instdisc.images.sets import EXTENSIONS, ImageSet


def _from_names(names: Sequence[bytes], sizes: Sequence[int], root: Path | None) -> ImageSet:
    return ImageSet(
        dataset="queries" if root is None else root.resolve().name,
        split="images",
        classes=("",),
        names=np.array(names, dtype=np.bytes_),
        labels=np.zeros(len(names), dtype=np.int64),
        sizes=np.array(sizes, dtype=np.int64),
        root=root,
    )


def read_tree(root: Path) -> ImageSet:
    """All images below a folder, sorted byte by byte; other files do not matter.

    Hidden files and folders are left out; links are followed, not in circles.
    """
    found: list[tuple[bytes, int]] = []
    seen: set[str] = set()
    for parent, folders, files in os.walk(root, followlinks=True):
        real = os.path.realpath(parent)
        folders[:] = [] if real in seen else [f for f in folders if not f.startswith(".")]
        if real in seen:
            continue
        seen.add(real)
        for name in files:
            path = Path(parent, name)
            if name.startswith(".") or not os.fsencode(name).lower().endswith(EXTENSIONS):
                continue
            if path.is_file() and (size := path.stat().st_size):
                found.append((os.fsencode(path.relative_to(root)), size))
    if not found:
        raise UserError(f"no images below {root}: name a folder that holds some")
    names, sizes = zip(*sorted(found), strict=True)
    return _from_names(names, sizes, root)


def read_files(paths: Sequence[str]) -> ImageSet:
    """Single image files, in the order in which they were named."""
    for path in map(Path, paths):
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise UserError(f"--query {path} {what}: name an image file")
    sizes = [Path(path).stat().st_size for path in paths]
    return _from_names([os.fsencode(path) for path in paths], sizes, None)

"""Any folder of images as an image set, classes or not; and single files."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from instdisc.errors import UserError
from instdisc.images.catalog import load_listing
from instdisc.images.sets import UNLABELLED, ImageSet, build_set


def read_tree(root: Path) -> ImageSet:
    """All images below a folder, sorted byte by byte; other files do not matter.

    Hidden files and folders are left out; links are followed, not in circles.
    """
    listing = load_listing(root)
    if not (listing.endings & ~listing.hidden & (listing.sizes > 0)).any():
        raise UserError(f"no images below {root}: name a folder that holds some")
    name = root.resolve().name
    return build_set(listing, root, name, "images", skip_bad=True, classes=False)


def read_files(paths: Sequence[str]) -> ImageSet:
    """Single image files, in the order in which they were named."""
    for path in map(Path, paths):
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "does not exist"
            raise UserError(f"--query {path} {what}: name an image file")
    return ImageSet(
        dataset="queries",
        split="images",
        classes=UNLABELLED,
        names=np.array([os.fsencode(path) for path in paths], dtype=np.bytes_),
        labels=np.zeros(len(paths), dtype=np.int64),
        sizes=np.array([Path(path).stat().st_size for path in paths], dtype=np.int64),
    )

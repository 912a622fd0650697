"""Which files a path holds, listed once and then kept on disk.

    runs/listings/<key>.npz   a listing, by the path that was listed

With it stand the times of every folder, list and archive that it was made from, taken before each
was read; another time makes a new listing. A file that was written over in place changes no folder:
the sizes of `NUM_PROBED` files are compared as well. Any of them may be deleted.
"""

import contextlib
import dataclasses
import hashlib
import os
import struct
import time
import zipfile
import zlib
from pathlib import Path

import numpy as np

from instdisc.images.listing import Listing, find_size, find_state, list_file, list_folder
from instdisc.images.shards import list_shards
from instdisc.runs.folders import atomic_file, runs_root

NUM_PROBED = 1000
# A folder that changed so shortly before (nanoseconds) may change again and keep its time.
SETTLED = 2_000_000_000


def list_images(path: Path) -> Listing:
    """Lists a folder, a list file, an archive, or a folder of nothing but archives."""
    if not path.is_dir():
        return list_shards([path]) if path.suffix.lower() == ".tar" else list_file(path)
    listing = list_folder(path)
    names = [os.fsdecode(n) for n in listing.names.tolist() if n.lower().endswith(b".tar")]
    if not names or listing.folders.size or listing.endings.any():
        return listing
    inside = list_shards([path / name for name in names])
    return dataclasses.replace(
        inside,
        watched=np.concatenate([listing.watched, inside.watched]),
        states=np.concatenate([listing.states, inside.states]),
    )


def _is_current(listing: Listing, root: bytes) -> bool:
    """Whether all that a listing was made from is as it was then."""
    try:
        if [list(find_state(path)) for path in listing.watched.tolist()] != listing.states.tolist():
            return False
        if listing.shards.size or not listing.names.size:
            return True
        for index in np.linspace(0, len(listing.names) - 1, NUM_PROBED).astype(int).tolist():
            path = os.path.join(root, listing.names[index])  # noqa: PTH118 (of bytes)
            size = find_size(Path(os.fsdecode(path)))
            if (-1 if size is None else size) != listing.sizes[index]:
                return False
    except OSError:
        return False
    return True


def _read(place: Path) -> Listing | None:
    try:
        with np.load(place) as arrays:
            return Listing(**arrays)
    except (OSError, ValueError, TypeError, LookupError, EOFError, RuntimeError, MemoryError):
        return None  # none, damaged, or of another version: made anew
    except (zipfile.BadZipFile, zlib.error, struct.error):
        return None  # zip files that are damaged in other ways


def load_listing(path: Path) -> Listing:
    """The listing of a path: the kept one if nothing has changed since, else a new one."""
    key = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    place = runs_root() / "listings" / f"{key}.npz"
    root = os.fsencode(path.absolute() if path.is_dir() else path.absolute().parent)
    kept = _read(place)
    if kept is not None and _is_current(kept, root):
        return kept
    now = time.time_ns()
    listing = list_images(path)
    if listing.states[:, :2].max() < now - SETTLED:
        # Without it the next start takes longer, and nothing else.
        with contextlib.suppress(OSError), atomic_file(place) as file:
            np.savez(file, **vars(listing))
    return listing

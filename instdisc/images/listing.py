"""Which files a folder or a list file holds, with one look at each."""

import contextlib
import dataclasses
import errno
import os
import re
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from instdisc.errors import UserError
from instdisc.runs.log import progress
from instdisc.untrusted.limits import read_limited

EXTENSIONS = (b".jpg", b".jpeg", b".png", b".bmp", b".ppm", b".pgm", b".tif", b".tiff", b".webp")
MAX_NAME = 4096  # bytes; what a path may have on Linux
CHUNK = 1000  # files that a thread looks at in one go
THREADS = 8
# In a list, what follows the image's name is its label.
LINE = re.compile(rb"(.*\.(?:jpe?g|png|bmp|p[pg]m|tiff?|webp)\"?)[ \t]*[ \t,][ \t]*(.*)", re.I)
HEADERS = (b"path", b"file", b"filename", b"image", b"name")
State = tuple[int, int, int, int, int]


@dataclasses.dataclass(frozen=True)
class Listing:
    """Files in the byte order of their names.

    Attributes:
        names: relative to the root, `(N,)` of bytes.
        sizes: in bytes, `(N,)`; -1 for a name that leads to no file.
        endings: whether a name ends as an image's does, `(N,)`.
        hidden: whether a folder on the way begins with a dot, `(N,)`.
        folders: folders directly in the root, in byte order, `(F,)`.
        tops: which of them a file is in, `(N,)`; -1 for none.
        labels: the label column of a list file, `(N,)` of bytes; `(0,)` where there is none.
        shards: archives that hold the files, `(S,)`; `(0,)` for files of their own.
        places: number of the archive and first byte in it, `(N, 2)`; `(0, 2)` for files.
        watched: folders and files that all this was read from, `(W,)`.
        states: their times, sizes, devices and inodes, `(W, 5)`.
    """

    names: np.ndarray
    sizes: np.ndarray
    endings: np.ndarray
    hidden: np.ndarray
    folders: np.ndarray
    tops: np.ndarray
    labels: np.ndarray
    shards: np.ndarray
    places: np.ndarray
    watched: np.ndarray
    states: np.ndarray


def build_listing(
    rows: list[tuple[bytes, int, Any]],
    folders: set[bytes],
    watched: dict[bytes, State],
    *,
    labelled: bool = False,
    shards: Sequence[bytes] = (),
) -> Listing:
    """A listing of (name, bytes, label or place) in any order; the names differ."""
    rows.sort(key=lambda row: row[0])
    names = [row[0] for row in rows]
    tops = sorted(folders)
    number = {top: index for index, top in enumerate(tops)}
    # Not from ".." and "/", which are no folders of the root.
    places = [number.get(n.partition(b"/")[0], -1) if b"/" in n else -1 for n in names]
    more = [row[2] for row in rows]
    return Listing(
        names=np.array(names, dtype=np.bytes_),
        sizes=np.array([row[1] for row in rows], dtype=np.int64),
        endings=np.array([n.lower().endswith(EXTENSIONS) for n in names], dtype=bool),
        hidden=np.array([n.startswith(b".") or b"/." in n for n in names], dtype=bool),
        folders=np.array(tops, dtype=np.bytes_),
        tops=np.array(places, dtype=np.int64),
        labels=np.array(more if labelled else [], dtype=np.bytes_),
        shards=np.array(shards, dtype=np.bytes_),
        places=np.array(more if shards else [], dtype=np.int64).reshape(-1, 2),
        watched=np.array(list(watched), dtype=np.bytes_),
        states=np.array(list(watched.values()), dtype=np.int64).reshape(-1, 5),
    )


def find_state(path: bytes | Path) -> State:
    """What changes when a folder or file does."""
    found = os.stat(path)  # noqa: PTH116 (of bytes)
    times = found.st_mtime_ns, found.st_ctime_ns, found.st_size
    return *times, found.st_dev % 2**63, found.st_ino % 2**63


def find_size(file: "os.DirEntry[bytes] | Path") -> int | None:
    """Bytes of a file by one call of the system; -1 if there is none; None for a folder."""
    try:
        found = file.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG):
            raise
        return -1
    return None if stat.S_ISDIR(found.st_mode) else found.st_size


def _look(entries: "Sequence[os.DirEntry[bytes]]") -> list[tuple[bytes, int | None]]:
    """Names with sizes; None for folders, which most systems tell without being asked."""
    return [(e.name, None if e.is_dir(follow_symlinks=False) else find_size(e)) for e in entries]


def _entries(folder: bytes) -> "list[os.DirEntry[bytes]]":
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise _refuse(folder, error) from None


def _refuse(folder: bytes, error: OSError) -> UserError:
    """What to say about a folder that cannot be listed."""
    return UserError(
        f"{os.fsdecode(folder)} cannot be listed ({error.strerror}): make it readable, or remove it"
    )


def _walk(root: bytes, top: bytes, start: State) -> tuple[list[Any], dict[bytes, State]]:
    """Files below a folder of the root; links are followed, not in circles."""
    rows: list[tuple[bytes, int, None]] = []
    watched: dict[bytes, State] = {}
    seen = {start[3:]}
    stack = [top]
    while stack:
        folder = stack.pop()
        path = os.path.join(root, folder)  # noqa: PTH118 (of bytes)
        try:
            state = find_state(path)
        except OSError as error:
            raise _refuse(path, error) from None
        if state[3:] in seen:
            continue
        seen.add(state[3:])
        watched[path] = state
        inner = []
        for name, size in _look(_entries(path)):
            if size is None:
                inner.append(folder + b"/" + name)
            elif not name.startswith(b"."):
                rows.append((folder + b"/" + name, size, None))
        stack += reversed(inner)
    return rows, watched


def list_folder(folder: Path) -> Listing:
    """All files below a folder but hidden ones, with one look at each.

    Folders directly in it that begin with a dot are left out; deeper ones are marked.
    """
    root = os.fsencode(folder.absolute())
    start = find_state(root)
    entries = _entries(root)
    rows: list[tuple[bytes, int, Any]] = []
    tops: list[bytes] = []
    watched = {root: start}
    with ThreadPoolExecutor(THREADS) as pool:
        parts = [entries[first : first + CHUNK] for first in range(0, len(entries), CHUNK)]
        for name, size in (each for part in pool.map(_look, parts) for each in part):
            if name.startswith(b"."):
                continue
            if size is None:
                tops.append(name)
            else:
                rows.append((name, size, None))
        walks = pool.map(lambda top: _walk(root, top, start), tops)
        for found, states in progress(walks, title="listing", total=len(tops), unit="folders"):
            rows += found
            watched |= states
    return build_listing(rows, set(tops), watched)


def _read_lines(path: Path) -> Iterator[tuple[int, bytes, bytes]]:
    """(number, name, label or nothing) of each line of a list file."""
    lines = read_limited(path).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    for number, line in enumerate(map(bytes.strip, lines), start=1):
        if len(line) > 3 * MAX_NAME:
            raise UserError(f"{path}, line {number}: no name of a file: write one image a line")
        if not line or (number == 1 and line.lower().split(b",")[0] in HEADERS):
            continue
        found = None if line.lower().endswith(EXTENSIONS) else LINE.fullmatch(line)
        name, label = (found[1], found[2]) if found else (line, b"")
        if name.startswith(b'"') and name.endswith(b'"'):
            name = name[1:-1].replace(b'""', b'"')
        if b"\0" in name + label or not 0 < len(name) <= MAX_NAME or len(label) > MAX_NAME:
            raise UserError(f"{path}, line {number}: no name of a file: write one image a line")
        yield number, name, label.strip(b'"')


def list_file(path: Path) -> Listing:
    """The files that a list names, one a line, each perhaps with a label behind it."""
    root = os.fsencode(path.absolute().parent)
    watched = {os.fsencode(path.absolute()): find_state(path)}
    lines: dict[bytes, tuple[int, bytes]] = {}
    for number, name, label in _read_lines(path):
        name = (b"/" if name.startswith(b"/") else b"") + b"/".join(
            part for part in name.split(b"/") if part not in (b"", b".")
        )
        name = name.removeprefix(root + b"/")
        if name in lines:
            raise UserError(
                f"{path} names {os.fsdecode(name)} in line {lines[name][0]} and in line {number}: "
                "a bank row is an image, so remove one"
            )
        lines[name] = number, label
    if not lines:
        raise UserError(f"{path} is empty: expected the path of an image per line")
    without = [number for number, label in lines.values() if not label]
    if 0 < len(without) < len(lines):
        raise UserError(f"{path}, line {without[0]}: no label, and other lines have one: add it")
    paths = {name: Path(os.fsdecode(os.path.join(root, name))) for name in lines}  # noqa: PTH118
    for parent in {file.parent for file in paths.values()}:
        with contextlib.suppress(OSError):
            watched[os.fsencode(parent)] = find_state(parent)
    names = list(lines)
    with ThreadPoolExecutor(THREADS) as pool:
        sizes = list(pool.map(find_size, paths.values(), chunksize=CHUNK))
    rows = [(n, -1 if s is None else s, lines[n][1]) for n, s in zip(names, sizes, strict=True)]
    tops = {n.partition(b"/")[0] for n in names if b"/" in n} - {b"", b".."}
    return build_listing(rows, tops, watched, labelled=not without)

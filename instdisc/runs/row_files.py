"""Rows of one large table in several files, each written by the process that holds its rows.

    last.pt       names the files, the rows of each, and a checksum for every chunk of them
    last.rows/    the files: the numbers of the rows in order, little-endian, and nothing else

Files have new names in every save. last.pt is written when all of them are on disk, and takes the
place of the older one by a rename: a checkpoint is there as a whole or not at all. Files that
neither last.pt nor last.previous.pt names are outdated, or of a save that was killed; the next save
removes them. (torch.distributed.checkpoint has the same idea, and a pickle for its list of files.)
"""

import contextlib
import dataclasses
import re
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instdisc.errors import UserError
from instdisc.runs.checkpoint import DamagedFile, load_file, previous_of
from instdisc.runs.folders import atomic_file

CHUNK_BYTES = 1 << 23  # read or written at a time
KEPT_BYTES = 1 << 23  # of rows that change before they are written
DTYPES = {"float32": torch.float32, "float16": torch.float16}
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class RowSnapshot:
    """The rows of a tensor as they were when it was made, read once while they are changed.

    Whoever changes rows does it in `changing`, which first keeps those that have not been read.
    Kept rows take `KEPT_BYTES`; when they are more, a change waits until all rows have been read.
    As a context it ends the reading, also where that failed.
    """

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows
        self._lock = threading.Lock()
        self._next = 0  # the first row that has not been read
        self._kept: list[tuple[Tensor, Tensor]] = []
        self._done = threading.Event()

    def __enter__(self) -> "RowSnapshot":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._next = len(self._rows)
            self._kept.clear()
        self._done.set()

    @property
    def chunk_rows(self) -> int:
        """Rows that are read at a time."""
        return max(1, CHUNK_BYTES // (self._rows.shape[1] * self._rows.element_size()))

    @contextlib.contextmanager
    def changing(self, places: Tensor) -> Iterator[None]:
        """For changing the rows at `places`, `(B,)`."""
        if sum(rows.nbytes for _, rows in self._kept) > KEPT_BYTES:
            self._done.wait()
        if self._done.is_set():
            yield
            return
        with self._lock:
            unread = places[places >= self._next]
            self._kept.append((unread.cpu(), self._rows[unread].cpu()))
            yield

    def chunks(self) -> Iterator[Tensor]:
        """All rows in order, `chunk_rows` at a time, in memory that the next chunk uses again."""
        size = self.chunk_rows
        buffer = torch.empty(size, self._rows.shape[1], dtype=self._rows.dtype)
        for first in range(0, len(self._rows), size):
            part = buffer[: len(self._rows) - first]
            with self._lock:
                self._next = last = first + len(part)
                part.copy_(self._rows[first:last])
                # What was kept first is the oldest, and is written last.
                for places, rows in reversed(self._kept):
                    mine = (places >= first) & (places < last)
                    part[places[mine] - first] = rows[mine]
                self._kept = [each for each in self._kept if bool((each[0] >= last).any())]
            yield part


def _bytes_of(rows: Tensor) -> memoryview:
    return rows.numpy().reshape(-1).view(np.uint8).data


def write_row_file(
    checkpoint: Path, name: str, snapshot: RowSnapshot, first: int
) -> dict[str, Any]:
    """Writes the rows from number `first` on; what the checkpoint is to say of the file."""
    count, checksums = 0, []
    with atomic_file(_folder_of(checkpoint) / name) as file:
        for part in snapshot.chunks():
            content = _bytes_of(part)
            file.write(content)
            checksums.append(zlib.crc32(content))
            count += len(part)
    return {"name": name, "first": first, "last": first + count, "checksums": checksums}


def describe_rows(checkpoint: Path, rows: Tensor, files: list[dict[str, Any]]) -> dict[str, Any]:
    """The entry of a checkpoint whose rows are in `files`; `rows` are some of them."""
    return {
        "folder": _folder_of(checkpoint).name,
        "num_rows": files[-1]["last"],
        "dim": rows.shape[1],
        "dtype": str(rows.dtype).removeprefix("torch."),
        "chunk_rows": RowSnapshot(rows).chunk_rows,
        "files": files,
    }


def _folder_of(checkpoint: Path) -> Path:
    return checkpoint.with_suffix(".rows")


@dataclasses.dataclass(frozen=True)
class StoredRows:
    """Rows `(N, D)` that lie in files, as a checkpoint describes them.

    Attributes:
        source: the checkpoint, for messages.
        chunk_rows: rows for which there is a checksum each.
        files: path, first row, last row, and checksums of each, in order.
    """

    source: Path
    num_rows: int
    dim: int
    dtype: torch.dtype
    chunk_rows: int
    files: tuple[tuple[Path, int, int, tuple[int, ...]], ...]

    @classmethod
    def open(cls, entry: Any, checkpoint: Path) -> "StoredRows":
        """Reads a checkpoint's entry, which may hold anything; finds the files.

        Raises:
            DamagedFile: it is not such an entry, or a file is gone or has another size.
        """
        try:
            folder, dtype = entry["folder"], DTYPES[entry["dtype"]]
            n, dim, chunk = (int(entry[name]) for name in ("num_rows", "dim", "chunk_rows"))
            home = checkpoint.parent / folder
            files = tuple(
                (
                    home / each["name"],
                    int(each["first"]),
                    int(each["last"]),
                    tuple(map(int, each["checksums"])),
                )
                for each in entry["files"]
            )
            names = [folder, *(each["name"] for each in entry["files"])]
            holds = (
                min(n, dim, chunk) > 0
                and [0, *(last for _, _, last, _ in files)] == [*(f for _, f, _, _ in files), n]
                and all(f <= last and len(c) == -(-(last - f) // chunk) for _, f, last, c in files)
                and all(NAME.fullmatch(name) for name in names)
            )
        except (LookupError, TypeError, ValueError, OverflowError):
            holds = False
        if not holds:
            raise DamagedFile(f"{checkpoint} names no whole set of rows: use another checkpoint")
        stored = cls(checkpoint, n, dim, dtype, chunk, files)
        for path, first, last, _ in files:
            if not path.is_file() or path.stat().st_size != (last - first) * stored._row_bytes:
                raise DamagedFile(
                    f"{path}, which belongs to {checkpoint}, is gone or of another size: keep "
                    f"{folder}/ beside its checkpoint, or use another one"
                )
        return stored

    @property
    def _row_bytes(self) -> int:
        return self.dim * self.dtype.itemsize

    def _chunks(self, wanted: range) -> Iterator[tuple[int, Path, int, int, int]]:
        """(first row, file, offset in rows, rows, checksum) of the chunks that hold wanted rows."""
        for path, start, stop, checksums in self.files:
            low, high = max(start, wanted.start), min(stop, wanted.stop)
            if low >= high:
                continue
            for number in range((low - start) // self.chunk_rows, len(checksums)):
                offset = number * self.chunk_rows
                if start + offset >= high:
                    break
                count = min(self.chunk_rows, stop - start - offset)
                yield start + offset, path, offset, count, checksums[number]

    def read(self, wanted: range) -> Iterator[tuple[int, Tensor]]:
        """Number of the first row, and rows, of the chunks that hold wanted rows, one by one.

        Each is in memory that the next one uses again.

        Raises:
            DamagedFile: a checksum is wrong.
        """
        buffer = torch.empty(min(self.chunk_rows, self.num_rows), self.dim, dtype=self.dtype)
        for first, path, offset, count, checksum in self._chunks(wanted):
            rows = buffer[:count]
            content = _bytes_of(rows)
            with path.open("rb") as file:
                file.seek(offset * self._row_bytes)
                size = file.readinto(content)
            if size != len(content) or zlib.crc32(content) != checksum:
                raise DamagedFile(
                    f"{path}, which belongs to {self.source}, is damaged: use another"
                )
            yield first, rows

    def find_damage(self, rank: int, world_size: int) -> DamagedFile | None:
        """Reads a part of the rows that is this process's; the other processes read the others."""
        bounds = [self.num_rows * each // world_size for each in (rank, rank + 1)]
        try:
            for _ in self.read(range(*bounds)):
                pass
        except DamagedFile as damage:
            return damage
        return None


def open_rows(entry: Any, checkpoint: Path) -> "Tensor | StoredRows":
    """The rows of a checkpoint: in the checkpoint itself, or in files beside it."""
    return entry if isinstance(entry, Tensor) else StoredRows.open(entry, checkpoint)


def read_rows(table: "Tensor | StoredRows", target: Tensor, first: int = 0) -> None:
    """Fills `target` with the rows from number `first` on, wherever both lie."""
    if isinstance(table, Tensor):
        target.copy_(table[first : first + len(target)])
        return
    if table.dim != target.shape[1] or first + len(target) > table.num_rows:
        raise DamagedFile(
            f"{table.source} has {table.num_rows} x {table.dim} rows: use another one"
        )
    for start, rows in table.read(range(first, first + len(target))):
        low, high = max(start, first), min(start + len(rows), first + len(target))
        target[low - first : high - first] = rows[low - start : high - start].to(target.device)


def load_all_rows(entry: Any, checkpoint: Path) -> Tensor:
    """All rows of a checkpoint, `(N, D)`, in memory."""
    table = open_rows(entry, checkpoint)
    if isinstance(table, Tensor):
        return table
    rows = torch.empty(table.num_rows, table.dim, dtype=table.dtype)
    read_rows(table, rows)
    return rows


def _named_files(checkpoint: Path) -> set[str]:
    if not checkpoint.exists():
        return set()
    try:
        entry = load_file(checkpoint, mapped=True)["bank"]
        return set() if isinstance(entry, Tensor) else {each["name"] for each in entry["files"]}
    except (DamagedFile, LookupError, TypeError):  # it cannot be used
        return set()


def remove_unnamed(checkpoint: Path) -> None:
    """Removes files of rows that no checkpoint needs; call it while none is being written."""
    folder = _folder_of(checkpoint)
    if not folder.is_dir():
        return
    with contextlib.suppress(OSError, UserError):  # the next save tries again
        named = _named_files(checkpoint) | _named_files(previous_of(checkpoint))
        for file in folder.iterdir():
            if file.name not in named:
                file.unlink()
        if not named:
            folder.rmdir()

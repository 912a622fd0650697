"""A .npy file that is filled chunk by chunk, by several processes, and survives any interruption.

Beside it lies a file of checksums, one for each chunk of rows, zero until the chunk is written. A
chunk counts as finished only if its checksum matches what the table holds, so it does not matter
in which order a crash let the two files reach the disk.
"""

import hashlib
import io
import os
from pathlib import Path

import numpy as np

from instdisc.runs.folders import atomic_file

CHECKSUM_BYTES = 8


def _checksum(content: bytes) -> bytes:
    digest = hashlib.blake2b(content, digest_size=CHECKSUM_BYTES).digest()
    return digest if any(digest) else b"\1" * CHECKSUM_BYTES  # zero means unfinished


class ChunkedTable:
    """Rows `(N, D)` on disk, cut into chunks.

    Writes go to the file directly and not through a memory map: there a full disk would kill the
    process by a signal instead of raising.
    """

    def __init__(
        self, folder: Path, *, num_rows: int, dim: int, dtype: np.dtype, chunk_rows: int
    ) -> None:
        self.path = folder / "features.npy"
        self.progress = folder / "progress.bin"
        self.num_rows, self.dim, self.dtype, self.chunk_rows = num_rows, dim, dtype, chunk_rows
        self.num_chunks = -(-num_rows // chunk_rows)
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(
            header,
            {"descr": dtype.str, "fortran_order": False, "shape": (num_rows, dim)},
        )
        self.header = header.getvalue()
        self.row_bytes = dim * dtype.itemsize

        self.num_bytes = len(self.header) + num_rows * self.row_bytes

    @property
    def exists(self) -> bool:
        """Whether a file of this shape is there, filled or not."""
        if not self.path.is_file() or self.path.stat().st_size != self.num_bytes:
            return False
        with self.path.open("rb") as file:
            return file.read(len(self.header)) == self.header

    def create(self) -> None:
        """Makes both files, unfilled; what is there and has the right shape is kept."""
        if not self.exists:
            with atomic_file(self.path) as file:
                file.write(self.header)
                file.truncate(self.num_bytes)
        size = self.num_chunks * CHECKSUM_BYTES
        if not self.progress.is_file() or self.progress.stat().st_size != size:
            with atomic_file(self.progress) as file:
                file.truncate(size)

    def rows_of(self, chunk: int) -> range:
        """The rows that a chunk has."""
        first = chunk * self.chunk_rows
        return range(first, min(first + self.chunk_rows, self.num_rows))

    def unfinished(self) -> list[int]:
        """Chunks whose content is missing or damaged."""
        checksums = self.progress.read_bytes()
        found = []
        with self.path.open("rb") as file:
            for chunk in range(self.num_chunks):
                place = chunk * CHECKSUM_BYTES
                expected = checksums[place : place + CHECKSUM_BYTES]
                if not any(expected) or self._read(file.fileno(), chunk) != expected:
                    found.append(chunk)
        return found

    def _read(self, descriptor: int, chunk: int) -> bytes:
        rows = self.rows_of(chunk)
        offset = len(self.header) + rows.start * self.row_bytes
        return _checksum(os.pread(descriptor, len(rows) * self.row_bytes, offset))

    def write(self, chunk: int, values: np.ndarray) -> None:
        """Puts all rows of a chunk into their place and then marks it as finished."""
        rows = self.rows_of(chunk)
        assert values.shape == (len(rows), self.dim), f"chunk {chunk}: {values.shape}"
        content = np.ascontiguousarray(values, dtype=self.dtype).tobytes()
        _write_at(self.path, len(self.header) + rows.start * self.row_bytes, content)
        _write_at(self.progress, chunk * CHECKSUM_BYTES, _checksum(content))

    def open(self) -> np.ndarray:
        """The table, memory-mapped; writing to it changes memory only."""
        return np.load(self.path, mmap_mode="c")


def _write_at(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(offset)
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())

"""Features of a data set, computed once and kept on disk.

    runs/features/<key>/features.npy   (N, D) in the order of the images, for memory mapping
                        progress.bin   a checksum for each finished chunk of rows
                        entry.json     what it is; written last, so its presence means complete

The key hashes all that the values depend on: the network's tensors, which features of it, the
image transform, and the images' folder, names, labels, sizes and times. A change of any of these
makes a new entry, and no entry can be stale. (The time of the last status change is among them: it
betrays a file that was replaced by one of the same size and date.) Any entry may be deleted.

An interrupted extraction goes on with its first unfinished chunk; chunks depend neither on batch
size nor on the number of processes. A second command that wants the same entry waits for the first.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from instdisc.errors import Interrupted, UserError, some_of
from instdisc.features.extract import Extractor, iterate_features
from instdisc.features.table import ChunkedTable
from instdisc.images.sets import ImageSet
from instdisc.images.transforms import InputSpec, eval_transform
from instdisc.names import Precision
from instdisc.runs.folders import runs_root, write_json
from instdisc.runs.locks import open_locked
from instdisc.runs.log import LOGGER
from instdisc.runs.signals import StopSignal
from instdisc.training import dist
from instdisc.training.dist import Process

FORMAT = 1
CHUNK_ROWS = 256  # what an interruption can cost: a batch of the default size
DTYPES: dict[str, np.dtype[Any]] = {"half": np.dtype("<f2"), "float32": np.dtype("<f4")}


@dataclasses.dataclass(frozen=True)
class StoredFeatures:
    """Features of a data set on disk.

    Attributes:
        table: `(N, D)`, memory-mapped; rows of unreadable images are NaN.
        bad: indices of unreadable images.
        folder: the entry.
        num_computed: images that went through the network now; 0 if all was there.
        seconds: how long it took to get them.
    """

    table: np.ndarray
    bad: np.ndarray
    folder: Path
    num_computed: int
    seconds: float

    @property
    def rows(self) -> Tensor:
        """The table as a tensor that shares its memory."""
        return torch.from_numpy(self.table)

    @property
    def origin(self) -> str:
        """Where they came from, for the log."""
        done = f"{self.num_computed:,} computed" if self.num_computed else "from the store"
        return f"{len(self.table):,} x {self.table.shape[1]}, {done} in {self.seconds:.2f} s"


def stat_digest(images: ImageSet) -> str:
    """SHA-256 of the files' sizes and times; of the content where images are held in memory."""
    if images.root is None:
        return images.fingerprint
    files = images.files

    def stat(first: int) -> np.ndarray:
        # No Path here: it would take longer than the call, a million times.
        part = [os.stat(file) for file in files[first : first + 1000]]  # noqa: PTH116
        return np.array([(s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in part], dtype="<i8")

    digest = hashlib.sha256()
    try:
        with ThreadPoolExecutor(16) as pool:
            for part in pool.map(stat, range(0, len(files), 1000)):
                digest.update(part.tobytes())
    except FileNotFoundError as error:
        raise UserError(f"{os.fsdecode(error.filename)} is gone: run the command again") from None
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class FeatureStore:
    """The stored features of one network under one runs folder.

    Attributes:
        weights_hash: SHA-256 of the network's tensors.
        spec: how it wants its images.
        process: this process; all processes must see the same runs folder.
        batch_size: images per forward pass, at most those of a chunk.
        workers: loader processes.
        precision: half takes 2 bytes a value, and moves a similarity by up to 1e-3.
        skip_bad: go on without unreadable images, which get rows of NaN, instead of refusing.
        root: where entries lie.
    """

    weights_hash: str
    spec: InputSpec
    process: Process
    _: dataclasses.KW_ONLY
    batch_size: int = 256
    workers: int = 0
    precision: Precision = "float32"
    skip_bad: bool = False
    root: Path = dataclasses.field(default_factory=lambda: runs_root() / "features")

    def describe(self, extractor: Extractor, images: ImageSet) -> dict[str, Any]:
        """All that the values depend on; its hash is the key."""
        return {
            "format": FORMAT,
            "weights": self.weights_hash,
            "features": extractor.what,
            "input": self.spec.to_dict(),
            "transform": repr(eval_transform(self.spec)),
            "folder": None if images.root is None else str(images.root.resolve()),
            "images": images.fingerprint,
            "files": stat_digest(images),
            "num_images": len(images),
            "precision": self.precision,
        }

    def load(self, extractor: Extractor, images: ImageSet) -> StoredFeatures:
        """The features of all images, computed as far as they are not there yet."""
        started = time.monotonic()
        description = self.describe(extractor, images)
        text = json.dumps(description, sort_keys=True)
        folder = self.root / hashlib.sha256(text.encode()).hexdigest()[:32]
        num_computed = 0
        with self._lock(folder):
            missing = self.process.is_main and not self._is_complete(folder, len(images))
            if dist.agree(missing):
                filler = TableFiller(self, extractor, images)
                table = self._table(folder, len(images), filler.find_dim())
                num_computed = filler.fill(table)
                if self.process.is_main:
                    _finish(table, images, description)
                dist.barrier()
        facts = json.loads((folder / "entry.json").read_text("utf-8"))
        rows = self._table(folder, len(images), facts["dim"]).open()
        bad = np.array(facts["bad"], dtype=np.int64)
        if len(bad) and not self.skip_bad:
            raise UserError(f"{unreadable(images, bad)}: {REMEDY}")
        return StoredFeatures(rows, bad, folder, num_computed, time.monotonic() - started)

    def _is_complete(self, folder: Path, num_rows: int) -> bool:
        entry = folder / "entry.json"
        if not entry.exists():
            return False
        return self._table(folder, num_rows, json.loads(entry.read_text("utf-8"))["dim"]).exists

    def _table(self, folder: Path, num_rows: int, dim: int) -> ChunkedTable:
        dtype = DTYPES[self.precision]
        return ChunkedTable(folder, num_rows=num_rows, dim=dim, dtype=dtype, chunk_rows=CHUNK_ROWS)

    @contextlib.contextmanager
    def _lock(self, folder: Path) -> Iterator[None]:
        """Keeps other commands from the entry; the system lets go of it even if this one dies."""
        if not self.process.is_main:
            yield
            return
        self.root.mkdir(parents=True, exist_ok=True)
        # Where there are no locks, two commands write the same bytes into the same places.
        with open_locked(self.root / f".{folder.name}.lock", "w", on_wait=_tell_waiting):
            yield


def _tell_waiting() -> None:
    LOGGER.info("another command computes these features: waiting for it")


def _finish(table: ChunkedTable, images: ImageSet, description: dict[str, Any]) -> None:
    """Checks that every row is there and no image changed meanwhile; makes the entry whole."""
    folder = table.path.parent
    assert not table.unfinished(), f"{folder}: rows missing"
    if stat_digest(images) != description["files"]:
        shutil.rmtree(folder)
        raise UserError(
            f"images of {images.root} changed while their features were computed: run again"
        )
    bad = np.flatnonzero(np.isnan(table.open()[:, 0]))
    write_json(folder / "entry.json", {**description, "dim": table.dim, "bad": bad.tolist()})


def unreadable(images: ImageSet, bad: np.ndarray) -> str:
    """One line about images without features."""
    names = some_of([images.name(int(i)) for i in bad])
    count = "1 image" if len(bad) == 1 else f"{len(bad):,} images"
    return f"{count} cannot be read: {names}"


# Filling a table of features chunk by chunk, so that an interruption costs one chunk at most.

SECONDS_BETWEEN_LINES = 30
REMEDY = "remove or replace it, or pass --skip-bad-images"


@dataclasses.dataclass(frozen=True)
class TableFiller:
    """Runs a network over the images whose rows a table lacks, shared over the processes.

    Attributes:
        store: whose table it is.
        extractor: what to compute.
        images: of what.
    """

    store: FeatureStore
    extractor: Extractor
    images: ImageSet

    @torch.inference_mode()
    def find_dim(self) -> int:
        """Width of the features, by trying."""
        size, device = self.store.spec.size, self.store.process.device
        return self.extractor(torch.zeros(1, 3, size, size, device=device)).shape[1]

    def fill(self, table: ChunkedTable) -> int:
        """Computes and writes all unfinished chunks; returns the number of images in them."""
        if self.store.process.is_main:
            table.create()
        dist.barrier()
        if not table.progress.exists():
            raise UserError(
                f"{table.path} is not seen by all processes: put INSTDISC_RUNS on a disk they share"
            )
        rank, world_size = self.store.process.rank, self.store.process.world_size
        chunks = [chunk for chunk in table.unfinished() if chunk % world_size == rank]
        num_rows = sum(len(table.rows_of(chunk)) for chunk in chunks)
        if len(chunks) < len(range(rank, table.num_chunks, world_size)):
            LOGGER.info(f"going on with stored features: {num_rows:,} images are left")
        done = 0
        with contextlib.ExitStack() as stack:
            # Only the main thread may set handlers; elsewhere an interrupt just ends the work.
            in_main_thread = threading.current_thread() is threading.main_thread()
            stop = stack.enter_context(StopSignal()) if in_main_thread else None
            parts: list[np.ndarray] = []
            for ended, values in self._batches(table, chunks):
                parts.append(values.astype(table.dtype))
                if ended is not None:
                    table.write(ended, np.concatenate(parts))
                    done += len(table.rows_of(ended))
                    parts.clear()
                if stop is not None and stop.raised:
                    raise Interrupted(
                        f"stopped, features of {done:,} of {num_rows:,} images are kept in "
                        f"{table.path.parent}: run again to go on"
                    )
        assert done == num_rows, "rows missing"
        return int(dist.all_reduce_sum(torch.tensor([num_rows], device=self.store.process.device)))

    def _batches(
        self, table: ChunkedTable, chunks: list[int]
    ) -> Iterator[tuple[int | None, np.ndarray]]:
        """Features `(B, D)` of each batch, and the chunk that ends with it; batches keep to one."""
        plan: list[list[tuple[int, int]]] = []
        chunk_of_end = {}
        batch_size = min(self.store.batch_size, table.chunk_rows)
        for chunk in chunks:
            rows = table.rows_of(chunk)
            for first in range(0, len(rows), batch_size):
                plan.append([(0, row) for row in rows[first : first + batch_size]])
            chunk_of_end[rows.stop] = chunk
        title = f"{self.extractor.name} of {self.images.dataset} {self.images.split}"
        total, done = sum(map(len, plan)), 0
        told = started = time.monotonic()
        for indices, values, errors in iterate_features(
            self.extractor,
            self.images,
            self.store.spec,
            self.store.process,
            plan,
            workers=self.store.workers,
            title=title,
        ):
            yield chunk_of_end.get(int(indices[-1]) + 1), self._mark_bad(values, errors)
            done, now = done + len(indices), time.monotonic()
            if self.store.process.is_main and now - told > SECONDS_BETWEEN_LINES:
                told, rate = now, done / (now - started)
                left = tqdm.format_interval((total - done) / rate)
                LOGGER.info(f"{title}: {done:,}/{total:,}  {rate:.0f} images/s  {left} left")

    def _mark_bad(self, values: Tensor, errors: list[str]) -> np.ndarray:
        if not values.isfinite().all():
            raise UserError(f"the network gives NaN or infinite {self.extractor.name} features")
        bad = torch.tensor([bool(error) for error in errors])
        if bad.any() and not self.store.skip_bad:
            raise UserError(f"{next(filter(None, errors))}: {REMEDY}")
        return torch.where(bad[:, None], torch.nan, values).numpy()

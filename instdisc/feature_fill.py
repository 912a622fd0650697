"""Filling a table of features chunk by chunk, so that an interruption costs one chunk at most."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from instdisc.chunked_table import ChunkedTable
from instdisc.errors import Interrupted, UserError
from instdisc.features import Extractor, iterate_features
from instdisc.images.sets import ImageSet
from instdisc.images.transforms import InputSpec
from instdisc.runs.log import LOGGER
from instdisc.runs.signals import StopSignal
from instdisc.training import dist
from instdisc.training.dist import Process

SECONDS_BETWEEN_LINES = 30
REMEDY = "remove or replace it, or pass --skip-bad-images"


@dataclasses.dataclass(frozen=True)
class TableFiller:
    """Runs a network over the images whose rows a table lacks, shared over the processes.

    Attributes:
        extractor: what to compute.
        images: of what.
        spec: how the network wants its images.
        process: this process; all of them must see the table's folder.
        batch_size: images per forward pass.
        workers: loader processes.
        skip_bad: give unreadable images rows of NaN, instead of refusing.
    """

    extractor: Extractor
    images: ImageSet
    spec: InputSpec
    process: Process
    batch_size: int
    workers: int
    skip_bad: bool

    @torch.inference_mode()
    def find_dim(self) -> int:
        """Width of the features, by trying."""
        size = self.spec.size
        return self.extractor(torch.zeros(1, 3, size, size, device=self.process.device)).shape[1]

    def fill(self, table: ChunkedTable) -> int:
        """Computes and writes all unfinished chunks; returns the number of images in them."""
        if self.process.is_main:
            table.create()
        dist.barrier()
        if not table.progress.exists():
            raise UserError(
                f"{table.path} is not seen by all processes: put INSTDISC_RUNS on a disk they share"
            )
        rank, world_size = self.process.rank, self.process.world_size
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
        return int(dist.all_reduce_sum(torch.tensor([num_rows], device=self.process.device)))

    def _batches(
        self, table: ChunkedTable, chunks: list[int]
    ) -> Iterator[tuple[int | None, np.ndarray]]:
        """Features `(B, D)` of each batch, and the chunk that ends with it; batches keep to one."""
        plan: list[list[tuple[int, int]]] = []
        chunk_of_end = {}
        for chunk in chunks:
            rows = table.rows_of(chunk)
            for first in range(0, len(rows), self.batch_size):
                plan.append([(0, row) for row in rows[first : first + self.batch_size]])
            chunk_of_end[rows.stop] = chunk
        title = f"{self.extractor.name} of {self.images.dataset} {self.images.split}"
        total, done = sum(map(len, plan)), 0
        told = started = time.monotonic()
        for indices, values, errors in iterate_features(
            self.extractor,
            self.images,
            self.spec,
            self.process,
            plan,
            workers=self.workers,
            title=title,
        ):
            yield chunk_of_end.get(int(indices[-1]) + 1), self._mark_bad(values, errors)
            done, now = done + len(indices), time.monotonic()
            if self.process.is_main and now - told > SECONDS_BETWEEN_LINES:
                told, rate = now, done / (now - started)
                left = tqdm.format_interval((total - done) / rate)
                LOGGER.info(f"{title}: {done:,}/{total:,}  {rate:.0f} images/s  {left} left")

    def _mark_bad(self, values: Tensor, errors: list[str]) -> np.ndarray:
        if not values.isfinite().all():
            raise UserError(f"the network gives NaN or infinite {self.extractor.name} features")
        bad = torch.tensor([bool(error) for error in errors])
        if bad.any() and not self.skip_bad:
            raise UserError(f"{next(filter(None, errors))}: {REMEDY}")
        return torch.where(bad[:, None], torch.nan, values).numpy()

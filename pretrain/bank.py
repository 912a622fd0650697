"""The memory bank: one unit vector per training image (the paper, section 3.1).

Where the rows lie is a matter of memory and speed, not of results (`--bank-placement`): on every
process (this file), each on one of them (sharded_bank.py), or in host memory beside a GPU. A
checkpoint of one placement is read by every other.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from instdisc.runs.row_files import StoredRows, read_rows
from instdisc.training import dist
from instdisc.training.dist import Process
from instdisc.training.draws import draws_of, unit_rows
from instdisc.training.seed import generator
from pretrain import objectives
from pretrain.config import PretrainConfig

CHUNK_ROWS = 1 << 16  # rows at a time wherever all of them are gone through
COMPUTED_ROWS = 1 << 12  # first rows computed at a time: a processor's cache holds them


def row_chunks(num_rows: int) -> Iterator[range]:
    """Cuts rows into parts of CHUNK_ROWS; what is left over goes with the last one."""
    for first in range(0, max(1, num_rows - CHUNK_ROWS + 1), CHUNK_ROWS):
        last = num_rows if first + 2 * CHUNK_ROWS > num_rows else first + CHUNK_ROWS
        yield range(first, last)


def initial_rows(
    num_images: int, dim: int, *, seed: int, rows: range, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Rows of the random bank that a run starts with, `(len(rows), D)`; the others are not held.

    Those of many images are computed alone. Those of few are the numbers of one torch.randn over
    all images: torch draws them sixteen at a time, and chunks of a multiple of sixteen rows draw
    the same ones.
    """
    mine = torch.empty(len(rows), dim, dtype=dtype)
    if draws_of(num_images) == "counter":
        for first in range(rows.start, rows.stop, COMPUTED_ROWS):
            last = min(first + COMPUTED_ROWS, rows.stop)
            values = unit_rows(range(first, last), dim, seed=seed, key=("bank",))
            mine[first - rows.start : last - rows.start] = values
        return mine
    source = generator(seed, "bank")
    for chunk in row_chunks(num_images):
        values = nn.functional.normalize(torch.randn(len(chunk), dim, generator=source), dim=1)
        first, last = max(chunk.start, rows.start), min(chunk.stop, rows.stop)
        if first < last:
            part = values[first - chunk.start : last - chunk.start]
            mine[first - rows.start : last - rows.start] = part
    return mine


def blend_rows(old: Tensor, features: Tensor, momentum: float) -> Tensor:
    """normalize(momentum * v_i + (1 - momentum) * f_i), `(B, D)`, in float32."""
    features = features.float()
    if momentum:
        features = momentum * old.float() + (1 - momentum) * features
    return nn.functional.normalize(features, dim=1)


class MemoryBank(nn.Module):
    """Rows v_1..v_n on the unit sphere, random at the start, all of them on every process.

    Every process applies the same updates in the same order, so that the copies stay equal bit by
    bit; `compare_copies` proves it.

    Attributes:
        vectors: `(N, D)` unit rows, float32 or float16; sums over them are always float32.
        momentum: weight of the old row in an update; 0 replaces it, as the paper does.
    """

    vectors: Tensor

    def __init__(
        self,
        num_images: int,
        dim: int,
        *,
        momentum: float,
        seed: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.momentum = momentum
        rows = initial_rows(num_images, dim, seed=seed, rows=range(num_images), dtype=dtype)
        self.register_buffer("vectors", rows)

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of the given images, `(B, D)`, float32, where the indices are."""
        like = torch.empty(0, device=indices.device)
        return objectives.fetch_rows(self.vectors, indices, like)

    def log_normalizer(self, features: Tensor, temperature: float) -> Tensor:
        """Exact log sum_j exp(v_j . f / tau), `(B,)`; differentiable in the features."""
        return objectives.log_normalizer(features, self.vectors, temperature)

    def noise_logits(
        self, features: Tensor, noise: Tensor, temperature: float, *, shared: bool
    ) -> Tensor:
        """v_j . f_i / tau, `(B, m)`, for noise of each image `(B, m)`, or shared `(1, m)`."""
        assert len(noise) == (1 if shared else len(features))
        return objectives.noise_logits(features, self.vectors, noise, temperature)

    @torch.no_grad()
    def update(self, indices: Tensor, features: Tensor, valid: Tensor) -> None:
        """Row i <- normalize(momentum * v_i + (1 - momentum) * f_i); each index occurs once.

        Args:
            indices: images of all processes, the same on each, `(B,)`.
            features: their features, `(B, D)`.
            valid: False for the images whose rows stay as they are, `(B,)`.
        """
        place = self.vectors.device
        indices = indices.to(place)
        old = self.vectors[indices]
        new = blend_rows(old, features.to(place), self.momentum).to(old.dtype)
        # Rows that stay are written too: choosing the others would wait for the device.
        self.vectors[indices] = torch.where(valid.to(place)[:, None], new, old)

    def assemble(self) -> Tensor:
        """All rows in order, `(N, D)`, on every process; all call it."""
        return self.vectors

    def start_saving(self, checkpoint: Path) -> Callable[[], dict[str, Any]] | None:
        """Nothing: all rows of this process go into the checkpoint itself."""
        return None

    def load(self, table: Tensor | StoredRows) -> None:
        """Takes over the rows of a checkpoint, `(N, D)`."""
        read_rows(table, self.vectors)

    def checksum(self) -> int:
        """A number that changes with any bit of any row, whichever process computes it."""
        integers = torch.int32 if self.vectors.dtype == torch.float32 else torch.int16
        total = torch.zeros((), dtype=torch.int64, device=self.vectors.device)
        for chunk in row_chunks(len(self.vectors)):
            bits = self.vectors[chunk.start : chunk.stop].view(integers).to(torch.int64)
            places = torch.arange(chunk.start + 1, chunk.stop + 1, device=bits.device)
            total += (bits * places[:, None]).sum()
        return int(total.item())

    def compare_copies(self, device: torch.device) -> None:
        """Proves that every process holds the same rows."""
        sums = dist.all_gather_rows(torch.tensor([self.checksum()], device=device))
        assert bool((sums == sums[0]).all()), f"the banks differ between processes: {sums.tolist()}"


def build_bank(config: PretrainConfig, num_images: int, process: Process) -> MemoryBank:
    """The bank of a run, at its random start."""
    size = (num_images, config.embedding_dim)
    dtype = torch.float16 if config.bank_dtype == "float16" else torch.float32
    if config.bank_placement == "sharded":
        from pretrain.sharded_bank import (
            ShardedBank,  # which is a MemoryBank, made from this module
        )

        return ShardedBank(
            *size,
            momentum=config.bank_momentum,
            seed=config.seed,
            dtype=dtype,
            rank=process.rank,
            world_size=process.world_size,
        ).to(process.device)
    bank = MemoryBank(*size, momentum=config.bank_momentum, seed=config.seed, dtype=dtype)
    if config.bank_placement == "replicated":
        return bank.to(process.device)
    if process.device.type == "cuda":
        bank.vectors = bank.vectors.pin_memory()  # copies to the GPU need not wait for the host
    return bank

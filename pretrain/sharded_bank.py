"""The memory bank cut over processes: each holds n/W rows, and none holds all.

What a step needs of the others' rows is computed where the rows lie. With W processes of B images:

    exact softmax    features are gathered (WB x D); the sums of every process over its own rows
                     are added up (WB x (D + 1)); the gradient is in them, the backward pass sends
                     nothing
    shared noise     the m rows are added up from their owners (m x D), then one matrix product
    noise per image  features and image numbers are gathered; owners compute the logits of their
                     rows (WB x m), which are added up; so is the gradient, in the backward pass
    update           features are gathered; each process writes the rows that are its own
"""

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from instdisc.errors import UserError, explain, some_of
from instdisc.runs.row_files import (
    RowSnapshot,
    StoredRows,
    describe_rows,
    read_rows,
    write_row_file,
)
from instdisc.training import dist
from pretrain import objectives
from pretrain.bank import CHUNK_ROWS, MemoryBank, blend_rows, initial_rows


def rows_of_rank(num_images: int, rank: int, world_size: int) -> range:
    """The rows that a process owns: consecutive, ceil(n/W) of them, fewer on the last ones."""
    share = -(-num_images // world_size)
    return range(min(num_images, rank * share), min(num_images, (rank + 1) * share))


def _part_of_rank(rows: Tensor, rank: int, count: int) -> Tensor:
    return rows[rank * count : (rank + 1) * count]


class _ShardedLogSumExp(torch.autograd.Function):
    """log sum_j exp(v_j . f / tau) over the rows of all processes."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, shard: Tensor, temperature: float, rank: int) -> Tensor:
        everyone = dist.all_gather_rows(features)
        total, weighted = objectives.streamed_sums(everyone, shard, temperature)
        sums = dist.all_reduce_sum(torch.cat([total[:, None], weighted], dim=1))
        total, weighted = _part_of_rank(sums, rank, len(features)).split([1, features.shape[1]], 1)
        ctx.save_for_backward(weighted / (total * temperature))
        return total.squeeze(1).log() + 1 / temperature

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (direction,) = ctx.saved_tensors
        return grad_outputs[0][:, None] * direction, None, None, None


class _ShardedProducts(torch.autograd.Function):
    """v_ij . f_i for noise `(B, m)` of each image, computed by the owners of the rows."""

    @staticmethod
    def forward(
        ctx: Any, features: Tensor, shard: Tensor, noise: Tensor, first_row: int, rank: int
    ) -> Tensor:
        everyone, noise = dist.all_gather_rows(features), dist.all_gather_rows(noise)
        owned = (noise >= first_row) & (noise < first_row + len(shard))
        images, columns = owned.nonzero(as_tuple=True)
        # The owned columns of each image, moved to the left: as narrow as the fullest row allows.
        # Empty places point to row 0; their products are not used.
        places = owned.cumsum(dim=1)[images, columns] - 1
        width = int(places.max()) + 1 if len(places) else 0
        local = torch.zeros(len(noise), width, dtype=torch.int64, device=noise.device)
        local[images, places] = noise[images, columns] - first_row
        products = features.new_zeros(noise.shape)
        if width:
            found = objectives.gathered_products(everyone, shard, local)
            products[images, columns] = found[images, places]
        ctx.save_for_backward(shard, local, images, columns, places)
        ctx.rank = rank
        return _part_of_rank(dist.all_reduce_sum(products), rank, len(features)).clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        shard, local, images, columns, places = ctx.saved_tensors
        grad = dist.all_gather_rows(grad_outputs[0])
        weights = grad.new_zeros(local.shape)
        weights[images, places] = grad[images, columns]
        sums = grad.new_zeros(len(grad), shard.shape[1])
        if local.shape[1]:
            sums = objectives.gathered_sums(weights, shard, local)
        sums = dist.all_reduce_sum(sums)
        return _part_of_rank(sums, ctx.rank, len(grad_outputs[0])), None, None, None, None


class ShardedBank(MemoryBank):
    """Rows v_1..v_n, of which this process holds `owned`; its peers hold the others.

    Every method is called by all processes alike, with batches of one size, and gives each of them
    what a bank with all rows would.
    """

    def __init__(
        self,
        num_images: int,
        dim: int,
        *,
        momentum: float,
        seed: int,
        dtype: torch.dtype = torch.float32,
        rank: int,
        world_size: int,
    ) -> None:
        torch.nn.Module.__init__(self)  # the parent's would make all rows
        self.momentum = momentum
        self.num_images, self.rank, self.world_size = num_images, rank, world_size
        self.owned = rows_of_rank(num_images, rank, world_size)
        rows = initial_rows(num_images, dim, seed=seed, rows=self.owned, dtype=dtype)
        self.register_buffer("vectors", rows)
        self._snapshot: RowSnapshot | None = None  # of the latest save

    def _is_mine(self, indices: Tensor) -> Tensor:
        return (indices >= self.owned.start) & (indices < self.owned.stop)

    def _collect(self, indices: Tensor) -> Tensor:
        """Rows of images that all processes name alike, `(B, D)`: each adds those it owns."""
        mine = self._is_mine(indices)
        rows = self.vectors.new_zeros(len(indices), self.vectors.shape[1])
        rows[mine] = self.vectors[indices[mine] - self.owned.start]
        return dist.all_reduce_sum(rows).float()  # adding zeros is exact in any precision

    def rows(self, indices: Tensor) -> Tensor:
        """Rows of this process's images, `(B, D)`, float32."""
        found = self._collect(dist.all_gather_rows(indices))
        return _part_of_rank(found, self.rank, len(indices))

    def log_normalizer(self, features: Tensor, temperature: float) -> Tensor:
        """Exact log sum_j exp(v_j . f / tau), `(B,)`; differentiable in the features."""
        return _ShardedLogSumExp.apply(features, self.vectors, temperature, self.rank)

    def noise_logits(
        self, features: Tensor, noise: Tensor, temperature: float, *, shared: bool
    ) -> Tensor:
        """v_j . f_i / tau, `(B, m)`; shared noise `(1, m)` is the same on all processes."""
        if shared:
            return features @ self._collect(noise[0]).T / temperature
        products = _ShardedProducts.apply(
            features, self.vectors, noise, self.owned.start, self.rank
        )
        return products / temperature

    @torch.no_grad()
    def update(self, indices: Tensor, features: Tensor, valid: Tensor) -> None:
        """Writes the rows that this process owns; arguments as for a bank with all rows."""
        mine = self._is_mine(indices) & valid
        places = indices[mine] - self.owned.start
        new = blend_rows(self.vectors[places], features[mine], self.momentum)
        with self._snapshot.changing(places) if self._snapshot else contextlib.nullcontext():
            self.vectors[places] = new.to(self.vectors.dtype)

    def assemble(self) -> Tensor:
        """All rows in order, in host memory, on every process; all call it.

        Owners send their rows in turn and in parts.
        """
        if self.world_size == 1:
            return self.vectors
        dim, dtype = self.vectors.shape[1], self.vectors.dtype
        table = torch.empty(self.num_images, dim, dtype=dtype)
        for owner in range(self.world_size):
            rows = rows_of_rank(self.num_images, owner, self.world_size)
            for first in range(rows.start, rows.stop, CHUNK_ROWS):
                last = min(first + CHUNK_ROWS, rows.stop)
                if owner == self.rank:
                    part = self.vectors[first - rows.start : last - rows.start]
                else:
                    part = self.vectors.new_empty(last - first, dim)
                torch_dist.broadcast(part, src=owner)
                table[first:last] = part.cpu()
        return table

    def start_saving(self, checkpoint: Path) -> Callable[[], dict[str, Any]]:
        """Holds fast what the rows are now; all processes call it.

        Returns:
            What writes this process's rows while training goes on, waits for the other processes,
            and gives what the checkpoint is to say of the rows: for a thread on each process.
        """
        save = dist.from_first(lambda: os.urandom(4).hex())
        self._snapshot = RowSnapshot(self.vectors)
        return functools.partial(self._write, checkpoint, f"{save}.{self.rank}", self._snapshot)

    def _write(self, checkpoint: Path, name: str, snapshot: RowSnapshot) -> dict[str, Any]:
        file: dict[str, Any] = {}
        failure: Exception | None = None
        try:
            with snapshot:
                file = write_row_file(checkpoint, name, snapshot, self.owned.start)
        except Exception as error:  # the others must hear of it, whatever it is
            failure = error
        reason = "" if failure is None else explain(failure) or repr(failure)
        found = dist.gather_from_writers((file, reason))
        if failure is not None:
            raise failure
        failed = [f"process {rank}: {why}" for rank, (_, why) in enumerate(found) if why]
        if failed:
            raise UserError(f"the checkpoint was not written: {some_of(failed)}")
        return describe_rows(checkpoint, self.vectors, [each for each, _ in found])

    def load(self, table: Tensor | StoredRows) -> None:
        """Takes its own rows from a checkpoint's, `(N, D)`."""
        read_rows(table, self.vectors, self.owned.start)

    def compare_copies(self, device: torch.device) -> None:
        """There is one copy of each row: nothing to compare."""

"""Processes: torchrun, or one alone; gathering in a fixed order; CPU works (gloo).

Nothing here refuses a single process: without torchrun's variables every helper is the identity.
"""

import dataclasses
import os

import torch
import torch.distributed as torch_dist
from torch import Tensor

from instdisc.errors import UserError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True)
class Process:
    """This process among its peers, and the device it works on."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process logs and writes."""
        return self.rank == 0


def init_process(device: str = "auto") -> Process:
    """Joins the process group that torchrun describes; alone if it describes none.

    Args:
        device: `auto` (a GPU if there is one), `cpu` or `cuda`.

    Raises:
        UserError: the environment is set in part only, or the device is not there.
    """
    given = [name for name in TORCHRUN if name in os.environ]
    # MASTER_ADDR and MASTER_PORT alone are left behind by many tools and mean nothing.
    described = any(name in given for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if described and len(given) < len(TORCHRUN):
        missing = ", ".join(name for name in TORCHRUN if name not in given)
        raise UserError(f"{missing} not set while {', '.join(given)} are: start with torchrun")
    rank, world_size, local_rank = (
        (int(os.environ[name]) for name in TORCHRUN[:3]) if described else (0, 1, 0)
    )
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(f"no GPU for local rank {local_rank}: start fewer, or --device cpu")
        torch.cuda.set_device(local_rank)
        chosen = torch.device("cuda", local_rank)
    else:
        chosen = torch.device("cpu")
    if described and not torch_dist.is_initialized():
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        torch_dist.init_process_group(backend, rank=rank, world_size=world_size)
    return Process(rank, world_size, chosen)


def close() -> None:
    """Leaves the process group, if there is one."""
    if torch_dist.is_initialized():
        torch_dist.destroy_process_group()


def world_size() -> int:
    """How many processes there are."""
    return torch_dist.get_world_size() if torch_dist.is_initialized() else 1


def all_gather_rows(rows: Tensor) -> Tensor:
    """Concatenates `(B, ...)` of every process, in rank order; shapes must agree."""
    if world_size() == 1:
        return rows
    parts = [torch.empty_like(rows) for _ in range(world_size())]
    torch_dist.all_gather(parts, rows.contiguous())
    return torch.cat(parts)


def all_reduce_sum(value: Tensor) -> Tensor:
    """The sum over all processes, in a new tensor."""
    if world_size() == 1:
        return value
    total = value.clone()
    torch_dist.all_reduce(total)
    return total


def any_rank(flag: bool, device: torch.device) -> bool:
    """True everywhere if it is true anywhere; for decisions that all processes must share."""
    if world_size() == 1:
        return flag
    shared = torch.tensor([int(flag)], device=device)
    torch_dist.all_reduce(shared, op=torch_dist.ReduceOp.MAX)
    return bool(shared.item())


def gather_by_index(rows: Tensor, indices: Tensor, num_rows: int) -> Tensor:
    """Collects rows from all processes into their places, `(num_rows, D)`; every place is filled.

    Args:
        rows: this process's rows, `(B, D)`.
        indices: where they belong, `(B,)`; each of `0..num_rows-1` occurs once over all processes.
        num_rows: n.
    """
    table = rows.new_zeros((num_rows, *rows.shape[1:]))
    filled = torch.zeros(num_rows, dtype=torch.int64, device=rows.device)
    table[indices] = rows
    filled[indices] = 1
    if world_size() > 1:
        torch_dist.all_reduce(table)
        torch_dist.all_reduce(filled)
    assert bool((filled == 1).all()), "rows missing or computed twice"
    return table


def barrier() -> None:
    """Waits for all processes."""
    if world_size() > 1:
        torch_dist.barrier()

"""Processes: torchrun, or one alone; gathering in a fixed order; CPU works (gloo).

There are three groups of the same processes. Tensors go through the training group (NCCL on GPUs),
whose timeout finds a process that hangs. Waiting and deciding go through the control group (gloo,
on the CPU), whose timeout is long: the first process may list images, make proposals or wait for a
lock for hours meanwhile. Threads that write files have a group like it to themselves, since the
calls of a group have one order on all processes. A process that dies, or is stopped, is found by
its heartbeat.

Nothing here refuses a single process: without torchrun's variables every helper is the identity.
"""

import contextlib
import dataclasses
import datetime
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from instdisc.cli import end_process
from instdisc.errors import Interrupted, UserError
from instdisc.names import TIMEOUT_VARIABLE
from instdisc.training.heartbeat import AGAIN, Heartbeat

Made = TypeVar("Made")
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TRAINING_SECONDS = 30 * 60  # NCCL's own ten minutes are short for a stalled file server
CONTROL_TIMEOUT = datetime.timedelta(hours=24)
_CONTROL: list[torch_dist.ProcessGroup] = []  # the control group, if there is one
_HEARTBEAT: list[Heartbeat] = []  # with several processes
# How gloo and NCCL say that a process is gone; gloo's errors have no type of their own.
_CONNECTION_LOST = re.compile(r"gloo/|NCCL|Connection (closed|reset) by peer|TCPStore")
SECONDS_TO_LEARN = 5.0  # between a collective that fails and the word of who is gone
_WRITING: list[torch_dist.ProcessGroup] = []  # that of the threads that write


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


def init_process(device: str = "auto", threads: int | None = None) -> Process:
    """Joins the process group that torchrun describes; alone if it describes none.

    Args:
        device: `auto` (a GPU if there is one), `cpu` or `cuda`.
        threads: of torch in this process; None for its own number, one for each core.

    Raises:
        UserError: the environment is set in part only, or the device is not there.
    """
    if threads is not None:
        torch.set_num_threads(threads)
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
        chosen = torch.device("cuda", gpu_for(local_rank, torch.cuda.device_count()))
        torch.cuda.set_device(chosen)
    else:
        chosen = torch.device("cpu")
    if described and not torch_dist.is_initialized():
        backend = "nccl" if chosen.type == "cuda" else "gloo"
        timeout = training_timeout()
        # Made here, since init_process_group would wait for late processes by the same timeout.
        store, *_ = next(rendezvous("env://", rank, world_size, timeout=CONTROL_TIMEOUT))
        if world_size > 1 and not _HEARTBEAT:
            address = os.environ["MASTER_ADDR"]
            watch = Heartbeat(
                store, rank=rank, world_size=world_size, address=address, end=end_process
            )
            _HEARTBEAT.append(watch)
        torch_dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
    if described and not _CONTROL:
        for groups in (_CONTROL, _WRITING):
            group = torch_dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
            assert isinstance(group, torch_dist.ProcessGroup)  # every process is in it
            groups.append(group)
    return Process(rank, world_size, chosen)


@contextlib.contextmanager
def joined(device: str = "auto", threads: int | None = None) -> Iterator[Process]:
    """This process among its peers, for a command: `init_process`, and `close` at the end.

    Raises:
        Interrupted: another process is gone.
        UserError: another process has failed.
    """
    failed = True
    try:
        yield init_process(device, threads)
        failed = False
    except Interrupted:
        failed = False
        raise
    except RuntimeError as error:
        cause = _cause_of(error)
        if cause is None:
            raise
        failed = not isinstance(cause, Interrupted)
        raise cause from None
    finally:
        close(failed=failed)


def _cause_of(error: RuntimeError) -> Exception | None:
    """Which process made a collective fail; None if that is not what the error is about."""
    if not _HEARTBEAT or not _CONNECTION_LOST.search(str(error)):
        return None
    if cause := _HEARTBEAT[0].cause(SECONDS_TO_LEARN):
        return cause
    if "imed out" in str(error):
        seconds = training_timeout().total_seconds()
        return Interrupted(
            f"all processes live, but one came {seconds:.0f} s late (a slow disk?): {AGAIN}; "
            f"{TIMEOUT_VARIABLE} allows more"
        )
    return None


def gpu_for(local_rank: int, num_visible: int) -> int:
    """The number of this process's GPU among those that it sees.

    A scheduler that binds a GPU to each process (`--gpus-per-task`) shows each process one GPU.
    """
    if num_visible == 1:
        return 0
    if local_rank >= num_visible:
        raise UserError(f"no GPU for local rank {local_rank}: start fewer, or --device cpu")
    return local_rank


def training_timeout() -> datetime.timedelta:
    """How long a collective of the training group waits for the other processes."""
    text = os.environ.get(TIMEOUT_VARIABLE) or str(TRAINING_SECONDS)
    if not text.isdecimal() or int(text) == 0:
        raise UserError(f"{TIMEOUT_VARIABLE}={text}: give whole seconds, at least 1")
    return datetime.timedelta(seconds=int(text))


def close(*, failed: bool = False) -> None:
    """Leaves the process groups, if there are any.

    Args:
        failed: the message of this process tells why; collectives of the others will refer to it.
    """
    while _HEARTBEAT:
        _HEARTBEAT.pop().leave(failed=failed)
    _CONTROL.clear()
    _WRITING.clear()
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


def agree(flag: bool) -> bool:
    """True everywhere if it is true anywhere; on the CPU, by the control group: no device sync."""
    if world_size() == 1:
        return flag
    shared = torch.tensor([int(flag)])
    torch_dist.all_reduce(shared, op=torch_dist.ReduceOp.MAX, group=_CONTROL[0])
    return bool(shared.item())


def gather_from_writers(value: Made) -> list[Made]:
    """What the writing threads of all processes have, in rank order; called by those threads."""
    if world_size() == 1:
        return [value]
    found: list[Any] = [None] * world_size()
    torch_dist.all_gather_object(found, value, group=_WRITING[0])
    return found


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
    """Waits for all processes, for hours if need be."""
    if world_size() > 1:
        torch_dist.barrier(group=_CONTROL[0])


@contextlib.contextmanager
def first_process_first(process: Process) -> Iterator[None]:
    """Lets the first process run the block before the others; if it fails, they do not begin.

    Nothing in the block may wait for other processes.
    """
    failed = True
    if not process.is_main and agree(False):
        raise UserError("the first process failed: see its message")
    try:
        yield
        failed = False
    finally:
        if process.is_main:
            agree(failed)


def from_first(make: Callable[[], Made]) -> Made:
    """What the first process makes, on every process; an error that it meets ends all of them."""
    if world_size() == 1:
        return make()
    shared: list[Any] = [None, None]
    if torch_dist.get_rank() == 0:
        try:
            shared[0] = make()
        except (UserError, OSError, MemoryError) as error:
            shared[1] = error
    torch_dist.broadcast_object_list(shared, group=_CONTROL[0])
    if shared[1] is not None:
        raise shared[1]
    return shared[0]

"""What training loops share: several processes, the loss on its device, when to save and to stop.

A step never waits for the device: what the host wants to know of it is read a step later, or at a
step that logs. Decisions that all processes must share go over the host (`dist.agree`).
"""

import math
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from instdisc.runs.signals import StopSignal
from instdisc.training import dist
from instdisc.training.cpu import use_small_map_gradients
from instdisc.training.dist import Process


def prepare_device(model: nn.Module, device: torch.device) -> None:
    """Makes a model that is about to train on images of one size ready for its device."""
    if device.type == "cpu":
        use_small_map_gradients(model)
    else:
        # Shapes stay, so cuDNN's search for the fastest convolutions pays. TF32 is as torch has it:
        # allowed in convolutions, not in matrix products, which the objective consists of.
        torch.backends.cudnn.benchmark = True


def wrap_parallel(module: nn.Module, process: Process, *, compiled: bool = False) -> nn.Module:
    """What a training step calls: its gradients are averaged over the processes.

    The module itself, which evaluates and has the names of a checkpoint, stays as it is. Buffers
    are each process's own until `share_buffers`: training computes nothing from them.

    Args:
        module: on the process's device.
        process: this process among its peers.
        compiled: run the module through torch.compile.
    """
    called = torch.compile(module) if compiled else module
    assert isinstance(called, nn.Module)
    if process.world_size == 1 or not any(weight.requires_grad for weight in module.parameters()):
        return called
    device_ids = [process.device] if process.device.type == "cuda" else None
    parallel = DistributedDataParallel(called, device_ids=device_ids)
    parallel.broadcast_buffers = False  # the argument's name depends on torch's version
    return parallel


@torch.no_grad()
def share_buffers(modules: Iterable[nn.Module]) -> None:
    """Gives all processes the buffers of the first, the ones that it saves (batch norm's).

    All processes call it, before anything that evaluates or saves.
    """
    if dist.world_size() == 1:
        return
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for module in modules:
        for buffer in module.buffers():
            by_type.setdefault(buffer.dtype, []).append(buffer)
    for buffers in by_type.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        torch.distributed.broadcast(flat, src=0)
        parts = flat.split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view_as(buffer))


class HostCopy:
    """Values on their way from the device to the host: reading them a step later does not block.

    Args:
        values: `(N,)`; not to be changed in place afterwards.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values.detach().to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if values.is_cuda else None
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> list[float]:
        """The values."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._values.tolist()


class LossMeter:
    """The loss of the latest step and the sum over an epoch's, in float64 where they arise.

    Every process adds its own; they are averaged when they are read.

    Attributes:
        total: sum over the epoch's steps, averaged over processes, as last read.
    """

    def __init__(self, device: torch.device, total: float = 0.0) -> None:
        self.total = total
        self._sums = torch.tensor([0.0, total], dtype=torch.float64, device=device)
        self._copy: HostCopy | None = None

    def add(self, loss: Tensor) -> None:
        """Takes a step's loss, a scalar, into account."""
        loss = loss.detach().double()
        self._sums = torch.stack([loss, self._sums[1] + loss])

    def failed_before(self) -> bool:
        """Whether this process's loss was NaN or infinite when this was last asked, a step ago."""
        before, self._copy = self._copy, HostCopy(self._sums)
        return before is not None and not all(map(math.isfinite, before.read()))

    def read(self) -> float:
        """The latest loss, averaged over processes, who all call this; waits for the device."""
        # Each goes on from the mean, as it would after a resume.
        self._sums = dist.all_reduce_sum(self._sums) / dist.world_size()
        latest, self.total = self._sums.tolist()
        return latest

    def end_epoch(self) -> float:
        """The sum over the epoch that has ended, as last read; the next one begins at zero."""
        total, self.total = self.total, 0.0
        self._sums = torch.zeros_like(self._sums)
        return total


class SaveOrStop:
    """When a run saves, and whether it stops then: every process comes to the same decision.

    Args:
        stop: the signals that this process hears.
        minutes: longest time between two saves.
    """

    def __init__(self, stop: StopSignal, minutes: float = math.inf) -> None:
        self.stop, self.seconds = stop, 60 * minutes
        self.stopping = False
        self._saved = time.monotonic()

    def is_due(self, *, ended: bool = False, failed: bool = False) -> bool:
        """Whether to save after this step; all processes ask after each.

        Args:
            ended: what has ended is saved in any case (an epoch); the same on all processes.
            failed: something is wrong here; the save, which all take part in, will find it.
        """
        late = time.monotonic() - self._saved >= self.seconds
        if not (ended or dist.agree(self.stop.raised or late or failed)):
            return False
        self.stopping = dist.agree(self.stop.raised)
        return True

    def saved(self, step: int, checkpoint: Path, *, finished: bool) -> None:
        """Notes that a checkpoint has been written.

        Raises:
            Interrupted: a process was told to stop, and there is more to do.
        """
        self._saved = time.monotonic()
        if self.stopping and not finished:
            raise self.stop.interrupt(step, checkpoint)

"""How the supervised loop sees its images: in which order, on which device, read or not."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import Sampler

from instdisc.errors import UserError
from instdisc.images.loading import epoch_order
from instdisc.runs.log import LOGGER


@dataclasses.dataclass(frozen=True)
class EvenBatches(Sampler[list[tuple[int, int]]]):
    """Which images each step sees: a function of (seed, step), for any number of processes.

    An epoch shows every image once, in ceil(n / batch_size) batches that differ by one image at
    most. Of few labels none should be left out, and a small rest would spoil batch norm.

    Attributes:
        num_images: n.
        batch_size: most images per step, over all processes.
        seed: of the order.
        num_steps: where the run ends.
        start: the step to go on from.
        rank: this process.
        world_size: number of processes.
    """

    num_images: int
    batch_size: int
    seed: int
    num_steps: int
    start: int = 0
    rank: int = 0
    world_size: int = 1

    @property
    def steps_per_epoch(self) -> int:
        """Batches in an epoch."""
        return math.ceil(self.num_images / self.batch_size)

    def bounds(self, step: int) -> tuple[int, int]:
        """First and last place, in the epoch's order, of the images of a step."""
        number, steps = step % self.steps_per_epoch, self.steps_per_epoch
        return number * self.num_images // steps, (number + 1) * self.num_images // steps

    def __len__(self) -> int:
        return self.num_steps - self.start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, order = -1, torch.empty(0, dtype=torch.int64)
        for step in range(self.start, self.num_steps):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = epoch_order(self.num_images, self.seed, epoch)
            first, last = self.bounds(step)
            size = last - first
            mine = slice(
                first + size * self.rank // self.world_size,
                first + size * (self.rank + 1) // self.world_size,
            )
            yield [(epoch, index) for index in order[mine].tolist()]


def to_device(inputs: Tensor, device: torch.device) -> Tensor:
    """Images in the memory layout that convolutions like; rows as they are."""
    layout = torch.channels_last if inputs.dim() == 4 else torch.contiguous_format
    return inputs.to(device, non_blocking=True, memory_format=layout)


def keep_valid(errors: Sequence[str], skip_bad: bool) -> Tensor:
    """1 for each image that could be read, 0 for the others, `(B,)`; stops unless skipping."""
    for error in filter(None, errors):
        if not skip_bad:
            raise UserError(f"{error}: remove or replace it, or pass --skip-bad-images")
        LOGGER.warning(f"left out: {error}")
    return torch.tensor([float(not error) for error in errors])

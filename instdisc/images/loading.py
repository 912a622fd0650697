"""How images reach the model: batches whose content and augmentation depend on no history."""

import dataclasses
import functools
import multiprocessing.util
import os
from collections.abc import Iterator, Sequence
from typing import Any

import cv2
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from instdisc.errors import UserError
from instdisc.images.augmentation import RandomView
from instdisc.images.sets import ImageSet
from instdisc.images.transforms import InputSpec, Transform
from instdisc.runs.signals import kill_loaders, leave_signals_to_parent
from instdisc.training.seed import generator, seeded


class Samples(Dataset[tuple[Tensor, int, str]]):
    """Images as tensors: (pixels, index, error), the error empty unless the image was unreadable.

    A key is (epoch, index): the augmentation is a function of (seed, epoch, index) and of nothing
    else. An unreadable image gives zeros and its message, so that the trainer decides what to do.
    """

    def __init__(self, images: ImageSet, transform: Transform, spec: InputSpec, seed: int) -> None:
        self.images = images
        self.transform = transform
        self.spec = spec
        self.seed = seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int, str]:
        epoch, index = key
        try:
            with seeded(self.seed, "augment", epoch, index):
                if not isinstance(self.transform, RandomView):
                    return self.transform(self.images.open(index)), index, ""
                with self.images.opened(index) as image:
                    crop, view = self.transform.look(image)
            return self.transform.render(crop, view), index, ""
        except UserError as error:
            return torch.zeros(3, self.spec.size, self.spec.size), index, str(error)

    def collate(self, samples: list[tuple[Tensor, int, str]]) -> list[Any]:
        """A batch; random views, which come channels last, stay so without being moved about."""
        if not isinstance(self.transform, RandomView):
            return default_collate(samples)
        rows = [(pixels.permute(1, 2, 0), index, error) for pixels, index, error in samples]
        pixels, indices, errors = default_collate(rows)
        return [pixels.permute(0, 3, 1, 2), indices, errors]


def epoch_order(num_images: int, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch of a run shows its images, `(N,)`."""
    return torch.randperm(num_images, generator=generator(seed, "order", epoch))


@dataclasses.dataclass(frozen=True)
class BatchPlan(Sampler[list[tuple[int, int]]]):
    """Which images each step of a run sees: a function of (seed, step), for any world size.

    An epoch is a permutation of all images cut into global batches; the last, partial one is left
    out, because batch norm and equal shares per process want full batches. Each process takes its
    slice of every global batch, in `accumulate` micro-batches.

    Attributes:
        num_images: n.
        batch_size: images per optimiser step over all processes.
        seed: the run's seed.
        num_steps: where the run ends.
        start: the step to go on from.
        rank: this process.
        world_size: number of processes.
        accumulate: micro-batches per step.
    """

    num_images: int
    batch_size: int
    seed: int
    num_steps: int
    start: int = 0
    rank: int = 0
    world_size: int = 1
    accumulate: int = 1

    @property
    def steps_per_epoch(self) -> int:
        """Full global batches in an epoch."""
        return self.num_images // self.batch_size

    def __len__(self) -> int:
        return (self.num_steps - self.start) * self.accumulate

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        share = self.batch_size // self.world_size
        micro = share // self.accumulate
        epoch, order = -1, torch.empty(0, dtype=torch.int64)
        for step in range(self.start, self.num_steps):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = epoch_order(self.num_images, self.seed, epoch)
            first = (step % self.steps_per_epoch) * self.batch_size + self.rank * share
            mine = order[first : first + share].tolist()
            for part in range(0, share, micro):
                yield [(epoch, index) for index in mine[part : part + micro]]


def build_loader(
    samples: Dataset[Any],
    plan: Sampler[Any] | Sequence[Any],
    workers: int,
    *,
    pin_memory: bool = False,
) -> DataLoader[Any]:
    """A loader over a plan of batches; results do not depend on the number of workers.

    Args:
        samples: the images; a method `collate` of theirs makes the batches.
        plan: the keys of each batch.
        workers: loader processes.
        pin_memory: for copies to a GPU.
    """
    # OpenCV's threads would compete with the other loader processes, and do not survive a fork.
    cv2.setNumThreads(0)
    if workers:
        _kill_loaders_at_exit(os.getpid())
    return DataLoader(
        samples,
        batch_sampler=plan,
        num_workers=workers,
        collate_fn=getattr(samples, "collate", None),
        pin_memory=pin_memory,
        prefetch_factor=4 if workers else None,
        worker_init_fn=_start_worker,
    )


@functools.cache
def _kill_loaders_at_exit(pid: int) -> None:
    """Once in a process: at exit, before Python itself ends the child processes that are left."""
    multiprocessing.util.Finalize(None, kill_loaders, exitpriority=0)


def _start_worker(worker: int) -> None:
    cv2.setNumThreads(0)  # a spawned process has the default
    leave_signals_to_parent(worker)


def sequential_plan(
    num_images: int, batch_size: int, rank: int = 0, world_size: int = 1
) -> list[list[tuple[int, int]]]:
    """Batches over all images once, in order, strided over the processes; for evaluation."""
    mine = range(rank, num_images, world_size)
    return [
        [(0, i) for i in mine[first : first + batch_size]]
        for first in range(0, len(mine), batch_size)
    ]

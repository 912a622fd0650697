"""How images reach the model: batches whose content and augmentation depend on no history."""

import copy
import dataclasses
import functools
import math
import multiprocessing.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate, get_worker_info
from torchvision.transforms import v2

from instdisc.errors import UserError, lost_a_batch
from instdisc.images.augmentation import RandomView, read_crop, resize
from instdisc.images.sets import ImageSet
from instdisc.images.transforms import InputSpec, Transform, split_normalization
from instdisc.runs.signals import kill_loaders, leave_signals_to_parent
from instdisc.training.cpu import give_back_memory
from instdisc.training.dist import training_timeout
from instdisc.training.draws import draws_of, permute
from instdisc.training.seed import generator, seeded

# Views are made so many at a time, each step for all of them before the next: decoding an image
# drives everything else out of the processor's caches. More gain little, and hold more memory.
TOGETHER = 16
STEPS = 4  # read and draw, decode, resize, change colours


@dataclasses.dataclass(frozen=True)
class Levels:
    """A batch on its way to a GPU: bytes, a quarter of the size, which are normalised there.

    Attributes:
        pixels: `(B, 3, H, W)` bytes.
        values: the normalised value of each level of each channel, `(3, 256)`.
        readable: `(B, 1, 1, 1)`, 0 for images that could not be read; None if all could.
    """

    pixels: Tensor
    values: Tensor
    readable: Tensor | None

    def pin_memory(self) -> "Levels":
        """The same in memory that a GPU copies from; the loader calls it."""
        pinned = {name: part.pin_memory() for name, part in vars(self).items() if part is not None}
        return dataclasses.replace(self, **pinned)

    def normalize(self, device: torch.device, layout: torch.memory_format) -> Tensor:
        """What the transform would have given, to the last bit, on the device."""
        pixels = self.pixels.to(device, non_blocking=True).int()
        first = torch.arange(0, 768, 256, dtype=torch.int32, device=device).view(3, 1, 1)
        found = self.values.to(device, non_blocking=True).flatten()[pixels + first]
        if self.readable is not None:
            found *= self.readable.to(device, non_blocking=True)
        return found.contiguous(memory_format=layout)


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
        self.values: Tensor | None = None  # where pixels are bytes: what each level becomes
        self._to_pixels: Callable[[Any], Tensor] = transform

    def as_bytes(self) -> "Samples":
        """The same images in batches of `Levels`, where the transform has levels."""
        samples, transform = copy.copy(self), self.transform
        if isinstance(transform, v2.Compose):
            samples._to_pixels, samples.values = split_normalization(transform)
        elif isinstance(transform, RandomView) and not transform.lighting:
            samples.values = transform.level_values
        return samples

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int, str]:
        (pixels,), (index,), (error,) = self._make([key])
        return pixels, index, error

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[Any]:
        """A batch: pixels or `Levels`, indices `(B,)`, errors."""
        pixels, indices, errors = self._make(keys)
        if self.values is None:
            return [pixels, torch.tensor(indices), errors]
        readable = None
        if any(errors):
            readable = torch.tensor([float(not error) for error in errors]).view(-1, 1, 1, 1)
        return [Levels(pixels, self.values, readable), torch.tensor(indices), errors]

    @staticmethod
    def collate(batch: list[Any]) -> list[Any]:
        """What the loader has got from `__getitems__` is a batch already."""
        return batch

    def _make(self, keys: Sequence[tuple[int, int]]) -> tuple[Tensor, list[int], list[str]]:
        """Pixels `(B, 3, H, W)`, indices and errors; random views are stored channels last."""
        indices, errors = [index for _, index in keys], [""] * len(keys)
        if not isinstance(self.transform, RandomView):
            made = [self._evaluate(key) for key in keys]
            return default_collate([row for row, _ in made]), indices, [error for _, error in made]
        pixels = self._blank_views(len(keys))
        rows = pixels.numpy()
        for first in range(0, len(keys), TOGETHER):
            part = range(first, min(first + TOGETHER, len(keys)))
            makers = [self._make_view(self.transform, keys[place], rows[place]) for place in part]
            for _ in range(STEPS):
                for place, maker in zip(part, makers, strict=True):
                    errors[place] = next(maker, errors[place])
        return pixels.permute(0, 3, 1, 2), indices, errors

    def _blank_views(self, count: int) -> Tensor:
        """Zeros `(B, H, W, 3)`; in a loader process in memory that is shared with the trainer."""
        shape = (self.spec.size, self.spec.size, 3)
        dtype = torch.float32 if self.values is None else torch.uint8
        if get_worker_info() is None:
            return torch.zeros(count, *shape, dtype=dtype)
        return default_collate([torch.zeros((), dtype=dtype).expand(shape)] * count)

    def _make_view(
        self, transform: RandomView, key: tuple[int, int], target: np.ndarray
    ) -> Iterator[str]:
        """Writes a view to `target`, in `STEPS` steps; yields the error, empty if there is none."""
        epoch, index = key
        try:
            with self.images.opened(index) as image:
                view = transform.draw(*image.size, generator(self.seed, "augment", epoch, index))
                yield ""
                crop = read_crop(image, view.box, transform.size)
            yield ""
            pixels = resize(crop, transform.size)
            yield ""
            render = transform.render if self.values is None else transform.render_bytes
            render(pixels, view, target)
            yield ""
        except UserError as error:
            yield str(error)

    def _evaluate(self, key: tuple[int, int]) -> tuple[Tensor, str]:
        """The pixels by a transform that is no random view, and the error."""
        epoch, index = key
        try:
            with seeded(self.seed, "augment", epoch, index):
                return self._to_pixels(self.images.open(index)), ""
        except UserError as error:
            dtype = torch.float32 if self.values is None else torch.uint8
            return torch.zeros(3, self.spec.size, self.spec.size, dtype=dtype), str(error)


class EpochOrder:
    """The order in which an epoch of a run shows its images: a permutation of 0..n-1.

    That of many images is computed where it is asked for, and no process holds all of it.
    """

    def __init__(self, num_images: int, seed: int, epoch: int) -> None:
        self.num_images, self.seed, self.epoch = num_images, seed, epoch
        self._list: Tensor | None = None
        if draws_of(num_images) == "sequence":
            self._list = torch.randperm(num_images, generator=generator(seed, "order", epoch))

    def images_at(self, places: range) -> list[int]:
        """The images at some consecutive places."""
        if self._list is not None:
            return self._list[places.start : places.stop].tolist()
        wanted = torch.arange(places.start, places.stop)
        key = ("order", self.epoch)
        return permute(wanted, self.num_images, seed=self.seed, key=key).tolist()


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
        """Global batches in an epoch."""
        return self.num_images // self.batch_size

    def bounds(self, step: int) -> tuple[int, int]:
        """First and last place, in the epoch's order, of the images of a step."""
        first = step % self.steps_per_epoch * self.batch_size
        return first, first + self.batch_size

    def __len__(self) -> int:
        return (self.num_steps - self.start) * self.accumulate

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order: EpochOrder | None = None
        parts = self.world_size * self.accumulate
        for step in range(self.start, self.num_steps):
            epoch = step // self.steps_per_epoch
            if order is None or order.epoch != epoch:
                order = EpochOrder(self.num_images, self.seed, epoch)
            first, last = self.bounds(step)
            for part in range(self.rank * self.accumulate, (self.rank + 1) * self.accumulate):
                start, end = (first + (last - first) * k // parts for k in (part, part + 1))
                yield [(epoch, index) for index in order.images_at(range(start, end))]


class EvenBatches(BatchPlan):
    """A plan whose epoch shows every image once, in batches that differ by one image at most.

    Of few labels none should be left out, and a small rest would spoil batch norm.
    """

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in an epoch, none larger than `batch_size`."""
        return math.ceil(self.num_images / self.batch_size)

    def bounds(self, step: int) -> tuple[int, int]:
        """First and last place, in the epoch's order, of the images of a step."""
        number, steps = step % self.steps_per_epoch, self.steps_per_epoch
        return number * self.num_images // steps, (number + 1) * self.num_images // steps


def to_device(
    inputs: Tensor | Levels, device: torch.device, *, channels_last: bool = True
) -> Tensor:
    """Images in the memory layout that convolutions like; rows as they are."""
    is_last = channels_last and (isinstance(inputs, Levels) or inputs.dim() == 4)
    layout = torch.channels_last if is_last else torch.contiguous_format
    if isinstance(inputs, Levels):
        return inputs.normalize(device, layout)
    return inputs.to(device, non_blocking=True, memory_format=layout)


def keep_valid(
    errors: Sequence[str], device: torch.device, report: Callable[[str], None] | None
) -> Tensor:
    """1 for each image that could be read, 0 for the others, `(B,)`.

    Args:
        errors: a message for each image that could not be read, else empty.
        device: where the result lies.
        report: told each message; None to stop at the first.
    """
    if not any(errors):
        return torch.ones(len(errors), device=device)  # no copy that a GPU would be waited for
    for error in filter(None, errors):
        if report is None:
            raise UserError(f"{error}: remove or replace it, or pass --skip-bad-images")
        report(error)
    return torch.tensor([float(not error) for error in errors]).to(device, non_blocking=True)


class _Loader(DataLoader[Any]):
    def check_worker_number_rationality(self) -> None:
        """Torch's would warn twice of more workers than cores: --workers is the user's choice."""

    def __iter__(self) -> Any:
        return _await_death_notice(super().__iter__())


def _await_death_notice(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches; where one is lost, torch has the time to say which process has died."""
    while True:
        try:
            yield next(batches)
        except StopIteration:
            return
        except (OSError, EOFError) as error:
            if lost_a_batch(error):
                time.sleep(5)  # torch's handler of SIGCHLD raises in it
            raise


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
        pin_memory: for copies to a GPU; images then go there as bytes.
    """
    if pin_memory and isinstance(samples, Samples):
        samples = samples.as_bytes()
    # OpenCV's threads would compete with the other loader processes, and do not survive a fork.
    cv2.setNumThreads(0)
    if workers:
        _kill_loaders_at_exit(os.getpid())
    # Python 3.14 would import torch anew in every loader, copy the list of images to it, and keep a
    # server for them that a scheduler's signal ends. macOS, whose libraries bear no fork, spawns.
    forked = workers > 0 and sys.platform.startswith("linux")
    return _Loader(
        samples,
        batch_sampler=plan,
        num_workers=workers,
        collate_fn=getattr(samples, "collate", None),
        pin_memory=pin_memory,
        prefetch_factor=4 if workers else None,
        worker_init_fn=_start_worker,
        # Torch seeds loaders with a draw from the global generator; here every draw is keyed.
        generator=torch.Generator(),
        multiprocessing_context="fork" if forked else None,
        # Of a disk that stalls; one that is slow is waited for.
        timeout=int(training_timeout().total_seconds()) if workers else 0,
    )


@functools.cache
def _kill_loaders_at_exit(pid: int) -> None:
    """Once in a process: at exit, before Python itself ends the child processes that are left."""
    multiprocessing.util.Finalize(None, kill_loaders, exitpriority=0)


def _start_worker(worker: int) -> None:
    cv2.setNumThreads(0)  # a spawned process has the default
    give_back_memory()
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

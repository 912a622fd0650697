"""Batches do not depend on workers, processes, or where a run was stopped."""

import numpy as np
import torch

from instdisc.images.loading import BatchPlan, Samples, build_loader, sequential_plan
from instdisc.images.sets import ImageSet
from instdisc.images.transforms import InputSpec, pretrain_transform

SPEC = InputSpec(size=16)


def images(n: int = 20) -> ImageSet:
    pixels = np.random.default_rng(0).integers(0, 256, (n, 20, 20, 3), dtype=np.uint8)
    names = np.array([str(i).encode() for i in range(n)])
    return ImageSet("t", "train", ("a",), names, np.zeros(n, int), np.zeros(n, int), pixels=pixels)


def plan(**changes: int) -> BatchPlan:
    values = {"num_images": 22, "batch_size": 4, "seed": 0, "num_steps": 15, **changes}
    return BatchPlan(**values)  # type: ignore[arg-type]


def test_an_epoch_sees_every_image_once_but_for_the_last_partial_batch() -> None:
    steps = list(plan())
    for epoch in range(3):
        keys = [key for batch in steps[epoch * 5 : epoch * 5 + 5] for key in batch]
        assert {e for e, _ in keys} == {epoch}
        assert len({i for _, i in keys}) == 20
    assert [i for _, i in steps[0]] != [i for _, i in steps[5]]
    assert len(plan()) == len(steps) == 15


def test_a_resumed_plan_goes_on_in_the_middle_of_an_epoch() -> None:
    assert list(plan(start=7)) == list(plan())[7:]


def test_processes_and_micro_batches_cut_the_same_global_batches() -> None:
    whole = list(plan())
    ranks = [list(plan(world_size=2, rank=rank)) for rank in (0, 1)]
    assert [a + b for a, b in zip(*ranks, strict=True)] == whole
    micro = list(plan(accumulate=2))
    assert [a + b for a, b in zip(micro[::2], micro[1::2], strict=True)] == whole


def test_batches_do_not_depend_on_the_number_of_workers() -> None:
    samples = Samples(images(22), pretrain_transform(SPEC), SPEC, seed=3)
    alone, two = (list(build_loader(samples, plan(num_steps=6), workers)) for workers in (0, 2))
    torch.manual_seed(99)  # the global generator has no say
    resumed = list(build_loader(samples, plan(num_steps=6, start=2), 0))
    for (a, i, _), (b, j, _) in zip(alone, two, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(i, j)
    for (a, _, _), (b, _, _) in zip(alone[2:], resumed, strict=True):
        assert torch.equal(a, b)


def test_augmentation_changes_with_epoch_image_and_seed() -> None:
    one = Samples(images(), pretrain_transform(SPEC), SPEC, seed=0)
    other = Samples(images(), pretrain_transform(SPEC), SPEC, seed=1)
    base = one[0, 5][0]
    assert torch.equal(base, one[0, 5][0])
    assert not torch.equal(base, one[1, 5][0])
    assert not torch.equal(base, other[0, 5][0])


def test_the_sequential_plan_covers_everything_once() -> None:
    parts = [sequential_plan(11, 3, rank, 2) for rank in (0, 1)]
    keys = [index for part in parts for batch in part for _, index in batch]
    assert sorted(keys) == list(range(11))

"""Batches do not depend on workers, processes, or where a run was stopped."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset

from instdisc.errors import UserError
from instdisc.images.loading import (
    TOGETHER,
    BatchPlan,
    Levels,
    Samples,
    build_loader,
    sequential_plan,
    to_device,
)
from instdisc.images.sets import ImageSet
from instdisc.images.transforms import (
    InputSpec,
    Transform,
    eval_transform,
    finetune_transform,
    pretrain_transform,
)

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


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_leaves_torchs_global_generator_alone(workers: int) -> None:
    samples = Samples(images(4), pretrain_transform(SPEC), SPEC, seed=3)
    before = torch.get_rng_state()
    assert len(list(build_loader(samples, [[(0, 0)], [(1, 1)]], workers))) == 2
    assert torch.equal(torch.get_rng_state(), before)


def test_augmentation_changes_with_epoch_image_and_seed() -> None:
    one = Samples(images(), pretrain_transform(SPEC), SPEC, seed=0)
    other = Samples(images(), pretrain_transform(SPEC), SPEC, seed=1)
    base = one[0, 5][0]
    assert torch.equal(base, one[0, 5][0])
    assert not torch.equal(base, one[1, 5][0])
    assert not torch.equal(base, other[0, 5][0])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_holds_the_samples_of_its_images(tmp_path: Path, workers: int) -> None:
    """Those that cannot be opened, or not decoded, among the others."""
    rng = np.random.default_rng(0)
    files = [tmp_path / f"{number}.jpg" for number in range(2 * TOGETHER + 5)]
    for file in files:
        pixels = rng.integers(0, 256, (rng.integers(40, 90), 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file, "PNG" if file.stem == "7" else "JPEG")
    files[3].write_bytes(b"no image")
    whole = files[TOGETHER].read_bytes()
    files[TOGETHER].write_bytes(whole[: len(whole) // 2])
    zeros = np.zeros(len(files), dtype=np.int64)
    names = np.array([file.name.encode() for file in files])
    listed = ImageSet("some", "train", ("all",), names, zeros, zeros, root=tmp_path)
    samples = Samples(listed, pretrain_transform(SPEC), SPEC, seed=0)
    order = rng.permutation(len(files)).tolist()
    ((pixels, indices, errors),) = build_loader(samples, [[(2, i) for i in order]], workers)
    assert indices.tolist() == order
    assert pixels.is_contiguous(memory_format=torch.channels_last)
    for row, index, error in zip(pixels, order, errors, strict=True):
        alone, same, message = samples[2, index]
        assert (same, message) == (index, error)
        assert torch.equal(row, alone)
        assert bool(error) == (index in (3, TOGETHER)) == (not row.any())
        assert not error or str(files[index]) in error


def test_the_sequential_plan_covers_everything_once() -> None:
    parts = [sequential_plan(11, 3, rank, 2) for rank in (0, 1)]
    keys = [index for part in parts for batch in part for _, index in batch]
    assert sorted(keys) == list(range(11))


@pytest.mark.parametrize(
    "transform",
    [pretrain_transform(SPEC), finetune_transform(SPEC), eval_transform(SPEC)],
    ids=["pretraining", "fine-tuning", "evaluation"],
)
def test_bytes_are_normalised_to_the_same_bits(transform: Transform) -> None:
    class Damaged(ImageSet):  # its image 3 cannot be read
        def open(self, index: int):  # type: ignore[no-untyped-def]
            if index == 3:
                raise UserError("damaged")
            return super().open(index)

        def opened(self, index: int):  # type: ignore[no-untyped-def]
            if index == 3:
                raise UserError("damaged")
            return super().opened(index)

    fields = {f.name: getattr(images(), f.name) for f in dataclasses.fields(ImageSet)}
    samples = Samples(Damaged(**fields), transform, SPEC, seed=3)
    cpu = torch.device("cpu")
    batches = [[(0, 0), (1, 1), (0, 7)], [(0, 2), (0, 3)]]
    floats = list(build_loader(samples, batches, 0))
    levels = list(build_loader(samples.as_bytes(), batches, 0))
    for (expected, i, _), (found, j, errors) in zip(floats, levels, strict=True):
        assert isinstance(found, Levels)
        assert found.pixels.dtype == torch.uint8
        assert torch.equal(i, j)
        assert torch.equal(to_device(found, cpu), to_device(expected, cpu))
        assert to_device(found, cpu).is_contiguous(memory_format=torch.channels_last)
        assert ("damaged" in errors) == (3 in i)


def test_lighting_noise_is_no_level() -> None:
    samples = Samples(images(), finetune_transform(SPEC, colors=True), SPEC, seed=0)
    assert samples.as_bytes()[0, 0][0].dtype == torch.float32


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="loaders are spawned here")
def test_loaders_share_the_list_of_images_on_every_python() -> None:
    class Numbers(Dataset[int]):  # of a function: it can be inherited by a fork, but not pickled
        def __getitem__(self, key: int) -> int:
            return key * key

    batches = list(build_loader(Numbers(), [[1, 2], [3]], workers=1))
    assert [batch.tolist() for batch in batches] == [[1, 4], [9]]

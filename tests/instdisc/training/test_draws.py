"""Draws by counters: permutations, noise and rows with the properties of torch's sequences."""

import itertools

import pytest
import torch
from scipy import stats
from torch import Tensor

from instdisc.images.loading import BatchPlan, EpochOrder
from instdisc.training import draws
from instdisc.training.draws import permute, random_bits, scale_bits, shift_right, unit_rows
from pretrain.bank import initial_rows
from pretrain.objectives import draw_noise

BILLION = 10**9
SIDE = 31_623  # the root of a billion: the permutation works on pairs of numbers below it


def order(n: int, epoch: int, places: Tensor) -> Tensor:
    return permute(places, n, seed=0, key=("order", epoch))


def shown(n: int, epoch: int, first: int, count: int) -> Tensor:
    return torch.tensor(EpochOrder(n, 0, epoch).images_at(range(first, first + count)))


def assert_uniform(values: Tensor, bins: int) -> None:
    counts = torch.bincount(values, minlength=bins)
    assert len(counts) == bins
    assert stats.chisquare(counts.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("epoch", [0, 1])
def test_every_small_order_is_a_permutation(epoch: int) -> None:
    for n in (*range(1, 200), 255, 256, 257, 4095, 4096, 4097, 99_999):
        found = order(n, epoch, torch.arange(n))
        assert torch.equal(found.sort().values, torch.arange(n)), n


def test_a_part_of_a_large_order_repeats_no_image() -> None:
    found = order(BILLION, 0, torch.arange(1_000_000))
    assert found.min() >= 0
    assert found.max() < BILLION
    assert len(found.unique()) == len(found)


@pytest.mark.parametrize("n", [3, 4])
def test_all_orders_of_few_images_are_equally_likely(n: int) -> None:
    number = {each: i for i, each in enumerate(itertools.permutations(range(n)))}
    found = [number[tuple(order(n, epoch, torch.arange(n)).tolist())] for epoch in range(600)]
    assert_uniform(torch.tensor(found), len(number))


# What follows holds for both kinds of draws: below and above COUNTED_FROM.
SIZES = {"sequence": 2_000_000, "counter": BILLION}


@pytest.mark.parametrize("kind", SIZES)
def test_places_are_uniform_and_neighbours_independent(kind: str) -> None:
    n = SIZES[kind]
    assert draws.draws_of(n) == kind
    count, lags = 200_000, (1, 2, SIDE)
    images = shown(n, 3, 12_345, count)
    later = shown(n, 4, 12_345, count)
    assert_uniform(images * 1000 // n, 1000)
    assert_uniform(images % 64, 64)
    assert_uniform((images * 32 // n) * 32 + later * 32 // n, 1024)  # one place, two epochs
    for lag in lags:
        pairs = images[:-lag], images[lag:]
        assert_uniform((pairs[0] * 32 // n) * 32 + pairs[1] * 32 // n, 1024)
        assert_uniform((pairs[1] - pairs[0]) % n * 100 // n, 100)
        both = torch.stack(pairs).double()
        assert abs(torch.corrcoef(both)[0, 1].item()) < 4 / count**0.5


def test_one_place_shows_any_image_over_the_epochs() -> None:
    place = torch.tensor([777])
    found = torch.cat([order(BILLION, epoch, place) for epoch in range(800)])
    assert stats.kstest(found.numpy() / BILLION, "uniform").pvalue > 1e-3


def test_processes_compute_their_parts_of_one_order() -> None:
    sizes = {"num_images": BILLION, "batch_size": 96, "seed": 5, "num_steps": 4}
    whole = list(BatchPlan(**sizes))
    ranks = [list(BatchPlan(**sizes, world_size=3, rank=rank)) for rank in range(3)]
    assert [a + b + c for a, b, c in zip(*ranks, strict=True)] == whole
    assert list(BatchPlan(**sizes, start=2)) == whole[2:]
    assert len({image for batch in whole for _, image in batch}) == 4 * 96


@pytest.mark.parametrize("n", [2**24, 10**8, BILLION, 2**31])
def test_noise_is_uniform_to_the_last_of_64_bits(n: int) -> None:
    """Against Python's integers: an image has 2^64 / n values, rounded up or down."""
    bits = random_bits(torch.arange(2000))
    bits = torch.cat([bits, torch.tensor([0, -1, 1, 2**63 - 1, -(2**63), 2**32, -(2**32)])])
    assert scale_bits(bits, n).tolist() == [(b % 2**64) * n >> 64 for b in bits.tolist()]
    fewest = 2**64 // n
    assert 1 / fewest < 1e-6


def test_noise_of_a_billion_images_is_not_that_of_32_bits() -> None:
    """Of 2^32 values three images in ten get five and the others four: they show as 34%."""
    noise = draw_noise(BILLION, range(100), 10_000, seed=1, step=2).flatten()
    bits = random_bits(torch.arange(1_000_000))
    rough = shift_right(bits, 32) * BILLION >> 32

    def share(images: Tensor) -> float:
        first = -(-images * 2**32 // BILLION)  # the values that are scaled to an image
        last = -(-(images + 1) * 2**32 // BILLION)
        return float((last - first == 5).double().mean())

    fair = (2**32 - 4 * BILLION) / BILLION
    assert share(noise) == pytest.approx(fair, abs=2e-3)
    assert share(rough) == pytest.approx(5 * fair / (4 + fair), abs=2e-3)
    assert_uniform(noise * 1000 // BILLION, 1000)


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("dim", [7, 128])
def test_first_rows_are_uniform_on_the_sphere(kind: str, dim: int) -> None:
    n = 20_000 if kind == "sequence" else BILLION
    first = 0 if kind == "sequence" else 123_456_789
    rows = initial_rows(n, dim, seed=2, rows=range(first, first + 4000))
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))
    # A coordinate of such a row, and the cosine of two of them, are 2 Beta((d-1)/2, (d-1)/2) - 1.
    known = stats.beta((dim - 1) / 2, (dim - 1) / 2, loc=-1, scale=2)
    cosines = {lag: (rows[lag:] * rows[:-lag]).sum(dim=1) for lag in (1, 2, 64)}
    for values in (rows[:, 0], rows[:, 1], rows[:, -1], *cosines.values()):
        assert stats.kstest(values.numpy(), known.cdf).pvalue > 1e-3
    products = torch.corrcoef(rows.T) - torch.eye(dim)
    assert products.abs().max() < 6 / len(rows) ** 0.5


@pytest.mark.parametrize("dim", [3, 128])
def test_any_process_computes_its_first_rows(dim: int) -> None:
    rows = range(5_000, 15_000)
    whole = initial_rows(BILLION, dim, seed=4, rows=rows)
    for part in (range(5_000, 5_001), range(9_095, 9_098), range(14_999, 15_000), range(7, 7)):
        found = initial_rows(BILLION, dim, seed=4, rows=part)
        assert torch.equal(found, whole[part.start - 5_000 : part.start - 5_000 + len(part)])
    alone = unit_rows(range(8_191, 8_193), dim, seed=4, key=("bank",))
    assert torch.equal(alone, whole[3_191:3_193])
    half = initial_rows(BILLION, dim, seed=4, rows=rows, dtype=torch.float16)
    assert torch.equal(half, whole.half())

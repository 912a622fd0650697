"""Noise: uniform, keyed, and the same however it is cut."""

import pytest
import torch
from scipy import stats

from pretrain.objectives import draw_noise


@pytest.mark.parametrize("n", [2, 7, 1000, 1_281_167])
def test_noise_is_uniform_over_all_images(n: int) -> None:
    noise = draw_noise(n, range(200), 1000, seed=3, step=11).flatten()
    assert noise.min() >= 0
    assert noise.max() < n
    bins = min(n, 100)
    counts = torch.bincount(noise * bins // n, minlength=bins)
    edges = torch.arange(bins + 1, dtype=torch.float64) * n / bins
    width = torch.ceil(edges[1:]) - torch.ceil(edges[:-1])
    expected = width / n * len(noise)
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-4


def test_successive_draws_are_uncorrelated() -> None:
    noise = draw_noise(1 << 20, range(100), 2000, seed=0, step=0).double()
    for a, b in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1])):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation.item()) < 0.01


def test_every_key_draws_anew() -> None:
    base = draw_noise(10_000, range(4), 50, seed=0, step=0)
    assert not torch.equal(base, draw_noise(10_000, range(4), 50, seed=1, step=0))
    assert not torch.equal(base, draw_noise(10_000, range(4), 50, seed=0, step=1))
    assert not torch.equal(base[0], base[1])
    assert torch.equal(base, draw_noise(10_000, range(4), 50, seed=0, step=0))


def test_processes_together_draw_what_one_would() -> None:
    whole = draw_noise(999, range(8), 33, seed=5, step=2)
    halves = [draw_noise(999, range(a, a + 4), 33, seed=5, step=2) for a in (0, 4)]
    assert torch.equal(whole, torch.cat(halves))

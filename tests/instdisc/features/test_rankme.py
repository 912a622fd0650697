"""RankMe against numpy's singular values, and the mean cosine against all pairs."""

import numpy as np
import pytest
import torch

from instdisc.features import rankme as module
from instdisc.features.rankme import mean_cosine, rankme


def random_rows(count: int, dim: int) -> torch.Tensor:
    return torch.randn(count, dim, generator=torch.Generator().manual_seed(0))


def by_numpy(features: torch.Tensor) -> float:
    singular = np.linalg.svd(features.double().numpy(), compute_uv=False)
    shares = singular / singular.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


@pytest.mark.parametrize("chunk", [7, 1 << 16])
def test_it_is_the_entropy_of_the_singular_values(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_ROWS", chunk)
    rows = random_rows(50, 12) * torch.linspace(0.1, 3, 12)
    assert rankme(rows) == pytest.approx(by_numpy(rows), rel=1e-9)


def test_parallel_rows_have_one_and_orthonormal_ones_as_many_as_columns() -> None:
    assert rankme(torch.ones(20, 6)) == pytest.approx(1, abs=1e-5)
    assert rankme(torch.eye(6)) == pytest.approx(6)
    assert rankme(torch.zeros(5, 3)) == pytest.approx(1)


def test_the_mean_cosine_is_that_of_all_pairs_of_different_rows() -> None:
    rows = torch.nn.functional.normalize(random_rows(9, 4) + 1, dim=1)
    pairs = [float(rows[i] @ rows[j]) for i in range(9) for j in range(9) if i != j]
    assert mean_cosine(rows) == pytest.approx(np.mean(pairs), abs=1e-6)
    assert mean_cosine(rows[:1]) == pytest.approx(0, abs=1e-6)

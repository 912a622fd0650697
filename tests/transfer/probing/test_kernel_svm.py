"""The SVM in the space of the images against liblinear, which solves the same problem."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.svm import LinearSVC

from transfer.probing import kernel_svm
from transfer.probing.kernel_svm import fit, unit_products


@pytest.fixture
def rows() -> torch.Tensor:
    """Features as a network's: positive, nearly parallel, a few directions that matter."""
    rng = torch.Generator().manual_seed(0)
    common = torch.rand(60, generator=rng)
    return (common + 0.5 * torch.randn(90, 60, generator=rng)).clamp(min=0)


@pytest.fixture
def signs(rows: torch.Tensor) -> torch.Tensor:
    """Three classes; no plane separates them."""
    noise = torch.randn(90, 3, generator=torch.Generator().manual_seed(1))
    return torch.where(rows[:, :3] + 0.5 * noise > 1.0, 1.0, -1.0).double()


@pytest.mark.parametrize("cost", [0.5**19, 0.01, 0.1, 30.0])
def test_it_finds_liblinears_minimum(cost: float, rows: torch.Tensor, signs: torch.Tensor) -> None:
    products = unit_products(rows, rows)
    weights = torch.where(signs > 0, 2.0, 1.0).double() * cost
    weights[::7] = 0.0  # left out
    found = products @ fit(products, signs, weights)
    unit = torch.nn.functional.normalize(rows.double(), dim=1).numpy()
    used = np.flatnonzero(weights[:, 0].numpy())
    for column in range(3):
        svm = LinearSVC(C=cost, class_weight={1: 2, -1: 1}, tol=1e-9, max_iter=10**6)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConvergenceWarning)
            svm.fit(unit[used], signs[used, column].numpy())
        np.testing.assert_allclose(found[:, column], svm.decision_function(unit), atol=2e-6)


def test_neither_a_guess_nor_the_other_columns_move_the_solution(
    rows: torch.Tensor, signs: torch.Tensor
) -> None:
    products = unit_products(rows, rows)
    weights = torch.full_like(signs, 0.1)
    together = fit(products, signs, weights)
    for column in range(3):
        part = slice(column, column + 1)
        alone = fit(products, signs[:, part], weights[:, part], start=torch.rand(90, 1).double())
        torch.testing.assert_close(
            products @ alone, products @ together[:, part], atol=1e-5, rtol=0
        )


def test_products_are_those_of_rows_of_length_one(
    rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_svm, "COLUMNS_OF_GRAM", 7)
    rows[5] = 0.0
    unit = torch.nn.functional.normalize(rows.double(), dim=1)
    expected = unit[:20] @ unit.T + 1
    torch.testing.assert_close(unit_products(rows[:20], rows), expected)

"""The vote against scikit-learn, and by hand."""

import math

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from instdisc.cli import UserError
from instdisc.voting import classify, vote


def unit_rows(n: int, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(n, dim, generator=generator), dim=1)


def test_four_vectors_by_hand() -> None:
    bank = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.6, 0.8], [-1.0, 0.0]])
    labels = torch.tensor([0, 1, 1, 2])
    found = classify(
        torch.tensor([[1.0, 0.0]]),
        bank,
        labels,
        num_classes=4,
        num_neighbors=[1, 3],
        temperature=1.0,
    )
    # e^1 for class 0 against e^0.8 + e^0.6 for class 1.
    assert found[1].tolist() == [[0, 1, 2, 3]]
    assert found[3].tolist() == [[1, 0, 2, 3]]
    scores = vote(torch.tensor([[1.0, 0.8, 0.6]]), labels[:3][None], num_classes=4, temperature=1.0)
    assert scores[0].tolist() == pytest.approx([1, math.exp(-0.2) + math.exp(-0.4), 0, 0])


@pytest.mark.parametrize(
    ("n", "q", "dim", "k", "classes"),
    [
        (50, 3, 2, 1, 5),
        (50, 3, 8, 50, 5),
        (200, 101, 16, 20, 7),
        (30, 9, 4, 10, 1),
        (64, 5, 128, 7, 64),
    ],
)
@pytest.mark.parametrize("tau", [0.07, 1.0])
@pytest.mark.parametrize("budget", [1 << 22, 1 << 26])
def test_predictions_equal_scikit_learns(
    n: int, q: int, dim: int, k: int, classes: int, tau: float, budget: int
) -> None:
    bank, queries = unit_rows(n, dim, 0), unit_rows(q, dim, 1)
    labels = torch.arange(n) % classes
    found = classify(
        queries,
        bank,
        labels,
        num_classes=classes,
        num_neighbors=k,
        temperature=tau,
        budget_bytes=budget,
    )[k]
    model = KNeighborsClassifier(
        k, metric="cosine", algorithm="brute", weights=lambda d: np.exp((1 - d) / tau)
    )
    model.fit(bank.double().numpy(), labels.numpy())
    scores = model.predict_proba(queries.double().numpy())
    assert found.shape == (q, min(5, classes))
    assert np.array_equal(found[:, 0].numpy(), scores.argmax(axis=1))
    # Every place holds a class of the score that scikit-learn ranks there.
    ranked = -np.sort(-scores, axis=1)[:, : found.shape[1]]
    np.testing.assert_allclose(np.take_along_axis(scores, found.numpy(), 1), ranked, rtol=1e-4)


def test_equal_scores_go_to_the_lower_class() -> None:
    bank = torch.tensor([[1.0, 0.0]] * 4)
    found = classify(
        bank[:1],
        bank,
        torch.tensor([3, 1, 2, 0]),
        num_classes=6,
        num_neighbors=4,
        temperature=0.07,
    )[4]
    assert found.tolist() == [[0, 1, 2, 3, 4]]


def test_duplicates_and_half_precision() -> None:
    bank = unit_rows(40, 16, 0).repeat(3, 1)
    labels = torch.arange(120) % 40
    found = classify(
        bank[:40].half(),
        bank.half(),
        labels,
        num_classes=40,
        num_neighbors=3,
        temperature=0.07,
    )[3]
    assert found[:, 0].tolist() == list(range(40))


@pytest.mark.parametrize(("k", "labels"), [(0, 5), ([], 5), (2, 4), (6, 5)])
def test_senseless_calls(k: int, labels: int) -> None:
    with pytest.raises(UserError):
        classify(
            unit_rows(2, 4, 0),
            unit_rows(5, 4, 1),
            torch.zeros(labels, dtype=torch.int64),
            num_classes=2,
            num_neighbors=k,
            temperature=0.07,
        )

"""The vote over the processes of a group; two of them: tests/transfer/nearest/test_knn.py."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instdisc.neighbors import shared
from instdisc.neighbors.vote import classify
from instdisc.training.dist import Process


def drawn(num_rows: int, seed: int) -> Tensor:
    rows = torch.randn(num_rows, 8, generator=torch.Generator().manual_seed(seed))
    return nn.functional.normalize(rows, dim=1)


@pytest.mark.parametrize("size", [1, 3, 100])
def test_the_vote_does_not_depend_on_where_it_is_checked(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "QUERIES_BETWEEN_CHECKS", size)
    bank, queries, labels = drawn(50, 0), drawn(7, 1), torch.arange(50) % 5
    alone = Process(0, 1, torch.device("cpu"))
    checks = []
    options: dict[str, Any] = {"num_classes": 5, "num_neighbors": (3, 9), "temperature": 0.1}
    found = shared.classify_shared(
        queries, bank, labels, alone, check=lambda: checks.append(1), **options
    )
    expected = classify(queries, bank, labels, **options)
    assert len(checks) == -(-7 // size)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], expected[k]) for k in found)

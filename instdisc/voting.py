"""The weighted vote of nearest neighbours (the paper, section 3.4).

A neighbour with cosine similarity s counts exp(s / tau) for its class; the classes with the largest
sums are predicted. Tensors in, tensors out.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from instdisc.cli import UserError
from instdisc.neighbors import DEFAULT_BUDGET_BYTES, top_k

NUM_PREDICTIONS = 5  # top-5 is the most that any table reports


@torch.no_grad()
def vote(
    similarities: Tensor, neighbor_labels: Tensor, *, num_classes: int, temperature: float
) -> Tensor:
    """Class scores of each query, `(Q, C)` float64.

    Args:
        similarities: `(Q, k)`, falling.
        neighbor_labels: classes of the neighbours, `(Q, k)`.
        num_classes: C.
        temperature: tau of the vote.
    """
    # Relative to the nearest: a common factor changes no order, and nothing overflows.
    nearest = similarities[:, :1].double()
    weights = ((similarities.double() - nearest) / temperature).exp()
    scores = weights.new_zeros(len(similarities), num_classes)
    return scores.scatter_add_(1, neighbor_labels, weights)


def _best_classes(scores: Tensor) -> Tensor:
    """Classes by falling score, equals by rising number, `(Q, min(5, C))`."""
    order = scores.sort(dim=1, descending=True, stable=True).indices
    return order[:, :NUM_PREDICTIONS]


@torch.no_grad()
def classify(
    queries: Tensor,
    bank: Tensor,
    bank_labels: Tensor,
    *,
    num_classes: int,
    num_neighbors: int | Sequence[int],
    temperature: float,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> dict[int, Tensor]:
    """Predicts the class of each query from its nearest rows of the bank.

    The search runs once, for the largest k. Scores of all classes are held for a batch of queries
    at a time, so that memory stays within the budget however many classes there are.

    Args:
        queries: unit rows `(Q, D)`.
        bank: unit rows `(N, D)`.
        bank_labels: classes of the bank's rows, `(N,)`.
        num_classes: C.
        num_neighbors: k, or several.
        temperature: tau of the vote.
        budget_bytes: bound on working memory, beside arguments and results.

    Returns:
        For each k, the up to five best classes of each query, best first, `(Q, min(5, C))`.
    """
    ks = [num_neighbors] if isinstance(num_neighbors, int) else list(num_neighbors)
    if not ks or min(ks) < 1:
        raise UserError(f"number of neighbours {ks}: give at least one, and at least 1")
    if len(bank_labels) != len(bank):
        raise UserError(f"{len(bank_labels)} labels for {len(bank)} bank rows: give one for each")
    similarities, indices = top_k(queries, bank, num_neighbors=max(ks), budget_bytes=budget_bytes)
    labels = bank_labels.to(indices.device)[indices]
    # Scores, their sorted copy and its indices: three times 8 bytes a class.
    batch = max(1, budget_bytes // (24 * num_classes))
    predictions: dict[int, Tensor] = {}
    for k in ks:
        parts = [
            _best_classes(
                vote(s[:, :k], ls[:, :k], num_classes=num_classes, temperature=temperature)
            )
            for s, ls in zip(similarities.split(batch), labels.split(batch), strict=True)
        ]
        predictions[k] = torch.cat(parts)
    return predictions

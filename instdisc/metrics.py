"""Accuracy from ranked predictions."""

import torch
from torch import Tensor


def top_k_accuracy(predictions: Tensor, labels: Tensor, k: int) -> float:
    """Percentage of rows whose label is among the first k predictions.

    Args:
        predictions: class indices, best first, `(Q, P)`; with fewer than k columns all count.
        labels: true classes, `(Q,)`.
        k: how many predictions count.
    """
    hits = (predictions[:, :k] == labels[:, None]).any(dim=1)
    return 100.0 * hits.to(torch.float64).mean().item()

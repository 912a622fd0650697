"""The kNN vote shared over processes: each classifies its part of the queries, on its device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from instdisc.neighbors.vote import classify
from instdisc.runs.log import LOGGER
from instdisc.training import dist
from instdisc.training.dist import Process

QUERIES_BETWEEN_CHECKS = 512  # seconds of a CPU with as many rows as ImageNet has images


def to_device(bank: Tensor, device: torch.device) -> Tensor:
    """The bank on the GPU if it leaves memory there for the search; else where it is."""
    if device.type == "cuda" and bank.device != device:
        free, _ = torch.cuda.mem_get_info(device)
        if bank.nbytes > 0.7 * free:
            LOGGER.info(f"{bank.nbytes / 1e9:.1f} GB of features do not fit the GPU: using the CPU")
            return bank
    return bank.to(device)


def classify_shared(
    queries: Tensor,
    bank: Tensor,
    labels: Tensor,
    process: Process,
    *,
    num_classes: int,
    num_neighbors: Sequence[int],
    temperature: float,
    check: Callable[[], None] | None = None,
) -> dict[int, Tensor]:
    """Predicts classes as `classify` does; every process gets all of them, on the CPU.

    Args:
        queries: (Q, D), the same on every process.
        bank: (N, D), the same on every process.
        labels: (N,) classes of the bank rows.
        process: this process among its peers.
        num_classes: C.
        num_neighbors: every k.
        temperature: tau of the vote.
        check: called now and then, equally often on every process; may raise to end the search.
    """
    bank = to_device(bank, process.device)
    labels = labels.to(bank.device)
    mine = torch.arange(process.rank, len(queries), process.world_size)
    share = -(-len(queries) // process.world_size)  # of the first process; others may have one less
    size = QUERIES_BETWEEN_CHECKS if check is not None else max(1, share)
    parts = []
    for first in range(0, max(1, share), size):
        if check is not None:
            check()
        rows = queries[mine[first : first + size]].to(bank.device)
        parts.append(
            classify(
                rows,
                bank,
                labels,
                num_classes=num_classes,
                num_neighbors=num_neighbors,
                temperature=temperature,
            )
        )
    where = mine.to(process.device)
    return {
        k: dist.gather_by_index(
            torch.cat([part[k] for part in parts]).to(process.device), where, len(queries)
        ).cpu()
        for k in num_neighbors
    }

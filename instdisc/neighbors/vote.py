"""Exact cosine top-k and the weighted vote over it (paper, section 3.4).

Rows are compared as they are: give unit rows and a dot product is the cosine similarity. Every
answer is the same, bit for bit, under every memory budget, number of threads and sharding of the
bank (`instdisc.neighbors.search` says how). No state is kept between calls.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from instdisc.errors import UserError
from instdisc.neighbors.search import (
    KEY_ROWS,
    ParallelMap,
    from_keys,
    longest_row,
    plan_search,
    search_group,
    to_keys,
)

DEFAULT_BUDGET_BYTES = 192 << 20
# What a thread of its own is worth having for: bank rows, and memory besides 1 KB a neighbour.
THREAD_ROWS, THREAD_BYTES = 4096, 32 << 20
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def top_k(
    queries: Tensor,
    bank: Tensor,
    *,
    num_neighbors: int,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Find the nearest bank rows of each query by dot product, exactly.

    A long bank on a CPU is searched by threads that draw chunk after chunk: every step of a search
    is short, and threads that shared each step would mostly wait for one another. Meanwhile torch's
    number of threads is set lower, for the whole process.

    Args:
        queries: (Q, D), float32, float16 or bfloat16.
        bank: (N, D), on the same device; its type may be another of the three.
        num_neighbors: k, at most N.
        budget_bytes: bound on working memory, on top of the arguments and the result.
        offset: index of the bank's first row, for a bank that is one shard of a larger one.

    Returns:
        Similarities (Q, k) float32, falling, and indices (Q, k) int64, rising among equals.
    """
    _check_search(queries, bank, num_neighbors, offset)
    similarities = queries.new_empty(len(queries), num_neighbors, dtype=torch.float32)
    indices = torch.empty_like(similarities, dtype=torch.int64)
    if not len(queries):
        return similarities, indices
    num_threads = torch.get_num_threads() if bank.device.type == "cpu" else 1
    worth_it = min(
        len(bank) // THREAD_ROWS, budget_bytes // (THREAD_BYTES + 1024 * num_neighbors), num_threads
    )
    num_searches = max(1, worth_it)
    plan = plan_search(
        queries, bank, num_neighbors=num_neighbors, budget_bytes=budget_bytes // num_searches
    )
    with _threads(num_searches) as everywhere:
        parts = bank.chunk(8 * num_searches)
        lengths = everywhere(lambda part: longest_row(part, plan.num_rows), parts)
        longest = float(torch.tensor(lengths).amax())  # NaN if one is
        # False for NaN too.
        if not longest_row(queries, plan.num_rows) * longest < 2.0**100:
            raise UserError(
                "features hold NaN, infinite or huge values: normalize or extract them anew"
            )
        pending = torch.arange(len(queries), device=queries.device)
        # A guess at the k-th best saves work; the rare query that it was too high for goes again.
        for guess in (True, False):
            missed = []
            for part in pending.split(plan.num_queries):
                similarities[part], indices[part], proven = search_group(
                    queries[part].float(),
                    bank,
                    everywhere,
                    num_neighbors=num_neighbors,
                    num_searches=num_searches,
                    plan=plan,
                    longest=longest,
                    guess=guess,
                )
                missed.append(part[~proven])
            pending = torch.cat(missed)
            if not len(pending):
                break
    return similarities, indices.add_(offset)


@contextmanager
def _threads(count: int) -> Iterator[ParallelMap]:
    """Yield what runs calls in so many threads, torch's threads shared out among them."""
    if count == 1:
        yield lambda function, arguments: list(map(function, arguments))
        return
    num_threads = torch.get_num_threads()

    def prepare() -> None:
        # Both hold for the thread that says so; MKL asks the thread that calls it.
        torch.set_num_threads(num_threads // count)
        torch.set_grad_enabled(False)

    try:
        with ThreadPoolExecutor(count, initializer=prepare) as pool:
            yield lambda function, arguments: list(pool.map(function, arguments))
    finally:
        torch.set_num_threads(num_threads)


def merge_top_k(
    parts: Sequence[tuple[Tensor, Tensor]], *, num_neighbors: int
) -> tuple[Tensor, Tensor]:
    """Merge the `top_k` of several shards, given with global indices, into that of the whole.

    A shard of n rows has to bring its min(n, k) nearest for the answer to be exact.
    """
    have = sum(similarities.shape[1] for similarities, _ in parts)
    if not 1 <= num_neighbors <= have:
        raise UserError(f"{num_neighbors} neighbours of {have} in the shards: ask for 1 to {have}")
    keys = torch.cat([to_keys(similarities, rows) for similarities, rows in parts], dim=1)
    return from_keys(keys.topk(num_neighbors, dim=1).values)


def vote(similarities: Tensor, labels: Tensor, *, num_classes: int, temperature: float) -> Tensor:
    """Sum exp(s / temperature) over the neighbours of each class: class weights (Q, C), float64.

    Weights are relative to that of the nearest neighbour, so that no temperature overflows; they
    rank the classes of one query as the paper's do. Sums run from the first neighbour to the last,
    on every device: equal arguments give equal bits.

    Args:
        similarities: (Q, k), the nearest first.
        labels: (Q, k), the classes of these neighbours.
        num_classes: C.
        temperature: tau, 0.07 in the paper.
    """
    if similarities.shape != labels.shape:
        raise UserError(
            f"similarities {tuple(similarities.shape)} and labels {tuple(labels.shape)} do not "
            "fit: give one label for each neighbour, bank_labels[indices]"
        )
    _check_vote(labels, num_classes, temperature)
    return _add_votes(
        similarities.new_zeros(len(labels), num_classes, dtype=torch.float64),
        _weights(similarities, temperature),
        labels.long(),
        together=labels.device.type == "cpu",
    )


def rank_classes(weights: Tensor, *, num_predictions: int = 5) -> Tensor:
    """Return the classes of the largest weights (Q, C), largest first: (Q, min(5, C)).

    Equal weights go by class index, so classes without a vote come last and in order.
    """
    weights = weights.clone()
    best = []
    for _ in range(min(num_predictions, weights.shape[1])):
        # Unlike topk, argmax promises the first of equal values.
        best.append(weights.argmax(dim=1, keepdim=True))
        weights.scatter_(1, best[-1], -torch.inf)
    return torch.cat(best, dim=1)


@torch.no_grad()
def classify(
    queries: Tensor,
    bank: Tensor,
    bank_labels: Tensor,
    *,
    num_classes: int,
    num_neighbors: int | Sequence[int] = 200,
    temperature: float = 0.07,
    num_predictions: int = 5,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
) -> dict[int, Tensor]:
    """Predict classes by the weighted vote of the nearest bank rows, for one k or several.

    The search runs once, at the largest k, and no (Q, C) weights are kept.

    Args:
        queries: (Q, D), see `top_k`.
        bank: (N, D), see `top_k`.
        bank_labels: (N,) classes of the bank rows.
        num_classes: C, never inferred: a class may be missing among the queries or the bank.
        num_neighbors: k, or several.
        temperature: tau of the vote.
        num_predictions: how many classes to return, best first.
        budget_bytes: bound on working memory, half for the search and half for the vote.

    Returns:
        For each k the predictions (Q, min(num_predictions, C)), int64.
    """
    counts = [num_neighbors] if isinstance(num_neighbors, int) else list(num_neighbors)
    if not counts:
        raise UserError("no number of neighbours given: ask for one k or several")
    if bank_labels.shape != (len(bank),):
        raise UserError(
            f"{tuple(bank_labels.shape)} labels for {len(bank)} bank rows: give one for each row"
        )
    _check_vote(bank_labels, num_classes, temperature)
    most, labels = max(counts), bank_labels.to(queries.device).long()
    width = min(num_predictions, num_classes)
    predictions = {
        k: torch.empty(len(queries), width, dtype=torch.int64, device=queries.device)
        for k in sorted(set(counts))
    }
    # Weights and the copy that is ranked; similarities, indices, labels, weights of neighbours.
    batch = max(1, budget_bytes // 2 // (24 * num_classes + 64 * most))
    for start in range(0, max(1, len(queries)), batch):
        part = slice(start, start + batch)
        similarities, indices = top_k(
            queries[part], bank, num_neighbors=most, budget_bytes=budget_bytes // 2
        )
        weights, classes = _weights(similarities, temperature), labels[indices]
        total = weights.new_zeros(len(weights), num_classes)
        done = 0
        for k in predictions:
            columns = slice(done, done := k)
            together = total.device.type == "cpu"
            _add_votes(total, weights[:, columns], classes[:, columns], together=together)
            predictions[k][part] = rank_classes(total, num_predictions=num_predictions)
    return predictions


def _weights(similarities: Tensor, temperature: float) -> Tensor:
    """Return the weight (Q, k) of each neighbour over that of the nearest."""
    similarities = similarities.double()
    return (similarities - similarities[:, :1]).div_(temperature).exp_()


def _add_votes(total: Tensor, weights: Tensor, labels: Tensor, *, together: bool) -> Tensor:
    """Add weights (Q, k) to the classes (Q, C) that labels (Q, k) name, in order."""
    # A CPU adds along a row in order. A GPU does so in any order: there, one neighbour at a time.
    step = max(1, labels.shape[1]) if together else 1
    for left in range(0, labels.shape[1], step):
        columns = slice(left, left + step)
        total.scatter_add_(1, labels[:, columns], weights[:, columns])
    return total


def _check_vote(labels: Tensor, num_classes: int, temperature: float) -> None:
    """Refuse labels and temperatures that make no vote."""
    if not temperature > 0:
        raise UserError(f"temperature {temperature}: give a positive number, 0.07 in the paper")
    if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise UserError(
            f"labels from {int(labels.min())} to {int(labels.max())} do not fit {num_classes} "
            "classes: number the classes from 0 and give num_classes of the training set"
        )


def _check_search(queries: Tensor, bank: Tensor, num_neighbors: int, offset: int) -> None:
    """Refuse arguments that no search can answer."""
    if queries.ndim != 2 or bank.ndim != 2 or queries.shape[1] != bank.shape[1]:
        raise UserError(
            f"queries {tuple(queries.shape)} and bank {tuple(bank.shape)} do not fit: "
            "give (Q, D) and (N, D) features of the same model"
        )
    for name, dtype in (("queries", queries.dtype), ("bank", bank.dtype)):
        if dtype not in DTYPES:
            raise UserError(f"{name} of type {dtype}: cast to float32, float16 or bfloat16")
    if queries.device != bank.device:
        raise UserError(f"queries on {queries.device}, bank on {bank.device}: move one with .to()")
    if not 1 <= num_neighbors <= len(bank):
        raise UserError(
            f"{num_neighbors} neighbours of {len(bank)} bank rows: ask for 1 to {len(bank)}"
        )
    if offset < 0 or offset + len(bank) > KEY_ROWS:
        raise UserError(f"bank rows up to {offset + len(bank)}: indices must lie in 0 to 2**32 - 1")


# Accuracy from ranked predictions.


def top_k_accuracy(predictions: Tensor, labels: Tensor, k: int) -> float:
    """Percentage of rows whose label is among the first k predictions.

    Args:
        predictions: class indices, best first, `(Q, P)`; with fewer than k columns all count.
        labels: true classes, `(Q,)`.
        k: how many predictions count.
    """
    hits = (predictions[:, :k] == labels[:, None]).any(dim=1)
    return 100.0 * hits.to(torch.float64).mean().item()

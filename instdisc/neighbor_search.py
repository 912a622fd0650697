"""The machinery of `instdisc.neighbors`: exact top-k by dot product within a memory budget.

A bank is read in chunks, each for a group of queries; the threads of a search draw from the same
list of them, and their shortlists are made one in the end.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from instdisc.errors import UserError
from instdisc.exact_similarity import from_keys
from instdisc.shortlist import BLOCK, GroupSearch, SearchPlan

# Scores of a chunk stay in the cache between the product that writes and the maximum that reads; a
# GPU has a larger one.
CHUNK_ROWS, GPU_CHUNK_ROWS = 2048, 8192
# Queries whose shortlists a thread settles before it takes more.
SETTLE_QUERIES = 64
# Rows from which the k-th best of a long bank is guessed.
SAMPLE_ROWS = 32768

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class Everywhere(Protocol):
    """Call a function with one argument after another, perhaps in threads."""

    def __call__(
        self, function: Callable[[Argument], Result], arguments: Iterable[Argument], /
    ) -> list[Result]:
        """Return what the calls return, in order."""


def plan_search(
    queries: Tensor, bank: Tensor, *, num_neighbors: int, budget_bytes: int
) -> SearchPlan:
    """Choose the largest sizes that are worth having and fit into the budget."""
    dim = bank.shape[1]
    capacity = min(len(bank), 6 * num_neighbors + 2 * BLOCK)
    waiting = max(16, num_neighbors // 2)
    group, pairs = max(1, min(len(queries), 256)), 4096
    rows = CHUNK_ROWS if bank.device.type == "cpu" else GPU_CHUNK_ROWS
    while True:
        num_bytes = (
            # Scores, copies of blocks and their masks; or the keys of tied queries.
            group * rows * 24
            + group * waiting * BLOCK * 10
            # The shortlist, and the flat lists that fill and compact it.
            + group * capacity * 128
            # Queries, their fixed point, maxima of the sample.
            + group * (dim * 32 + SAMPLE_ROWS // 2)
            + (rows * dim * 4 if bank.dtype != torch.float32 else 0)
            # Fixed point of gathered rows.
            + pairs * dim * 32
            + (1 << 16)
        )
        if num_bytes <= budget_bytes:
            return SearchPlan(group, rows, pairs, group * waiting, capacity, num_bytes)
        # Each step is small work for torch below some size: long chunks matter the longest.
        if pairs > 512:
            pairs //= 2
        elif rows > 4096:
            rows //= 2
        elif group > 8:
            group //= 2
        elif rows > 512:
            rows //= 2
        elif group > 1:
            group //= 2
        elif rows > BLOCK:
            rows //= 2
        elif pairs > 1:
            pairs //= 2
        else:
            raise UserError(
                f"budget of {budget_bytes} bytes is too small for {num_neighbors} neighbours in "
                f"{dim} dimensions: give at least {num_bytes}"
            )


def search_group(
    queries: Tensor,
    bank: Tensor,
    everywhere: Everywhere,
    *,
    num_neighbors: int,
    num_searches: int,
    plan: SearchPlan,
    longest: float,
    guess: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Search a bank for one group of queries (G, D).

    Args:
        queries: float32.
        bank: (N, D).
        everywhere: runs calls, in threads if it has some.
        num_neighbors: k.
        num_searches: how many searches share the bank's chunks: one for each thread.
        plan: sizes for each of them.
        longest: length of the longest bank row.
        guess: start from a guess at the k-th best, which saves work and may be too high.

    Returns:
        Similarities (G, k), bank rows (G, k), and for which queries (G,) they are proven: all of
        them without a guess.
    """
    searches = [
        GroupSearch(queries, bank, num_neighbors, plan, longest) for _ in range(num_searches)
    ]
    rank, block = _rank_of_guess(num_neighbors, len(bank)) if guess else (0, BLOCK)
    if rank:
        # Iterators over lists, here and below: each search draws the next item when it is free.
        parts = iter(bank[:: _sample_step(len(bank))].split(plan.num_rows))
        maxima = everywhere(lambda search: search.sample(parts, block), searches)
        best = torch.cat(list(itertools.chain.from_iterable(maxima)), dim=1)
        floor = best.kthvalue(best.shape[1] - rank + 1, dim=1, keepdim=True).values
        for search in searches:
            search.start_from(floor)
    chunks = iter(_chunks(len(bank), plan.num_rows, rising=not rank))
    everywhere(lambda search: search.scan(chunks), searches)
    first, *others = searches
    for other in others:
        first.absorb(other)
    keys = torch.cat(everywhere(first.settle, first.everyone.split(SETTLE_QUERIES)))
    return *from_keys(keys), (first.floor > first.guess).squeeze(1)


def _sample_step(num_rows: int) -> int:
    """Return the distance of the bank rows that are sampled."""
    return max(16, num_rows // SAMPLE_ROWS)


def _rank_of_guess(num_neighbors: int, num_rows: int) -> tuple[int, int]:
    """Return which of a sample's best maxima of blocks to guess, and the size of these blocks.

    A little more than k rows reach it. The rank is 0 if the sample cannot tell.
    """
    step = _sample_step(num_rows)
    expected = num_neighbors / step
    # One query in some ten thousand has more of its nearest in the sample than that.
    rank = math.ceil(expected + 4.5 * math.sqrt(expected) + 1)
    block = BLOCK
    while 2 * rank * block * step > num_rows:
        if block == 1:
            return 0, block
        block //= 2
    return rank, block


def _chunks(num_rows: int, size: int, *, rising: bool) -> list[range]:
    """Cut a bank; `rising` chunks double, so that the floor is up before the bulk comes."""
    chunks, start = [], 0
    while start < num_rows:
        wanted = max(512, start) if rising else size
        chunks.append(range(start, min(num_rows, start + min(size, wanted))))
        start = chunks[-1].stop
    return chunks

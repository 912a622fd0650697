"""The machinery of `instdisc.neighbors`: exact top-k by dot product within a memory budget.

A plain float32 matrix product is far faster and errs by a bounded amount. It only shortlists: what
falls short of the running k-th best by more than twice the bound cannot be among the k nearest.
The few rows that are left get the defined value of `instdisc.exact_similarity`, and that alone
decides.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from instdisc.cli import UserError
from instdisc.exact_similarity import from_keys, num_bits, slack_of, to_fixed_point, to_keys

# Scores are looked at one by one only in blocks whose maximum reaches the floor.
BLOCK = 64
# Scores of a chunk stay in the cache between the product that writes and the maximum that reads; a
# GPU has a larger one.
CHUNK_ROWS, GPU_CHUNK_ROWS = 2048, 8192
# Rows from which the k-th best of a long bank is guessed.
SAMPLE_ROWS = 32768
LOWEST = torch.finfo(torch.float32).min


class SearchPlan(NamedTuple):
    """Sizes into which a search is cut so that its working memory stays within a budget."""

    num_queries: int
    """Queries that are searched together."""
    num_rows: int
    """Bank rows that are scored at once: a multiple of BLOCK."""
    num_pairs: int
    """Pairs of a query and a row that get their defined similarity at once."""
    num_pending: int
    """Blocks that wait to be looked into."""
    capacity: int
    """Shortlist places of one query."""
    num_bytes: int
    """Working memory at the worst moment."""


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


class GroupSearch:
    """The search of one group of queries (G, D): scan for a shortlist, then settle it."""

    def __init__(
        self, queries: Tensor, bank: Tensor, num_neighbors: int, plan: SearchPlan, longest: float
    ) -> None:
        self.queries, self.bank, self.k, self.plan = queries, bank, num_neighbors, plan
        num_queries = len(queries)
        self.bits = num_bits(queries.shape[1])
        self.fixed, self.unit = to_fixed_point(queries, self.bits)
        self.slack = slack_of(queries, longest, self.bits)
        self.everyone = torch.arange(num_queries, device=queries.device)
        # The shortlist: the first `counts` places of a query are taken, the others hold -inf.
        self.scores = queries.new_full((num_queries, plan.capacity), -torch.inf)
        self.rows = torch.zeros_like(self.scores, dtype=torch.int64)
        self.counts = torch.zeros_like(self.everyone)
        # A query with more than `room` places taken after a clearing is settled at once.
        self.room = plan.capacity // 2 if plan.capacity < len(bank) else plan.capacity
        # Rows that score below it are dropped: a guess until proven, `bars` its copy per block.
        self.floor = queries.new_full((num_queries, 1), LOWEST)
        self.guess = torch.full_like(self.floor, -torch.inf)
        self.bars = self.floor
        self.buffer = queries.new_empty(num_queries * plan.num_rows)
        self.pending: list[tuple[int, int, Tensor, Tensor]] = []
        self.num_pending = 0

    def run(self, *, guess: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Return similarities (G, k), bank rows (G, k), and for which queries (G,) they are proven.

        Without a guess that is all of them.
        """
        num_rows = len(self.bank)
        guess = guess and self._guess_floor()
        start = 0
        while start < num_rows:
            # Without a guess, chunks double, so that the floor is up before the bulk comes.
            wanted = self.plan.num_rows if guess else max(512, start)
            stop = min(num_rows, start + min(self.plan.num_rows, wanted))
            self._scan(start, stop)
            start = stop
        if self.pending:
            self._flush()
        return *from_keys(self._settle(self.everyone)), (self.floor > self.guess).squeeze(1)

    def _product(self, chunk: Tensor) -> Tensor:
        """Return approximate scores (G, C) in the buffer, with -inf up to whole blocks."""
        width = -(-len(chunk) // BLOCK) * BLOCK
        scores = self.buffer[: len(self.queries) * width].view(-1, width)
        torch.mm(self.queries, chunk.T, out=scores[:, : len(chunk)])
        if width > len(chunk):
            scores[:, len(chunk) :] = -torch.inf
        return scores

    def _guess_floor(self) -> bool:
        """Set the floor where a sample says that a little more than k rows reach it, if it can."""
        step = max(16, len(self.bank) // SAMPLE_ROWS)
        expected = self.k / step
        # One query in some ten thousand has more of its nearest in the sample than that.
        rank = math.ceil(expected + 4.5 * math.sqrt(expected) + 1)
        if 2 * rank * BLOCK * step > len(self.bank):
            return False
        maxima = []
        for part in self.bank[::step].split(self.plan.num_rows):
            # Neighbours in the bank are often alike, so they go into different blocks.
            blocks = self._product(part.float()).view(len(self.queries), BLOCK, -1)
            maxima.append(blocks.amax(1))
        best = torch.cat(maxima, dim=1)
        self.guess = best.kthvalue(best.shape[1] - rank + 1, dim=1, keepdim=True).values
        self.bars = self.floor = self.guess.clone()
        return True

    def _scan(self, start: int, stop: int) -> None:
        """Keep the blocks among some bank rows that reach the floor, for the next flush."""
        chunk = self.bank[start:stop].float()
        scores = self._product(chunk)
        num_blocks = scores.shape[1] // BLOCK
        blocks = scores.view(-1, num_blocks, BLOCK)
        if self.bars.shape[1] != num_blocks:
            self.bars = self.floor.expand(-1, num_blocks).contiguous()
        reach = blocks.amax(2) >= self.bars
        block = reach.view(-1).nonzero().squeeze(1)
        many = 4 * block.numel() > reach.numel()
        if many:
            # Ties with the k-th best, or a bank sorted by similarity: too many for a shortlist.
            crowded = (10 * reach.sum(1) >= 9 * num_blocks).nonzero().squeeze(1)
            count = (scores[crowded] >= self.floor[crowded]).sum(1)
            crowded = crowded[count > self.room]
            if crowded.numel():
                self._settle_chunk(crowded, chunk, start)
                reach[crowded] = False
                block = reach.view(-1).nonzero().squeeze(1)
        inside = scores.view(-1, BLOCK).index_select(0, block)
        self.pending.append((start, num_blocks, block, inside))
        self.num_pending += block.numel()
        if many or self.num_pending >= self.plan.num_pending:
            self._flush()

    def _flush(self) -> None:
        """Shortlist from the pending blocks what reaches the floor, and raise it."""
        query = torch.cat([block // num_blocks for _, num_blocks, block, _ in self.pending])
        row = torch.cat([block % width * BLOCK + start for start, width, block, _ in self.pending])
        inside = torch.cat([scores for *_, scores in self.pending])
        self.pending, self.num_pending = [], 0
        self._take(query, row, inside)
        self._compact(self.everyone)
        self.bars = self.floor

    def _take(self, query: Tensor, row: Tensor, inside: Tensor) -> None:
        """Shortlist what reaches the floor in blocks (M, BLOCK) of a query (M,), from row (M,)."""
        passes = inside >= self.floor.index_select(0, query)
        if len(query) > 1 and int(passes.count_nonzero()) > self.scores.numel():
            del passes
            half = len(query) // 2
            self._take(query[:half], row[:half], inside[:half])
            return self._take(query[half:], row[half:], inside[half:])
        hit = passes.view(-1).nonzero().squeeze(1)
        del passes
        block = hit // BLOCK
        query, order = query.index_select(0, block).sort(stable=True)
        hit, block = hit.index_select(0, order), block.index_select(0, order)
        row = row.index_select(0, block).add_(hit).sub_(block.mul_(BLOCK))
        score = inside.view(-1).index_select(0, hit)
        while True:
            found = torch.bincount(query, minlength=len(self.counts))
            free = self.plan.capacity - self.counts
            if bool((found <= free).all()):
                break
            rank = torch.arange(len(query), device=query.device) - (found.cumsum(0) - found)[query]
            fits = rank < free[query]
            self._append(query[fits], score[fits], row[fits], found.minimum(free))
            self._compact(self.everyone[found > free])
            rest = ~fits & (score >= self.floor[query, 0])
            query, score, row = query[rest], score[rest], row[rest]
        self._append(query, score, row, found)

    def _append(self, query: Tensor, score: Tensor, row: Tensor, found: Tensor) -> None:
        """Put rows, in order of their query and `found` (G,) of each, into the next places."""
        first = self.everyone * self.plan.capacity + self.counts - (found.cumsum(0) - found)
        place = first.index_select(0, query)
        place += torch.arange(len(query), device=query.device)
        self.scores.view(-1).scatter_(0, place, score)
        self.rows.view(-1).scatter_(0, place, row)
        self.counts += found

    def _raise_floor(self, query: Tensor, kth_best: Tensor) -> None:
        """Use that k rows of each query score `kth_best` or more."""
        raised = kth_best.clamp_min(LOWEST) - self.slack[query]
        self.floor[query] = torch.maximum(self.floor[query], raised[:, None])

    def _compact(self, query: Tensor) -> None:
        """Raise the floor of some queries to what their shortlists show; drop what is below."""
        width = int(self.counts[query].max())
        if width < self.k:
            return
        scores, rows = self.scores[query, :width], self.rows[query, :width]
        self._raise_floor(query, scores.kthvalue(width - self.k + 1, dim=1).values)
        keep = scores >= self.floor[query]
        self.scores[query, :width] = -torch.inf
        self.counts[query] = 0
        found = torch.zeros_like(self.counts).index_copy_(0, query, keep.sum(1))
        kept = keep.view(-1).nonzero().squeeze(1)
        score, row = scores.view(-1).index_select(0, kept), rows.view(-1).index_select(0, kept)
        self._append(query[kept // width], score, row, found)
        overfull = query[self.counts[query] > self.room]
        if len(overfull):
            self._replace(overfull, self._settle(overfull))

    def _replace(self, query: Tensor, keys: Tensor) -> None:
        """Make k rows with defined similarities the whole shortlist of some queries."""
        similarities, rows = from_keys(keys)
        self.scores[query] = -torch.inf
        self.scores[query, : self.k] = similarities
        self.rows[query, : self.k] = rows
        self.counts[query] = (similarities >= LOWEST).sum(1)
        self._raise_floor(query, similarities[:, -1])
        self.bars = self.floor

    def _settle(self, query: Tensor) -> Tensor:
        """Give shortlisted rows their defined similarity; return the k best keys, falling."""
        width = max(self.k, int(self.counts[query].max()))
        similarities, rows = self.scores[query, :width], self.rows[query, :width]
        columns = min(width, self.plan.num_pairs)
        step = self.plan.num_pairs // columns
        for top in range(0, len(query), step):
            part = query[top : top + step]
            for left in range(0, width, columns):
                tile = slice(top, top + step), slice(left, left + columns)
                shape = rows[tile].shape
                gathered = self.bank.index_select(0, rows[tile].reshape(-1)).view(*shape, -1)
                values, scale = to_fixed_point(gathered, self.bits)
                exact = torch.bmm(values, self.fixed[part, :, None]).mul_(scale)
                exact = exact.mul_(self.unit[part, None]).squeeze(2).float()
                # Free places keep their -inf.
                similarities[tile] = exact.where(similarities[tile] >= LOWEST, -torch.inf)
        return to_keys(similarities, rows).topk(self.k, dim=1).values

    def _settle_chunk(self, query: Tensor, chunk: Tensor, start: int) -> None:
        """Rank shortlist and chunk together by defined similarity for some queries."""
        keys = self._settle(query)
        for part in chunk.split(min(self.plan.num_pairs, self.plan.num_rows // 4)):
            values, scale = to_fixed_point(part, self.bits)
            exact = (self.fixed[query] @ values.T).mul_(self.unit[query]).mul_(scale.T)
            rows = torch.arange(start, start := start + len(part), device=chunk.device)
            keys = torch.cat([keys, to_keys(exact.float(), rows)], dim=1)
            keys = keys.topk(self.k, dim=1).values
        self._replace(query, keys)

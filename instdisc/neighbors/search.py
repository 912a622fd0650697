"""Exact top-k by dot product within a memory budget; `instdisc.neighbors.vote` is the interface.

A similarity has one defined value. Each row is rounded to fixed point (24 bits below its largest
element for up to 32 dimensions, 23 for 128, 22 for 512), coarse enough that float64 sums the
products of two rows without any rounding; that sum is rounded once, to float32. So the order of
summation, the cut into chunks, the number of threads and the device cannot change a bit of it,
equal rows get equal similarities wherever they lie, and "the lower index first" settles every tie.

A plain float32 matrix product is far faster and errs by a bounded amount. It only shortlists: what
falls short of the running k-th best by more than twice the bound cannot be among the k nearest. The
few rows that are left get their defined value, and that alone decides.

A bank is read in chunks, each for a group of queries; the threads of a search draw from the same
list of them, and their shortlists are made one in the end.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from instdisc.errors import UserError

# Indices share an int64 with the 32 bits of a float32.
KEY_ROWS = 1 << 32
# Scores are looked at one by one only in blocks whose maximum reaches the floor.
BLOCK = 64
LOWEST = torch.finfo(torch.float32).min


def num_bits(dim: int) -> int:
    """Return the bits of fixed point with which `dim` products add up exactly in float64."""
    return min(24, (53 - (dim - 1).bit_length()) // 2)


def longest_row(features: Tensor, num_rows: int) -> float:
    """Return the largest row length of features (N, D), reading `num_rows` at a time."""
    lengths = [
        torch.linalg.vector_norm(part, dim=1, dtype=torch.float32).amax()
        for part in features.split(num_rows)
    ]
    return float(torch.stack(lengths).amax())


def to_fixed_point(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round rows (..., D) to integers of `bits` bits, as float64, times a unit (..., 1)."""
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True).clamp_min_(2.0**-100)
    # largest / mantissa is a power of two, exactly; so is every product and quotient by it.
    unit = largest / torch.frexp(largest).mantissa * 2.0**-bits
    return (rows / unit).round_().double(), unit.double()


def slack_of(queries: Tensor, longest_row: float, bits: int) -> Tensor:
    """Bound, for each query (G,), twice the distance of a float32 score from its defined value."""
    dim = queries.shape[1]
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # set for each backend apart, which this getter cannot express
        precision = "medium"
    # Inputs rounded to bfloat16 or TF32 by a process-wide switch; a GPU may have its own.
    rounding = {"highest": 0.0, "high": 2.0**-9, "medium": 2.0**-6}[precision]
    if queries.device.type != "cpu":
        rounding = max(rounding, 2.0**-9)
    # Any order of summation errs by at most dim * 2**-24 of the product of the lengths, fixed
    # point by sqrt(dim) * 2**-bits of it for either row; the rest is for underflow.
    relative = rounding + (dim + 8) * 2.0**-24 + 2 * math.sqrt(dim) * 2.0**-bits
    lengths = torch.linalg.vector_norm(queries, dim=1, dtype=torch.float64)
    tiny = dim * 2.0**-100 * (1 + longest_row + lengths)
    return (2 * (relative * longest_row * lengths + tiny)).float()


def to_keys(similarities: Tensor, rows: Tensor) -> Tensor:
    """Pack into int64 whose order is: higher similarity first, then the lower row."""
    # Adding zero turns -0.0 into 0.0. Floats order like their bits, once negatives are flipped.
    bits = (similarities + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.long().mul_(KEY_ROWS).add_(KEY_ROWS - 1 - rows)


def from_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack keys into float32 similarities and int64 rows of the same shape."""
    ordered = (keys >> 32).int()
    bits = ordered ^ ((ordered >> 31) & 0x7FFFFFFF)
    return bits.view(torch.float32), KEY_ROWS - 1 - (keys & (KEY_ROWS - 1))


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


class GroupSearch:
    """A search for one group of queries (G, D), through the chunks that it gets to see."""

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
        # A query with more than `max_kept` places taken after a clearing is settled at once.
        self.max_kept = plan.capacity // 2 if plan.capacity < len(bank) else plan.capacity
        # Rows that score below it are dropped: a guess until proven, `bars` its copy per block.
        self.floor = queries.new_full((num_queries, 1), LOWEST)
        self.guess, self.guessed = torch.full_like(self.floor, -torch.inf), False
        self.bars = self.floor
        self.buffer = queries.new_empty(num_queries * plan.num_rows)
        self.pending: list[tuple[int, int, Tensor, Tensor]] = []
        self.num_pending = 0

    def sample(self, parts: Iterable[Tensor], block: int) -> list[Tensor]:
        """Return the best scores (G, M) in blocks of the parts of a sample."""
        maxima = []
        for part in parts:
            # Neighbours in the bank are often alike, so they go into different blocks.
            blocks = self._product(part.float()).view(len(self.queries), block, -1)
            maxima.append(blocks.amax(1))
        return maxima

    def start_from(self, guess: Tensor) -> None:
        """Look only for rows that score at least `guess` (G, 1)."""
        self.guess, self.guessed, self.floor = guess, True, guess.clone()
        self.bars = self.floor

    def scan(self, chunks: Iterable[range]) -> None:
        """Shortlist the rows of some chunks that may be among the k nearest."""
        for chunk in chunks:
            self._scan_chunk(chunk.start, chunk.stop)
        if self.pending:
            self._flush()

    def absorb(self, other: "GroupSearch") -> None:
        """Add the shortlist of a search through other chunks."""
        torch.maximum(self.floor, other.floor, out=self.floor)
        taken = (other.scores >= self.floor).view(-1).nonzero().squeeze(1)
        query = taken // self.plan.capacity
        score, row = (kept.view(-1).index_select(0, taken) for kept in (other.scores, other.rows))
        self._add(query, score, row)
        self._compact(self.everyone)

    def _product(self, chunk: Tensor) -> Tensor:
        """Return approximate scores (G, C) in the buffer, with -inf up to whole blocks."""
        width = -(-len(chunk) // BLOCK) * BLOCK
        scores = self.buffer[: len(self.queries) * width].view(-1, width)
        torch.mm(self.queries, chunk.T, out=scores[:, : len(chunk)])
        if width > len(chunk):
            scores[:, len(chunk) :] = -torch.inf
        return scores

    def _scan_chunk(self, start: int, stop: int) -> None:
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
            crowded = crowded[count > self.max_kept]
            if crowded.numel():
                self._settle_chunk(crowded, chunk, start)
                reach[crowded] = False
                block = reach.view(-1).nonzero().squeeze(1)
        inside = scores.view(-1, BLOCK).index_select(0, block)
        self.pending.append((start, num_blocks, block, inside))
        self.num_pending += block.numel()
        # Without a guess, the floor is to be up before the next chunk.
        if (many and not self.guessed) or self.num_pending >= self.plan.num_pending:
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
        self._add(query, inside.view(-1).index_select(0, hit), row)

    def _add(self, query: Tensor, score: Tensor, row: Tensor) -> None:
        """Shortlist rows, in order of their query, clearing the shortlists that are full."""
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
        overfull = query[self.counts[query] > self.max_kept]
        if len(overfull):
            self._replace(overfull, self.settle(overfull))

    def _replace(self, query: Tensor, keys: Tensor) -> None:
        """Make k rows with defined similarities the whole shortlist of some queries."""
        similarities, rows = from_keys(keys)
        self.scores[query] = -torch.inf
        self.scores[query, : self.k] = similarities
        self.rows[query, : self.k] = rows
        self.counts[query] = (similarities >= LOWEST).sum(1)
        self._raise_floor(query, similarities[:, -1])
        self.bars = self.floor

    def settle(self, query: Tensor) -> Tensor:
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
        keys = self.settle(query)
        for part in chunk.split(min(self.plan.num_pairs, self.plan.num_rows // 4)):
            values, scale = to_fixed_point(part, self.bits)
            exact = (self.fixed[query] @ values.T).mul_(self.unit[query]).mul_(scale.T)
            rows = torch.arange(start, start := start + len(part), device=chunk.device)
            keys = torch.cat([keys, to_keys(exact.float(), rows)], dim=1)
            keys = keys.topk(self.k, dim=1).values
        self._replace(query, keys)


# Scores of a chunk stay in the cache between the product that writes and the maximum that reads; a
# GPU has a larger one.
CHUNK_ROWS, GPU_CHUNK_ROWS = 2048, 8192
# Queries whose shortlists a thread settles before it takes more.
SETTLE_QUERIES = 64
# Rows from which the k-th best of a long bank is guessed.
SAMPLE_ROWS = 32768

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class ParallelMap(Protocol):
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
    everywhere: ParallelMap,
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

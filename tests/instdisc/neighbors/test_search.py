"""How a search goes: from a guess, in threads, within a budget. Its answers: test_neighbors.py."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from instdisc.errors import UserError
from instdisc.neighbors.search import BLOCK, GroupSearch, SearchPlan, plan_search, search_group
from instdisc.neighbors.vote import THREAD_ROWS, top_k

TASKS = Path("/proc/self/task")
BUDGETS = (1 << 18, 3 << 17, 1 << 19, 1 << 20, 3 << 20, 128 << 20)


def unit_rows(num_rows: int, dim: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(num_rows, dim, generator=generator), dim=1)


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0].view(torch.int32), want[0].view(torch.int32))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    after = torch.get_num_threads()
    torch.set_num_threads(before)
    assert after == 2


def in_one_thread(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    torch.set_num_threads(1)
    found = top_k(*args, **options)
    torch.set_num_threads(2)
    return found


@pytest.mark.parametrize("k", [1, 20, 200])
@pytest.mark.parametrize("num_rows", [1000, 6000, 40_000])
def test_a_little_more_than_k_rows_reach_the_guess(
    num_rows: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, bank = unit_rows(50, 16, seed=3), unit_rows(num_rows, 16)
    guesses: list[Tensor] = []
    start_from = GroupSearch.start_from

    def spy(self: GroupSearch, guess: Tensor) -> None:
        guesses.append(guess)
        start_from(self, guess)

    monkeypatch.setattr(GroupSearch, "start_from", spy)
    found = top_k(queries, bank, num_neighbors=k)
    whole = top_k(queries, bank, num_neighbors=num_rows)  # too many to guess
    assert_same(found, (whole[0][:, :k], whole[1][:, :k]))
    assert len(guesses) == 1
    reach = (whole[0] >= guesses[0]).sum(1)
    assert (reach >= k).all()
    assert reach.float().mean() < 4 * k + 100


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("search", [top_k, in_one_thread])
def test_a_wrong_guess_is_searched_again(
    search: Callable[..., tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, bank = unit_rows(6, 8, seed=1), unit_rows(20_480, 8)
    # Fifteen rows are far nearer than all others, and the sample of every 16th row has them all.
    bank[: 15 * 16 : 16] = queries[0]
    want = top_k(queries, bank, num_neighbors=len(bank))  # too many to guess
    want = want[0][:, :20], want[1][:, :20]
    runs: list[bool] = []

    def spy(*args: Any, guess: bool, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        runs.append(guess)
        return search_group(*args, guess=guess, **options)

    monkeypatch.setattr("instdisc.neighbors.vote.search_group", spy)
    got = search(queries, bank, num_neighbors=20)
    assert runs == [True, False]
    assert_same(got, want)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("k", [1, 300])
def test_a_long_bank_is_searched_by_all_threads_to_the_same_bits(k: int) -> None:
    queries, bank = unit_rows(259, 8, seed=1).requires_grad_(), unit_rows(2 * THREAD_ROWS + 7, 8)
    bank[-300:] = bank[:300]  # ties far apart
    got = top_k(queries, bank, num_neighbors=k, offset=5)
    assert not got[0].requires_grad
    assert_same(got, in_one_thread(queries, bank, num_neighbors=k, offset=5))


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("where", ["first", "last", "middle, tied"])
@pytest.mark.parametrize("k", [20, 3 * THREAD_ROWS // 2])
def test_neighbours_may_lie_together(where: str, k: int) -> None:
    queries, bank = unit_rows(3, 8, seed=1), unit_rows(2 * THREAD_ROWS, 8)
    bank = bank[(bank @ queries[0]).argsort(descending=where == "first")]
    if where == "middle, tied":
        bank[THREAD_ROWS - 2000 : THREAD_ROWS + 2000] = queries[0]
    got = top_k(queries, bank, num_neighbors=k)
    assert_same(got, in_one_thread(queries, bank, num_neighbors=k))


@pytest.mark.usefixtures("two_threads")
def test_an_error_in_one_thread_is_the_error_of_the_search() -> None:
    bank = unit_rows(2 * THREAD_ROWS, 4)
    bank[-1, 0] = torch.nan
    with pytest.raises(UserError, match="NaN"):
        top_k(unit_rows(3, 4), bank, num_neighbors=2)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.skipif(not TASKS.is_dir(), reason="counts threads in /proc, which only Linux has")
def test_threads_of_a_search_start_no_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, bank = unit_rows(256, 128, seed=1), unit_rows(2 * THREAD_ROWS, 128)
    queries @ bank[:4096].T  # starts the threads of this one
    before = len(list(TASKS.iterdir()))
    counts: list[int] = []
    scan = GroupSearch.scan

    def spy(self: GroupSearch, chunks: Iterable[range]) -> None:
        scan(self, chunks)
        counts.append(len(list(TASKS.iterdir())))

    monkeypatch.setattr(GroupSearch, "scan", spy)
    top_k(queries, bank, num_neighbors=20)
    assert len(counts) == 2
    assert max(counts) <= before + 2


@pytest.mark.parametrize(("num_rows", "k"), [(1500, 1), (2003, 20), (300, 300), (4000, 100)])
def test_same_answer_under_every_budget(num_rows: int, k: int) -> None:
    queries, bank = unit_rows(11, 24, seed=3), unit_rows(num_rows, 24)
    bank[1::3] = bank[::3][: len(bank[1::3])]  # each of these similarities occurs twice
    want = top_k(queries, bank, num_neighbors=k)
    plans = set()
    for budget in BUDGETS:
        try:
            plan = plan_search(queries, bank, num_neighbors=k, budget_bytes=budget)
        except UserError:
            continue
        assert plan.num_bytes <= budget
        plans.add(plan)
        assert_same(top_k(queries, bank, num_neighbors=k, budget_bytes=budget), want)
    assert len(plans) >= 4
    assert (want[0][:, :-1] >= want[0][:, 1:]).all()


@pytest.mark.usefixtures("two_threads")
def test_threads_share_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[tuple[int, int]] = []

    def spy(*args: Any, num_searches: int, plan: SearchPlan, **options: Any) -> Any:
        plans.append((num_searches, plan.num_bytes))
        return search_group(*args, num_searches=num_searches, plan=plan, **options)

    monkeypatch.setattr("instdisc.neighbors.vote.search_group", spy)
    queries, bank = unit_rows(8, 8, seed=1), unit_rows(2 * THREAD_ROWS, 8)
    for budget, k, want in ((1 << 20, 20, 1), (72 << 20, 20, 2), (72 << 20, len(bank), 1)):
        plans.clear()
        top_k(queries, bank, num_neighbors=k, budget_bytes=budget)
        assert {num_searches for num_searches, _ in plans} == {want}
        assert max(num_bytes for _, num_bytes in plans) * want <= budget


def peak_bytes(trace: Path) -> int:
    events = json.loads(trace.read_text())["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    assert changes
    return int(np.cumsum([size for _, size in sorted(changes, key=lambda c: c[0])]).max())


@pytest.mark.parametrize("kind", ["random", "collapsed", "half"])
@pytest.mark.parametrize("budget", [2 << 20, 32 << 20])
def test_allocations_stay_within_the_budget(kind: str, budget: int, tmp_path: Path) -> None:
    queries, bank = unit_rows(40, 32, seed=1), unit_rows(6000, 32)
    if kind == "collapsed":
        bank = bank[:1].expand(6000, -1).contiguous()
    if kind == "half":
        bank = bank.half()
    result_bytes = 40 * 20 * 12
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        top_k(queries, bank, num_neighbors=20, budget_bytes=budget)
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    assert peak_bytes(tmp_path / "trace.json") <= budget + result_bytes


def test_plan_uses_a_large_budget_and_chunks_are_whole_blocks() -> None:
    queries, bank = torch.empty(10_000, 128), torch.empty(1, 1).expand(1_281_167, 128)
    plan = plan_search(queries, bank, num_neighbors=200, budget_bytes=128 << 20)
    assert plan.num_queries == 256
    for budget in (2 << 20, 8 << 20, 128 << 20):
        small = plan_search(queries, bank, num_neighbors=200, budget_bytes=budget)
        assert small.num_rows % BLOCK == 0
        assert small.num_bytes <= budget

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from instdisc.errors import UserError
from instdisc.neighbors.search import num_bits
from instdisc.neighbors.vote import _add_votes, classify, merge_top_k, rank_classes, top_k, vote


def unit_rows(num_rows: int, dim: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(num_rows, dim, generator=generator), dim=1)


def defined_similarities(queries: Tensor, bank: Tensor) -> np.ndarray:
    """The definition, in whole numbers of Python: no rounding but the stated ones."""
    bits = num_bits(queries.shape[1])

    def fixed(row: list[float]) -> tuple[list[int], Fraction]:
        largest = max(max(abs(x) for x in row), 2.0**-100)
        unit = Fraction(2) ** (math.frexp(largest)[1] - bits)
        return [round(Fraction(x) / unit) for x in row], unit

    left = [fixed(row) for row in queries.float().tolist()]
    right = [fixed(row) for row in bank.float().tolist()]
    exact = [[float(sum(map(int.__mul__, q, b)) * uq * ub) for b, ub in right] for q, uq in left]
    return np.array(exact, dtype=np.float64).astype(np.float32) + np.float32(0)


def brute_force(queries: Tensor, bank: Tensor, k: int) -> tuple[Tensor, Tensor]:
    similarities = torch.from_numpy(defined_similarities(queries, bank))
    ranked = similarities.sort(dim=1, descending=True, stable=True)
    return ranked.values[:, :k], ranked.indices[:, :k]


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(got[1], want[1])
    assert torch.equal(got[0].view(torch.int32), want[0].view(torch.int32))


@pytest.mark.parametrize("k", [1, 7, 60])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_top_k_is_the_definition_bit_for_bit(k: int, dtype: torch.dtype) -> None:
    queries, bank = unit_rows(5, 33, seed=1), unit_rows(60, 33).to(dtype)
    assert_same(top_k(queries, bank, num_neighbors=k), brute_force(queries, bank, k))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_top_k_is_the_definition_on_ties_and_all_scales(data: st.DataObject) -> None:
    dim = data.draw(st.integers(1, 5))
    values = st.sampled_from([0.0, 1.0, -1.0, 0.5, 1 / 3, 1e-20, -3e-30, 1e-41, 7.0, 1e6])
    rows = st.lists(values, min_size=dim, max_size=dim)
    queries = torch.tensor(data.draw(st.lists(rows, min_size=1, max_size=3)))
    bank = torch.tensor(data.draw(st.lists(rows, min_size=1, max_size=40)))
    k = data.draw(st.integers(1, len(bank)))
    assert_same(top_k(queries, bank, num_neighbors=k), brute_force(queries, bank, k))


def test_ties_go_to_the_lower_index_wherever_the_rows_lie() -> None:
    bank = unit_rows(8, 16).repeat_interleave(1250, dim=0)
    queries = unit_rows(20, 16, seed=1)
    similarities, indices = top_k(queries, bank, num_neighbors=1300)
    assert (similarities[:, :1250] == similarities[:, :1]).all()
    run = indices[:, :1250]
    assert (run == run[:, :1] + torch.arange(1250)).all()
    assert (run[:, 0] % 1250 == 0).all()


@pytest.mark.parametrize("order", ["collapsed", "rising", "falling"])
def test_hard_orders_of_the_bank(order: str) -> None:
    queries, bank = unit_rows(3, 8, seed=5), unit_rows(30_000, 8)
    if order == "collapsed":
        bank = bank[:1].expand(30_000, -1).contiguous()
    else:
        bank = bank[(bank @ queries[0]).argsort(descending=order == "falling")]
    similarities, indices = top_k(queries, bank, num_neighbors=50, budget_bytes=2 << 20)
    exact = queries.double() @ bank.double().T
    kth = exact.sort(dim=1, descending=True).values[:, 49:50]
    assert (exact.gather(1, indices) >= kth - 1e-6).all()
    assert (similarities - exact.gather(1, indices)).abs().max() < 1e-6
    if order == "collapsed":
        assert (indices == torch.arange(50)).all()


@pytest.mark.parametrize("cuts", [[700], [1, 1500], [500, 1001]])
def test_merged_shards_equal_the_whole(cuts: list[int]) -> None:
    queries, bank = unit_rows(9, 20, seed=2), unit_rows(2000, 20)
    bank[900:1100] = bank[100:300]
    edges = [0, *cuts, len(bank)]
    parts = [
        top_k(queries, bank[a:b], num_neighbors=min(300, b - a), offset=a)
        for a, b in itertools.pairwise(edges)
    ]
    assert_same(merge_top_k(parts, num_neighbors=300), top_k(queries, bank, num_neighbors=300))


def test_autocast_grad_and_matmul_precision_change_nothing() -> None:
    queries, bank = unit_rows(4, 64, seed=1), unit_rows(4000, 64)
    want = top_k(queries, bank, num_neighbors=30)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(top_k(queries.requires_grad_(), bank, num_neighbors=30), want)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        assert_same(top_k(queries, bank, num_neighbors=30), want)
    finally:
        torch.set_float32_matmul_precision(before)


def test_four_vectors_by_hand() -> None:
    bank = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0], [-1.0, 0.0]])
    labels = torch.tensor([2, 0, 0, 1])
    query = torch.tensor([[0.8, 0.6]])
    similarities, indices = top_k(query, bank, num_neighbors=3)
    assert indices.tolist() == [[1, 0, 2]]
    assert similarities[0].tolist() == pytest.approx([0.96, 0.8, 0.6], abs=1e-7)
    # Relative to the nearest: class 0 gets 1 + exp(-0.36 / 0.5), class 2 gets exp(-0.16 / 0.5).
    weights = vote(similarities, labels[indices], num_classes=4, temperature=0.5)
    want = [1 + math.exp(-0.72), 0.0, math.exp(-0.32), 0.0]
    assert weights[0].tolist() == pytest.approx(want, rel=1e-6)
    predictions = classify(
        query, bank, labels, num_classes=4, num_neighbors=[1, 3], temperature=0.5
    )
    assert {k: p.tolist() for k, p in predictions.items()} == {1: [[0, 1, 2, 3]], 3: [[0, 2, 1, 3]]}


@pytest.mark.parametrize(
    ("num_rows", "num_queries", "dim", "k", "num_classes"),
    [
        (50, 3, 2, 1, 4),
        (50, 3, 2, 50, 4),
        (333, 40, 16, 20, 10),
        (1000, 101, 128, 200, 100),
        (1000, 17, 64, 1000, 7),
        (200, 20, 8, 30, 1),
        (64, 5, 128, 64, 3),
        (513, 9, 31, 5, 2),
    ],
)
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_vote_against_scikit_learn(
    num_rows: int, num_queries: int, dim: int, k: int, num_classes: int, temperature: float
) -> None:
    queries, bank = unit_rows(num_queries, dim, seed=9), unit_rows(num_rows, dim)
    labels = torch.arange(num_rows) % num_classes
    model = KNeighborsClassifier(
        n_neighbors=k,
        metric="cosine",
        algorithm="brute",
        weights=lambda distance: np.exp((1 - distance) / temperature),
    ).fit(bank.double().numpy(), labels.numpy())
    want = torch.from_numpy(model.predict_proba(queries.double().numpy()))
    similarities, indices = top_k(queries, bank, num_neighbors=k)
    got = vote(similarities, labels[indices], num_classes=num_classes, temperature=temperature)
    got /= got.sum(1, keepdim=True)
    assert (got - want).abs().max() < 1e-5
    best = classify(
        queries,
        bank,
        labels,
        num_classes=num_classes,
        num_neighbors=k,
        temperature=temperature,
        budget_bytes=4 << 20,
    )[k]
    assert best.shape == (num_queries, min(5, num_classes))
    ranked = want.sort(dim=1, descending=True).values[:, : best.shape[1]]
    assert (want.gather(1, best) - ranked).abs().max() < 1e-5


def test_classify_serves_several_k_as_one_at_a_time_and_in_batches() -> None:
    queries, bank = unit_rows(70, 16, seed=4), unit_rows(800, 16)
    labels = torch.randint(0, 30, (800,), generator=torch.Generator().manual_seed(0))
    several = classify(queries, bank, labels, num_classes=30, num_neighbors=[50, 1, 200])
    assert list(several) == [1, 50, 200]
    for k, predictions in several.items():
        alone = classify(
            queries, bank, labels, num_classes=30, num_neighbors=k, budget_bytes=3 << 20
        )
        assert torch.equal(alone[k], predictions)
        similarities, indices = top_k(queries, bank, num_neighbors=k)
        weights = vote(similarities, labels[indices], num_classes=30, temperature=0.07)
        assert torch.equal(rank_classes(weights), predictions)


def test_votes_one_neighbour_at_a_time_give_the_same_bits() -> None:
    weights = torch.rand(20, 300, dtype=torch.float64)
    labels = torch.randint(0, 6, (20, 300))
    a, b = (
        _add_votes(weights.new_zeros(20, 6), weights, labels, together=together)
        for together in (True, False)
    )
    assert torch.equal(a, b)


def test_a_low_temperature_does_not_overflow() -> None:
    weights = vote(
        torch.tensor([[1.0, 0.999]]), torch.tensor([[1, 0]]), num_classes=2, temperature=1e-3
    )
    assert weights[0].tolist() == pytest.approx([math.exp(-1), 1.0], rel=1e-4)


def test_equal_weights_rank_by_class_index() -> None:
    weights = torch.tensor([[0.0, 2.0, 0.0, 2.0, 0.0, 0.0, 3.0]])
    assert rank_classes(weights).tolist() == [[6, 1, 3, 0, 2]]
    assert rank_classes(weights[:, :3]).tolist() == [[1, 0, 2]]


def test_no_queries_give_empty_answers() -> None:
    similarities, indices = top_k(torch.empty(0, 4), unit_rows(9, 4), num_neighbors=3)
    assert similarities.shape == indices.shape == (0, 3)
    labels = torch.zeros(9, dtype=torch.int64)
    assert classify(torch.empty(0, 4), unit_rows(9, 4), labels, num_classes=2, num_neighbors=3)[
        3
    ].shape == (0, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_neighbors": 11}, "ask for 1 to 10"),
        ({"num_neighbors": 0}, "ask for 1 to 10"),
        ({"queries": torch.zeros(2, 3)}, "of the same model"),
        ({"bank": torch.zeros(10, 4, dtype=torch.float64)}, "cast to float32"),
        ({"bank": torch.full((10, 4), torch.nan)}, "NaN"),
        ({"queries": torch.full((2, 4), torch.inf)}, "NaN, infinite"),
        ({"bank": torch.full((10, 4), 1e38)}, "huge"),
        ({"budget_bytes": 1000}, "give at least"),
        ({"offset": (1 << 32) - 5}, "indices must lie"),
    ],
)
def test_errors_of_the_search_say_the_fix(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "queries": unit_rows(2, 4),
        "bank": unit_rows(10, 4),
        "num_neighbors": 3,
    }
    with pytest.raises(UserError, match=message):
        top_k(**(arguments | change))  # type: ignore[arg-type]  # wrong on purpose


def test_the_budget_that_the_error_names_is_enough() -> None:
    queries, bank = unit_rows(2, 4), unit_rows(1000, 4)
    with pytest.raises(UserError) as caught:
        top_k(queries, bank, num_neighbors=3, budget_bytes=1)
    enough = int(str(caught.value).split()[-1])
    top_k(queries, bank, num_neighbors=3, budget_bytes=enough)


def test_errors_of_the_vote_say_the_fix() -> None:
    queries, bank, labels = unit_rows(2, 4), unit_rows(10, 4), torch.arange(10)
    with pytest.raises(UserError, match="number the classes from 0"):
        classify(queries, bank, labels, num_classes=9, num_neighbors=3)
    with pytest.raises(UserError, match="one for each row"):
        classify(queries, bank, labels[:9], num_classes=10, num_neighbors=3)
    with pytest.raises(UserError, match="positive number"):
        classify(queries, bank, labels, num_classes=10, num_neighbors=3, temperature=0)
    with pytest.raises(UserError, match="one k or several"):
        classify(queries, bank, labels, num_classes=10, num_neighbors=[])
    with pytest.raises(UserError, match="one label for each neighbour"):
        vote(torch.zeros(2, 3), torch.zeros(2, 2).long(), num_classes=2, temperature=0.07)
    with pytest.raises(UserError, match="ask for 1 to 3"):
        merge_top_k([top_k(queries, bank, num_neighbors=3)], num_neighbors=4)

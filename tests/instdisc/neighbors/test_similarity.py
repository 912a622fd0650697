import torch
from torch import Tensor

from instdisc.neighbors.search import from_keys, num_bits, slack_of, to_fixed_point, to_keys


def unit_rows(num_rows: int, dim: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(num_rows, dim, generator=generator), dim=1)


def test_fixed_point_is_within_the_bound_that_slack_assumes() -> None:
    queries, bank = unit_rows(50, 128, seed=1) * 3, unit_rows(3000, 128)
    exact = queries.double() @ bank.double().T
    bits = num_bits(128)
    (left, left_unit), (right, right_unit) = (to_fixed_point(x, bits) for x in (queries, bank))
    defined = (left @ right.T) * left_unit * right_unit.T
    slack = slack_of(queries, 1.0, bits)[:, None]
    assert ((queries @ bank.T).double() - defined).abs().max() < slack.min() / 2
    assert (defined - exact).abs().max() < 2 * 128**0.5 * 2.0**-bits * 3
    assert slack.max() < 1e-4


def test_keys_order_by_similarity_then_index() -> None:
    similarities = torch.tensor([[0.0, -0.0, 1.5, -2.0, -torch.inf, 1e-45, -1e-45]])
    rows = torch.tensor([[9, 3, (1 << 32) - 1, 0, 5, 6, 7]])
    values, indices = from_keys(to_keys(similarities, rows).sort(dim=1, descending=True).values)
    assert indices.tolist() == [[(1 << 32) - 1, 6, 3, 9, 7, 0, 5]]
    assert torch.equal(values, similarities.sort(dim=1, descending=True).values)

"""The bank: unit rows, exact updates, a checksum that sees every bit."""

import pytest
import torch

from pretrain import bank as bank_module
from pretrain.bank import MemoryBank, initial_rows, row_chunks


def bank(momentum: float = 0.0) -> MemoryBank:
    return MemoryBank(10, 4, momentum=momentum, seed=0)


def test_rows_start_random_and_of_unit_length() -> None:
    vectors = bank().vectors
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(10))
    assert torch.equal(vectors, bank().vectors)
    assert not torch.equal(vectors, MemoryBank(10, 4, momentum=0.0, seed=1).vectors)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_an_update_blends_normalises_and_leaves_the_other_rows(momentum: float) -> None:
    memory = bank(momentum)
    before = memory.vectors.clone()
    features = torch.nn.functional.normalize(torch.ones(2, 4) + torch.eye(2, 4), dim=1)
    memory.update(torch.tensor([7, 2]), features, torch.tensor([True, True]))
    for row, f in ((7, features[0]), (2, features[1])):
        blend = momentum * before[row].double() + (1 - momentum) * f.double()
        torch.testing.assert_close(memory.vectors[row].double(), blend / blend.norm())
    others = [i for i in range(10) if i not in (7, 2)]
    assert torch.equal(memory.vectors[others], before[others])


def test_the_checksum_sees_one_bit_and_an_exchange_of_rows() -> None:
    memory = bank()
    first = memory.checksum()
    assert first == bank().checksum()
    memory.vectors[[1, 2]] = memory.vectors[[2, 1]]
    assert memory.checksum() != first
    memory = bank()
    bits = memory.vectors.view(torch.int32)
    bits[4, 1] ^= 1
    assert memory.checksum() != first


@pytest.mark.parametrize("n", [1, 15, 16, 31, 32, 33, 47, 48, 100])
def test_chunks_cover_every_row_once(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(bank_module, "CHUNK_ROWS", 16)
    chunks = list(row_chunks(n))
    assert [i for chunk in chunks for i in chunk] == list(range(n))
    assert all(16 <= len(chunk) < 32 for chunk in chunks) or n < 16


@pytest.mark.parametrize("dim", [3, 7, 128])
@pytest.mark.parametrize("n", [5, 33, 100])
def test_the_first_rows_do_not_depend_on_how_they_are_drawn(
    monkeypatch: pytest.MonkeyPatch, n: int, dim: int
) -> None:
    """Whole, in chunks, or a part of them: bit for bit one torch.randn over all images."""
    drawn = torch.randn(n, dim, generator=bank_module.generator(4, "bank"))
    whole = torch.nn.functional.normalize(drawn, dim=1)
    monkeypatch.setattr(bank_module, "CHUNK_ROWS", 16)
    assert torch.equal(initial_rows(n, dim, seed=4, rows=range(n)), whole)
    assert torch.equal(initial_rows(n, dim, seed=4, rows=range(2, n - 1)), whole[2 : n - 1])


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_half_precision_bank_stores_rounded_rows_and_computes_in_float32(momentum: float) -> None:
    half = MemoryBank(10, 4, momentum=momentum, seed=0, dtype=torch.float16)
    single = bank(momentum)
    assert half.vectors.dtype == torch.float16
    single.vectors.copy_(half.vectors)
    features = torch.nn.functional.normalize(torch.ones(2, 4) + torch.eye(2, 4), dim=1)
    for memory in (half, single):
        memory.update(torch.tensor([7, 2]), features, torch.tensor([True, True]))
    assert torch.equal(half.vectors, single.vectors.half())
    assert half.rows(torch.tensor([7, 1])).dtype == torch.float32
    before = half.checksum()
    half.vectors.view(torch.int16)[3, 2] ^= 1
    assert half.checksum() != before

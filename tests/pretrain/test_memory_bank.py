"""The bank: unit rows, exact updates, a checksum that sees every bit."""

import pytest
import torch

from pretrain.memory_bank import MemoryBank


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
    memory.update(torch.tensor([7, 2]), features)
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

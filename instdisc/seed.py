"""Randomness as a function of what it is for, so that nothing depends on history.

Every draw is keyed by the run's seed and the place of its use (stream name, epoch, image index,
step). A resumed run therefore repeats nothing and skips nothing, the number of loader workers or
processes does not matter, and no generator state has to be saved.
"""

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def derive_seed(seed: int, *key: int | str) -> int:
    """A 63-bit seed for one use, independent of every other key's."""
    text = repr((seed, *key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def generator(seed: int, *key: int | str) -> torch.Generator:
    """A CPU generator for one use."""
    return torch.Generator().manual_seed(derive_seed(seed, *key))


@contextlib.contextmanager
def seeded(seed: int, *key: int | str) -> Iterator[None]:
    """Runs the block with torch's CPU generator seeded for one use, and puts the old state back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, *key))
        yield

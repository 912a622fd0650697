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


def seed_global(seed: int, *key: int | str) -> None:
    """Seeds torch's global generators, of CPU and GPU, for one use.

    Not with `torch.manual_seed`: it also tells accelerators that are not there, which keep a
    formatted stack trace of each call for ever: milliseconds, and a leak, when called each step.
    """
    value = derive_seed(seed, *key)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(value)


@contextlib.contextmanager
def seeded(seed: int, *key: int | str) -> Iterator[None]:
    """Runs the block with torch's CPU generator seeded for one use, and puts the old state back."""
    default = torch.default_generator
    state = default.get_state()
    default.manual_seed(derive_seed(seed, *key))
    try:
        yield
    finally:
        default.set_state(state)

"""Random numbers as functions of a counter, of which any process computes any part.

A generator of seed.py draws a sequence: who wants its last number draws all before it, and a
permutation is a list of n numbers. From `COUNTED_FROM` images on, order, noise and the first bank
are computed from counters instead. Smaller sets keep their sequences, and with them what a seed
has always meant.
"""

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import normalize

from instdisc.training.seed import derive_seed

Draws = Literal["sequence", "counter"]
COUNTED_FROM = 1 << 24  # images; a permutation of fewer takes 128 MB at most
MAX_IMAGES = 1 << 31  # so that products with 32 random bits fit into 64
ROUNDS = 8  # of the permutation; four are the least that look random

# splitmix64's constants as signed 64-bit integers; products wrap around, as they must.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)


def draws_of(num_images: int) -> Draws:
    """How a run over so many images draws its order, its noise and its first bank."""
    return "counter" if num_images >= COUNTED_FROM else "sequence"


def shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift of signed 64-bit integers."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def random_bits(counter: Tensor) -> Tensor:
    """64 random bits for each 64-bit counter: splitmix64."""
    bits = counter * _GAMMA
    bits = (bits ^ shift_right(bits, 30)) * _MIX1
    bits = (bits ^ shift_right(bits, 27)) * _MIX2
    return bits ^ shift_right(bits, 31)


def scale_bits(bits: Tensor, num_images: int) -> Tensor:
    """Image numbers from random bits: the upper half of the 128-bit product with n.

    Some numbers have one more of the 2^64 values than others: n/2^64 of their share.
    """
    assert num_images <= MAX_IMAGES
    upper, lower = shift_right(bits, 32), bits & 0xFFFFFFFF
    return shift_right(upper * num_images + shift_right(lower * num_images, 32), 32)


def permute(places: Tensor, num_images: int, *, seed: int, key: tuple[int | str, ...]) -> Tensor:
    """Where a random permutation of 0..n-1 sends each of `places`, any shape.

    A Feistel network over pairs (left, right) of two numbers below about sqrt(n): each round adds
    a random function of one to the other, which can be undone, so no two places meet. There are
    up to sqrt(n) pairs more than images; a place that is sent to one of them is sent on from there.

    Args:
        places: of `0..n-1`.
        num_images: n.
        seed: the run's seed.
        key: what the permutation is for; another key gives another one.
    """
    assert num_images <= MAX_IMAGES
    root = math.isqrt(num_images - 1) + 1
    sides = (root, -(-num_images // root))
    halves = [places // sides[1], places % sides[1]]
    for number in range(ROUNDS):
        changed = number % 2
        counter = halves[1 - changed] + derive_seed(seed, *key, number)
        moved = halves[changed] + random_bits(counter).remainder(sides[changed])
        halves[changed] = torch.where(moved < sides[changed], moved, moved - sides[changed])
    found = halves[0] * sides[1] + halves[1]
    outside = found >= num_images
    if bool(outside.any()):
        found[outside] = permute(found[outside], num_images, seed=seed, key=key)
    return found


def unit_rows(rows: range, dim: int, *, seed: int, key: tuple[int | str, ...]) -> Tensor:
    """Random unit vectors, `(len(rows), D)`, each a function of its number alone.

    Normalised Gaussian numbers, two from each counter by the transform of Box and Muller.
    """
    pairs = -(-dim // 2)
    counter = torch.arange(rows.start * pairs, rows.stop * pairs) + derive_seed(seed, *key)
    bits = random_bits(counter)
    # 24 bits are what a float holds: radius from (0, 1], angle from [0, 1).
    radius = (shift_right(bits, 40) + 1).float().mul_(2.0**-24).log_().mul_(-2).sqrt_()
    angle = ((bits >> 8) & 0xFFFFFF).float().mul_(2 * math.pi / (1 << 24))
    values = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=-1)
    return normalize(values.view(len(rows), 2 * pairs)[:, :dim], dim=1)

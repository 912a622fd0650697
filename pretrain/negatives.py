"""Uniform noise over all images, as a pure function of (seed, step, row, column).

A counter-based generator (splitmix64's finaliser over a counter) needs no state: any process can
draw any rows of any step's noise, on any device, and two processes together draw what one would.
"""

import torch
from torch import Tensor

from instdisc.training.seed import derive_seed

# splitmix64's constants as signed 64-bit integers; products wrap around, as they must.
_GAMMA = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Logical shift of signed 64-bit integers."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _splitmix64(counter: Tensor) -> Tensor:
    bits = counter * _GAMMA
    bits = (bits ^ _shift_right(bits, 30)) * _MIX1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX2
    return bits ^ _shift_right(bits, 31)


def draw_noise(
    num_images: int,
    rows: range,
    num_negatives: int,
    *,
    seed: int,
    step: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Image numbers drawn uniformly with replacement, `(len(rows), m)`.

    Args:
        num_images: n.
        rows: places in the global batch that this process draws for.
        num_negatives: m.
        seed: the run's seed.
        step: the optimiser step; every step draws anew.
        device: where the result lies; its values do not depend on it.
    """
    base = derive_seed(seed, "noise", step)
    first = torch.arange(rows.start, rows.stop, device=device, dtype=torch.int64)
    columns = torch.arange(num_negatives, device=device, dtype=torch.int64)
    counter = base + first[:, None] * num_negatives + columns
    # 32 random bits times n, without the division's bias towards small numbers.
    return (_shift_right(_splitmix64(counter), 32) * num_images) >> 32

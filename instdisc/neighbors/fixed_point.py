"""What a similarity is, to the last bit, and how far a float32 matrix product is from it.

A similarity has one defined value. Each row is rounded to fixed point (24 bits below its largest
element for up to 32 dimensions, 23 for 128, 22 for 512), coarse enough that float64 sums the
products of two rows without any rounding; that sum is rounded once, to float32. So the order of
summation, the cut into chunks, the number of threads and the device cannot change a bit of it,
equal rows get equal similarities wherever they lie, and "the lower index first" settles every tie.
"""

import math

import torch
from torch import Tensor

# Indices share an int64 with the 32 bits of a float32.
KEY_ROWS = 1 << 32


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

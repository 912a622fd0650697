"""The objectives as pure functions of tensors (the paper, sections 3.1-3.3).

f is the batch of features `(B, D)`, V the bank `(N, D)`, both with unit rows; losses come back per
image, `(B,)`, in float32: exp(1/0.07) = 1.6e6 has no place in half precision.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from instdisc.training.draws import draws_of, random_bits, scale_bits, shift_right
from instdisc.training.seed import derive_seed

CHUNK_ELEMENTS = 1 << 22  # logits held at a time while the bank streams through: 16 MB
# Numbers in the rows gathered at a time: 2 MB, so that a processor's cache holds them; or 256 MB.
GATHERED_ELEMENTS, GATHERED_ELEMENTS_GPU = 1 << 19, 1 << 26


def fetch_rows(bank: Tensor, which: Tensor | slice, like: Tensor) -> Tensor:
    """Rows of the bank on the device and in the precision of `like`, wherever the bank lies."""

    # index_select copies whole rows, and is several times faster than indexing in general.
    def select(which: Tensor) -> Tensor:
        return bank.index_select(0, which.to(bank.device))

    rows = select(which) if isinstance(which, Tensor) else bank[which]
    return rows.to(like.device, like.dtype, non_blocking=True)


def streamed_sums(features: Tensor, bank: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sums over the bank of w_j = exp((v_j . f - 1) / tau), `(B,)`, and of w_j v_j, `(B, D)`.

    Cosines are at most 1, so the weights cannot overflow and no running maximum is needed; one
    sweep gives both sums, and sums over parts of the bank add up to those over all of it.
    """
    total = features.new_zeros(features.shape[0])
    weighted = torch.zeros_like(features)
    chunk = max(1, CHUNK_ELEMENTS // features.shape[0])
    for first in range(0, bank.shape[0], chunk):
        rows = fetch_rows(bank, slice(first, first + chunk), features)
        weights = (features @ rows.T).sub_(1).div_(temperature).exp_()
        total += weights.sum(dim=1)
        weighted += weights @ rows
    return total, weighted


class _StreamedLogSumExp(torch.autograd.Function):
    """log sum_j exp(v_j . f / tau) over the whole bank without ever holding B x N logits.

    The gradient is the softmax-weighted mean row over tau; its unnormalised sum is formed in the
    same pass.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, bank: Tensor, temperature: float) -> Tensor:
        total, weighted = streamed_sums(features, bank, temperature)
        ctx.save_for_backward(weighted / (total[:, None] * temperature))
        return total.log() + 1 / temperature

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (direction,) = ctx.saved_tensors
        return grad_outputs[0][:, None] * direction, None, None


def _gather(features: Tensor, bank: Tensor, noise: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yields a few images at a time and the rows of their noise, `(b, m, D)`."""
    m, dim = noise.shape[1], bank.shape[1]
    elements = GATHERED_ELEMENTS_GPU if features.is_cuda else GATHERED_ELEMENTS
    chunk = max(1, elements // (m * dim))
    for first in range(0, len(noise), chunk):
        part = slice(first, first + chunk)
        yield part, fetch_rows(bank, noise[part].reshape(-1), features).view(-1, m, dim)


def gathered_products(features: Tensor, bank: Tensor, noise: Tensor) -> Tensor:
    """v_ij . f_i for the rows `noise` `(B, m)` of each image, `(B, m)`."""
    products = features.new_empty(noise.shape)
    for part, rows in _gather(features, bank, noise):
        torch.bmm(rows, features[part, :, None], out=products[part, :, None])
    return products


def gathered_sums(weights: Tensor, bank: Tensor, noise: Tensor) -> Tensor:
    """sum_j w_ij v_ij, `(B, D)`, for weights and rows `(B, m)`: the products' gradient."""
    if bank.dtype == weights.dtype and bank.device == weights.device and not bank.is_cuda:
        # Adds the rows up where they lie, without a copy; on a GPU that is ten times slower.
        return functional.embedding_bag(noise, bank, mode="sum", per_sample_weights=weights)
    sums = weights.new_empty(len(weights), bank.shape[1])
    for part, rows in _gather(weights, bank, noise):
        torch.bmm(weights[part, None], rows, out=sums[part, None])
    return sums


class _GatheredLogits(torch.autograd.Function):
    """`gathered_products` with its gradient; rows are gathered again rather than kept."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, bank: Tensor, noise: Tensor) -> Tensor:
        ctx.save_for_backward(bank, noise)
        return gathered_products(features, bank, noise)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        bank, noise = ctx.saved_tensors
        return gathered_sums(grad_outputs[0], bank, noise), None, None


def log_normalizer(features: Tensor, bank: Tensor, temperature: float) -> Tensor:
    """Exact log Z = log sum_j exp(v_j . f / tau), `(B,)`; differentiable in the features."""
    return _StreamedLogSumExp.apply(features, bank, temperature)


def positive_logits(features: Tensor, own_rows: Tensor, temperature: float) -> Tensor:
    """v_i . f_i / tau, `(B,)`."""
    return (features * own_rows).sum(dim=1) / temperature


def noise_logits(features: Tensor, bank: Tensor, noise: Tensor, temperature: float) -> Tensor:
    """v_j . f_i / tau for the noise, `(B, m)`.

    Args:
        features: `(B, D)`.
        bank: `(N, D)`.
        noise: `(B, m)` rows for each image, or `(1, m)` shared by the batch: one matrix product.
        temperature: tau.
    """
    if len(noise) == 1:
        return features @ fetch_rows(bank, noise[0], features).T / temperature
    return _GatheredLogits.apply(features, bank, noise) / temperature


def softmax_loss(features: Tensor, bank: Tensor, own_rows: Tensor, temperature: float) -> Tensor:
    """Exact non-parametric softmax over all images (equation 2)."""
    positive = positive_logits(features, own_rows, temperature)
    return log_normalizer(features, bank, temperature) - positive


def nce_loss(positive: Tensor, noise: Tensor, log_z: Tensor, num_images: int) -> Tensor:
    """Noise-contrastive estimation (equation 7), in logits s = v.f/tau - log Z - log(m/n).

    Args:
        positive: `(B,)` logits of the true images.
        noise: `(B, m)` logits of the noise.
        log_z: log of the normalizer, a scalar or `(B, 1)` for an exact one per image.
        num_images: n; the noise is uniform, so its density is 1/n.
    """
    shift = log_z + math.log(noise.shape[1] / num_images)
    true = functional.softplus(shift.reshape(-1) - positive)
    return true + functional.softplus(noise - shift).sum(dim=1)


def sampled_softmax_loss(positive: Tensor, noise: Tensor) -> Tensor:
    """Cross entropy of the true image among itself and m samples."""
    return torch.cat([positive[:, None], noise], dim=1).logsumexp(dim=1) - positive


def parametric_loss(features: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """Softmax with a learned weight vector per image (equation 1)."""
    return functional.cross_entropy(features @ weights.T, indices, reduction="none")


def proximal_term(features: Tensor, own_rows: Tensor) -> Tensor:
    """||f_i - v_i||^2 of each image and its own row of the bank (equation 10)."""
    return (features - own_rows).square().sum(dim=1)


# Noise is a pure function of (seed, step, row, column), computed from a counter: any process can
# draw any rows of any step's noise, on any device, and two processes draw what one would.


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
    bits = random_bits(counter)
    if draws_of(num_images) == "counter":
        return scale_bits(bits, num_images)
    # 32 random bits times n, without the division's bias towards small numbers.
    return (shift_right(bits, 32) * num_images) >> 32

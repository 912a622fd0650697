"""Linear SVMs in the space of the images: many problems over the same images, solved together.

For each column of labels y and weights c it minimises what liblinear minimises with squared hinge
and an intercept of scaling one:

    1/2 |w|^2 + 1/2 b^2 + sum over images i of c_i max(0, 1 - y_i (w.x_i + b))^2

The minimum is w = sum of a_i x_i, so the images enter by their products K_ij = x_i.x_j + 1 alone,
which all classes, folds and values of C share. Newton's method: if the images inside the margin are
known the loss is quadratic, and its minimum solves (I + S K S) z = S y, a = S z, where S is the
diagonal of sqrt(2 c) inside the margin and zero outside. Conjugate gradients solve that for all
columns at once; each of their steps is one product with K. An image of weight zero takes no part.
"""

import torch
from torch import Tensor

TOLERANCE = 1e-6  # of the gradient, relative to the gradient at zero; liblinear's own is 1e-4
INNER_TOLERANCE = 1e-8  # of the residual of a linear system, relative to its right side
MOST_STEPS = 100
COLUMNS_OF_GRAM = 2048  # features at a time: bounds the memory in double precision


def unit_products(left: Tensor, right: Tensor) -> Tensor:
    """K of rows `(N, D)` and `(M, D)`, each brought to length one: `(N, M)`, float64."""
    lengths = [_lengths(rows) for rows in (left, right)]
    products = torch.zeros(len(left), len(right), dtype=torch.float64)
    for first in range(0, left.shape[1], COLUMNS_OF_GRAM):
        part = slice(first, first + COLUMNS_OF_GRAM)
        products += left[:, part].double() @ right[:, part].double().T
    return products / lengths[0][:, None] / lengths[1] + 1.0


def _lengths(rows: Tensor) -> Tensor:
    squares = torch.zeros(len(rows), dtype=torch.float64)
    for first in range(0, rows.shape[1], COLUMNS_OF_GRAM):
        squares += rows[:, first : first + COLUMNS_OF_GRAM].double().square().sum(dim=1)
    return squares.sqrt().clamp(min=1e-12)


def fit(products: Tensor, signs: Tensor, weights: Tensor, start: Tensor | None = None) -> Tensor:
    """The coefficients a of all problems, `(N, P)`.

    Args:
        products: K of the images, `(N, N)`, float64.
        signs: y of each image in each problem, 1 or -1, `(N, P)`.
        weights: c, `(N, P)`; zero leaves an image out.
        start: a guess, such as the solution for another C; it changes the time alone.

    Raises:
        ArithmeticError: no minimum was found, which numbers that are finite do not bring about.
    """
    found = torch.zeros_like(weights) if start is None else start.clone()
    pulls = 2 * weights * signs
    goal = TOLERANCE**2 * (pulls * (products @ pulls)).sum(dim=0)
    left = torch.arange(weights.shape[1])
    scores = products @ found
    for _ in range(MOST_STEPS):
        slack = 1 - signs[:, left] * scores
        inside = slack > 0
        gap = found[:, left] - torch.where(inside, pulls[:, left] * slack, 0.0)
        going = (gap * (products @ gap)).sum(dim=0) > goal[left]
        if not going.any():
            return found
        left, scores, inside = left[going], scores[:, going], inside[:, going]
        scale = torch.where(inside, (2 * weights[:, left]).sqrt(), 0.0)
        guess = torch.where(scale > 0, found[:, left] / scale, 0.0)
        solved = scale * _solve(products, scale, scale * signs[:, left], guess)
        step = solved - found[:, left]
        change = products @ step
        share = _step_length(found[:, left], step, scores, change, signs[:, left], weights[:, left])
        found[:, left] += share * step
        scores += share * change
    raise ArithmeticError(f"no minimum of the SVM after {MOST_STEPS} steps")


def _solve(products: Tensor, scale: Tensor, right: Tensor, guess: Tensor) -> Tensor:
    """Z with (I + S K S) z = right for every column, by conjugate gradients."""
    found = guess.clone()
    left = torch.arange(right.shape[1])
    goal = INNER_TOLERANCE**2 * right.square().sum(dim=0)
    residual = right - guess - scale * (products @ (scale * guess))
    direction, size = residual, residual.square().sum(dim=0)
    # In exact arithmetic as many turns as there are images suffice.
    for _ in range(len(right)):
        going = size > goal[left]
        if not going.any():
            break
        if not going.all():
            left, scale, size = left[going], scale[:, going], size[going]
            direction, residual = direction[:, going], residual[:, going]
        image = direction + scale * (products @ (scale * direction))
        length = size / (direction * image).sum(dim=0)
        found[:, left] += length * direction
        residual = residual - length * image
        before, size = size, residual.square().sum(dim=0)
        direction = residual + (size / before) * direction
    return found


def _step_length(
    found: Tensor, step: Tensor, scores: Tensor, change: Tensor, signs: Tensor, weights: Tensor
) -> Tensor:
    """The largest of 1, 1/2, 1/4, ... that lowers the loss enough, for every column `(P,)`."""

    def loss(share: Tensor) -> Tensor:
        outputs = scores + share * change
        length = ((found + share * step) * outputs).sum(dim=0)
        return length / 2 + (weights * (1 - signs * outputs).clamp(min=0).square()).sum(dim=0)

    share = torch.ones(found.shape[1], dtype=found.dtype)
    start = loss(torch.zeros_like(share))
    slack = (1 - signs * scores).clamp(min=0)
    slope = (step * scores).sum(dim=0) - (2 * weights * signs * slack * change).sum(dim=0)
    for _ in range(30):
        # Near the minimum both sides drown in rounding, and a whole step is right.
        short = loss(share) > start + 1e-4 * share * slope + 1e-12 * start.abs()
        if not short.any():
            break
        share = torch.where(short, share / 2, share)
    return share

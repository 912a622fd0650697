"""Linear classifiers on frozen features: standardisation, one-versus-rest SVM by SGD or liblinear.

Both solvers minimise 1/2 ||w||^2 + C * sum of max(0, 1 - y f(x))^2 for each class against the rest.
Features are standardised and divided by sqrt(D), so that a row has length one on average
and one range of C suits every stage.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from transfer.probing.settings import Candidate

Loss = Literal["hinge", "softmax"]
# Largest second derivative of the loss by a score, in units of the features' covariance.
CURVATURE: dict[str, float] = {"hinge": 2.0, "softmax": 0.5}
ROWS_FOR_EIGENVALUE = 512


@dataclasses.dataclass(frozen=True)
class Standardizer:
    """Shift and scale of each dimension, and the largest variance along any direction after it."""

    mean: Tensor
    scale: Tensor
    largest: float

    @classmethod
    def fit(cls, rows: Tensor) -> "Standardizer":
        """From a sample `(M, D)` of training features."""
        rows = rows.float()
        mean, std = rows.mean(dim=0), rows.std(dim=0, unbiased=False)
        # A dimension that hardly moves in the sample must not be blown up where it does.
        floor = 0.1 * std.square().mean().sqrt() + 1e-12
        scale = 1.0 / (torch.maximum(std, floor) * rows.shape[1] ** 0.5)
        some = (rows[:ROWS_FOR_EIGENVALUE] - mean) * scale
        gram = some @ some.T / len(some)
        return cls(mean, scale, float(torch.linalg.eigvalsh(gram)[-1]))

    def __call__(self, rows: Tensor) -> Tensor:
        """Standardised rows, `(B, D)`."""
        return (rows.float() - self.mean) * self.scale


class Probes(nn.Module):
    """For every stage one linear classifier per candidate, all trained side by side."""

    def __init__(
        self, standardizers: Mapping[str, Standardizer], num_classes: int, num_probes: int
    ) -> None:
        super().__init__()
        self.stages = tuple(standardizers)
        self.num_probes, self.num_classes = num_probes, num_classes
        self.weights, self.biases = nn.ParameterDict(), nn.ParameterDict()
        for stage, standardizer in standardizers.items():
            dim = len(standardizer.mean)
            for number in range(num_probes):
                # The problem is convex: zeros are as good a start as any.
                self.weights[f"{stage}/{number}"] = torch.zeros(num_classes, dim)
                self.biases[f"{stage}/{number}"] = torch.zeros(num_classes)
            self.register_buffer(f"mean_{stage}", standardizer.mean.clone())
            self.register_buffer(f"scale_{stage}", standardizer.scale.clone())

    def forward(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scores `(B, C)` by `stage/number of the candidate`."""
        scores: dict[str, Tensor] = {}
        for stage in self.stages:
            mean, scale = self.get_buffer(f"mean_{stage}"), self.get_buffer(f"scale_{stage}")
            names = [f"{stage}/{number}" for number in range(self.num_probes)]
            # One product for all of them reads the features once; joining the weights costs little.
            weight = torch.cat([self.weights[name] for name in names])
            bias = torch.cat([self.biases[name] for name in names])
            rows = features[stage].float()
            # ((x - mean) * scale) w = x (scale * w) - mean (scale * w): change the smaller factor.
            if len(weight) < len(rows):
                weight = weight * scale
                bias = bias - weight @ mean
            else:
                rows = (rows - mean) * scale
            parts = nn.functional.linear(rows, weight, bias).split(self.num_classes, dim=1)
            scores |= dict(zip(names, parts, strict=True))
        return scores

    def groups(
        self,
        standardizers: Mapping[str, Standardizer],
        candidates: Mapping[str, Sequence[Candidate]],
        *,
        num_images: int,
        batch_size: int,
        loss: Loss,
    ) -> list[dict[str, Any]]:
        """Parameters with their weight decay 1 / (C n) and a step size that suits their stage.

        A candidate's learning rate multiplies it.
        A step of 1 / (largest second derivative) is what plain gradient descent could take; of a
        batch that derivative is larger than of all data by about a row's length over its size. The
        decay adds to it, which counts where images are few.
        """
        groups = []
        for stage in self.stages:
            sharpest = standardizers[stage].largest + 1 / batch_size
            for number, (cost, lr) in enumerate(candidates[stage]):
                assert cost is not None, "an SVM has a C"
                decay = 1 / (cost * num_images)
                for part, variance in ((self.weights, sharpest), (self.biases, 1.0)):
                    scale = 1 / (CURVATURE[loss] * variance + decay)
                    params = [part[f"{stage}/{number}"]]
                    groups.append({"params": params, "lr_scale": lr * scale, "weight_decay": decay})
        return groups


class ProbesOn(nn.Module):
    """Probes behind what turns an input into features: a frozen network, or a row's parts."""

    def __init__(
        self, to_features: Callable[[Tensor], dict[str, Tensor]], probes: nn.Module
    ) -> None:
        super().__init__()
        self.to_features, self.probes = to_features, probes

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        """Scores of every probe."""
        return self.probes(self.to_features(inputs))


def squared_hinge(scores: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """One class against the rest, summed over classes and probes, `(B,)`."""
    stacked = torch.stack(list(scores.values()), dim=1)
    sides = torch.full_like(stacked[:, :1], -1.0)
    sides.scatter_(2, labels[:, None, None], 1.0)
    return (1 - sides * stacked).clamp(min=0).square().sum(dim=(1, 2))


def softmax_loss(scores: Mapping[str, Tensor], labels: Tensor) -> Tensor:
    """Cross entropy summed over probes, `(B,)`."""
    losses = [nn.functional.cross_entropy(s, labels, reduction="none") for s in scores.values()]
    return torch.stack(losses).sum(dim=0)


LOSSES = {"hinge": squared_hinge, "softmax": softmax_loss}


def fit_liblinear(
    rows: np.ndarray, labels: np.ndarray, cost: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's LinearSVC on standardised rows `(N, D)`: weights `(C, D)`, biases `(C,)`."""
    # Heavy to import, and the other solver does not need it.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.svm import LinearSVC

    svm = LinearSVC(C=cost, dual=len(rows) < 2 * rows.shape[1], random_state=seed, max_iter=3000)
    with warnings.catch_warnings():
        # Stopping there moves no accuracy; a large C is then outvoted on the held-out images.
        warnings.simplefilter("ignore", ConvergenceWarning)
        svm.fit(rows, labels)
    if len(svm.classes_) == 2:  # scikit-learn keeps one row for both
        return np.concatenate([-svm.coef_, svm.coef_]), np.repeat(svm.intercept_, 2) * [-1, 1]
    return svm.coef_, svm.intercept_

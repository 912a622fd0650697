"""The objective of a run: what config and state the pure functions of objectives.py need."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from instdisc.training.seed import generator
from pretrain import objectives
from pretrain.bank import MemoryBank
from pretrain.config import PretrainConfig, parse_normalizer
from pretrain.objectives import draw_noise

Reduce = Callable[[Tensor], Tensor]


class Normalizer(nn.Module):
    """Z, estimated as n times the mean of exp(v_j . f / tau) over noise samples (section 3.2).

    Only noise enters the estimate, never the positive, which is not a uniform sample.
    """

    value: Tensor
    num_batches: Tensor

    def __init__(self, mode: str, num_images: int) -> None:
        super().__init__()
        self.mode, number = parse_normalizer(mode)
        self.num_images = num_images
        self.limit = int(number) if self.mode == "first-batches" else 0
        initial = number if self.mode == "fixed" else 0.0
        self.register_buffer("value", torch.tensor(initial, dtype=torch.float64))
        self.register_buffer("num_batches", torch.tensor(0))
        self.seen = 0  # num_batches on the host
        self.estimate: Tensor | None = None  # Z of the latest batch that was looked at

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.seen = int(self.num_batches)

    @torch.no_grad()
    def update(self, noise: Tensor, mean_over_processes: Reduce) -> None:
        """Takes a batch's noise logits `(B, m)` into account, if the mode still does."""
        seen = self.seen
        if self.mode == "fixed" or (self.mode == "first-batches" and seen >= self.limit):
            return
        estimate = self.num_images * mean_over_processes(noise.double().exp().mean())
        self.estimate = estimate
        if self.mode == "ema" and seen:
            self.value.mul_(0.99).add_(0.01 * estimate)
        elif self.mode == "ema":
            self.value.copy_(estimate)
        else:
            self.value.add_((estimate - self.value) / (seen + 1))
        self.num_batches += 1
        self.seen += 1

    @torch.no_grad()
    def observe(self, noise: Tensor) -> None:
        """Estimates Z from this process's noise alone, for `drift`; changes no result."""
        self.estimate = self.num_images * noise.double().exp().mean()

    @property
    def ratio(self) -> float:
        """Z/n, which at the start is near `initial_ratio`."""
        return float(self.value) / self.num_images

    @property
    def drift(self) -> float:
        """Z as last estimated over the Z in use: the factor by which repulsion is too strong."""
        return 1.0 if self.estimate is None else float(self.estimate) / float(self.value)


def initial_ratio(dim: int, temperature: float) -> float:
    """Z/n while bank and features are independent: E exp(N(0, 1/d)/tau) = exp(1/(2 d tau^2))."""
    return math.exp(1 / (2 * dim * temperature**2))


class Criterion(nn.Module):
    """Loss per image of a batch against the bank."""

    def __init__(self, config: PretrainConfig, num_images: int) -> None:
        super().__init__()
        self.config = config
        self.num_images = num_images
        self.normalizer = Normalizer(config.normalizer, num_images)
        if config.objective == "parametric":
            # The scale that a linear classifier over unit vectors starts with.
            scale = 1 / math.sqrt(config.embedding_dim)
            noise = torch.rand(
                num_images, config.embedding_dim, generator=generator(config.seed, "weights")
            )
            self.weights = nn.Parameter((2 * noise - 1) * scale)

    @property
    def log_z(self) -> Tensor:
        """Log of the normalizer, a float32 scalar."""
        return self.normalizer.value.log().float()

    def forward(
        self,
        features: Tensor,
        indices: Tensor,
        bank: MemoryBank,
        *,
        step: int,
        rows: range,
        mean_over_processes: Reduce,
    ) -> Tensor:
        """Losses `(B,)`, the proximal term included.

        Args:
            features: `(B, D)`, unit rows; as they come from the projection for `parametric`.
            indices: which images they are, `(B,)`.
            bank: the memory bank, as it was before this step.
            step: the optimiser step, which keys the noise.
            rows: the places of this batch in the global one.
            mean_over_processes: averages a scalar over all processes.
        """
        config, tau = self.config, self.config.temperature
        own_rows = bank.rows(indices)
        if config.objective == "parametric":
            losses = objectives.parametric_loss(features, self.weights, indices)
            features = nn.functional.normalize(features, dim=1)  # for the proximal term
        elif config.objective == "softmax":
            positive = objectives.positive_logits(features, own_rows, tau)
            losses = bank.log_normalizer(features, tau) - positive
        else:
            shared = config.negatives == "shared"
            noise = draw_noise(
                self.num_images,
                range(1) if shared else rows,
                config.num_negatives,
                seed=config.seed,
                step=step,
                device=features.device,
            )
            positive = objectives.positive_logits(features, own_rows, tau)
            negative = bank.noise_logits(features, noise, tau, shared=shared)
            if config.objective == "sampled-softmax":
                losses = objectives.sampled_softmax_loss(positive, negative)
            elif self.normalizer.mode == "exact":
                exact = bank.log_normalizer(features.detach(), tau)
                self.normalizer.value.copy_(mean_over_processes(exact.exp().double().mean()))
                losses = objectives.nce_loss(positive, negative, exact[:, None], self.num_images)
            else:
                self.normalizer.update(negative, mean_over_processes)
                if (step + 1) % config.log_every == 0:
                    self.normalizer.observe(negative)
                losses = objectives.nce_loss(positive, negative, self.log_z, self.num_images)
        if config.proximal_weight:
            proximal = objectives.proximal_term(features, own_rows)
            losses = losses + config.proximal_weight * proximal
        return losses

"""Normalizer modes, and the criterion against the pure objectives."""

import math

import pytest
import torch
from torch import Tensor

from pretrain import objectives
from pretrain.bank import MemoryBank
from pretrain.config import PretrainConfig
from pretrain.criterion import Criterion, Normalizer, initial_ratio
from pretrain.objectives import draw_noise

N, D, B, M = 60, 8, 6, 12


def same(value: Tensor) -> Tensor:
    return value


def estimate(noise: Tensor) -> float:
    values = [math.exp(x) for row in noise.tolist() for x in row]
    return N * sum(values) / len(values)


BATCHES = [torch.randn(4, 5, generator=torch.Generator().manual_seed(i)) for i in range(4)]


def test_first_batches_averages_then_stays() -> None:
    normalizer = Normalizer("first-batches:2", N)
    for batch in BATCHES:
        normalizer.update(batch, same)
    expected = (estimate(BATCHES[0]) + estimate(BATCHES[1])) / 2
    assert normalizer.value.item() == pytest.approx(expected)


def test_ema_moves_by_a_hundredth() -> None:
    normalizer = Normalizer("ema", N)
    expected = estimate(BATCHES[0])
    normalizer.update(BATCHES[0], same)
    for batch in BATCHES[1:]:
        normalizer.update(batch, same)
        expected = 0.99 * expected + 0.01 * estimate(batch)
    assert normalizer.value.item() == pytest.approx(expected)


def test_fixed_stays() -> None:
    normalizer = Normalizer("fixed:123.5", N)
    normalizer.update(BATCHES[0], same)
    assert normalizer.value.item() == 123.5


def test_the_state_survives_a_checkpoint() -> None:
    one, two = Normalizer("first-batches:3", N), Normalizer("first-batches:3", N)
    for batch in BATCHES[:2]:
        one.update(batch, same)
    two.load_state_dict(one.state_dict())
    for batch in BATCHES[2:]:
        one.update(batch, same)
        two.update(batch, same)
    assert one.value == two.value


@pytest.mark.parametrize(("tau", "ratio"), [(0.07, 2.21), (0.1, 1.476)])
def test_the_analytic_ratio_is_the_one_of_the_specification(tau: float, ratio: float) -> None:
    assert initial_ratio(128, tau) == pytest.approx(ratio, rel=5e-3)


def run(indices: Tensor, features: Tensor, **changes: object) -> tuple[Tensor, Criterion]:
    values = {"embedding_dim": D, "num_negatives": M, "temperature": 0.2, **changes}
    config = PretrainConfig(**values)  # type: ignore[arg-type]
    criterion = Criterion(config, N)
    bank = MemoryBank(N, D, momentum=0.0, seed=0)
    losses = criterion(features, indices, bank, step=3, rows=range(B), mean_over_processes=same)
    return losses, criterion


INDICES = torch.tensor([0, 5, 9, 33, 59, 2])
FEATURES = MemoryBank(B, D, momentum=0.0, seed=7).vectors
BANK = MemoryBank(N, D, momentum=0.0, seed=0).vectors


@pytest.mark.parametrize("negatives", ["per-image", "shared"])
@pytest.mark.parametrize("normalizer", ["first-batches:1", "ema", "fixed:80", "exact"])
def test_nce_uses_the_noise_of_the_step_and_the_mode_of_z(negatives: str, normalizer: str) -> None:
    losses, criterion = run(INDICES, FEATURES, negatives=negatives, normalizer=normalizer)
    rows = range(1) if negatives == "shared" else range(B)
    noise = draw_noise(N, rows, M, seed=0, step=3)
    negative = objectives.noise_logits(FEATURES, BANK, noise, 0.2)
    exact = objectives.log_normalizer(FEATURES, BANK, 0.2)
    log_z = {
        "fixed:80": torch.tensor(math.log(80)),
        "exact": exact[:, None],
    }.get(normalizer, torch.tensor(math.log(estimate(negative))))
    positive = objectives.positive_logits(FEATURES, BANK[INDICES], 0.2)
    torch.testing.assert_close(losses, objectives.nce_loss(positive, negative, log_z, N))
    if normalizer == "exact":
        assert criterion.normalizer.value.item() == pytest.approx(exact.exp().mean().item())


def test_the_proximal_term_is_added_with_its_weight() -> None:
    plain, _ = run(INDICES, FEATURES, objective="softmax")
    weighted, _ = run(INDICES, FEATURES, objective="softmax", proximal_weight=3.0)
    distance = (FEATURES - BANK[INDICES]).square().sum(dim=1)
    torch.testing.assert_close(weighted - plain, 3 * distance)


def test_observing_tells_the_drift_of_z_and_changes_nothing() -> None:
    normalizer = Normalizer("first-batches:1", N)
    normalizer.update(BATCHES[0], same)
    assert normalizer.drift == pytest.approx(1)
    normalizer.observe(BATCHES[0] + math.log(12))
    assert normalizer.drift == pytest.approx(12)
    assert normalizer.value.item() == pytest.approx(estimate(BATCHES[0]))


@pytest.mark.parametrize("normalizer", ["first-batches:1", "fixed:80"])
def test_a_constant_z_is_compared_with_the_true_one_at_steps_that_log(normalizer: str) -> None:
    _, criterion = run(INDICES, FEATURES, normalizer=normalizer, log_every=2)  # step 3 is the 4th
    noise = draw_noise(N, range(B), M, seed=0, step=3)
    found = estimate(objectives.noise_logits(FEATURES, BANK, noise, 0.2))
    used = criterion.normalizer.value.item()
    assert criterion.normalizer.drift == pytest.approx(found / used)
    _, criterion = run(INDICES, FEATURES, normalizer="fixed:80", log_every=3)
    assert criterion.normalizer.drift == 1


def test_parametric_takes_features_of_any_length() -> None:
    short, criterion = run(INDICES, FEATURES, objective="parametric")
    long, _ = run(INDICES, 5 * FEATURES, objective="parametric")
    logits = 5 * FEATURES @ criterion.weights.detach().T
    expected = torch.nn.functional.cross_entropy(logits, INDICES, reduction="none")
    torch.testing.assert_close(long, expected)
    assert not torch.allclose(long, short)
    near, _ = run(INDICES, 5 * FEATURES, objective="parametric", proximal_weight=2.0)
    distance = (FEATURES - BANK[INDICES]).square().sum(dim=1)
    torch.testing.assert_close(near - long, 2 * distance)  # the term compares unit vectors


def test_parametric_learns_its_own_weights() -> None:
    losses, criterion = run(INDICES, FEATURES, objective="parametric")
    losses.mean().backward()
    assert criterion.weights.shape == (N, D)
    assert criterion.weights.grad.abs().sum() > 0

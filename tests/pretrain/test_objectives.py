"""Objectives against oracles in plain Python loops and float64, written from the definitions."""

import math

import pytest
import torch
from torch import Tensor

from pretrain import objectives
from pretrain.objectives import draw_noise


def unit_rows(n: int, dim: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.functional.normalize(torch.randn(n, dim, generator=generator), dim=1)


def dot(a: Tensor, b: Tensor) -> float:
    return sum(float(x) * float(y) for x, y in zip(a.tolist(), b.tolist(), strict=True))


def softmax_by_loops(f: Tensor, bank: Tensor, i: int, tau: float) -> float:
    terms = [math.exp(dot(v, f) / tau) for v in bank]
    return -math.log(terms[i] / sum(terms))


def nce_by_loops(f: Tensor, bank: Tensor, i: int, noise: list[int], tau: float, z: float) -> float:
    """Equations 5-7 as they stand: probabilities, not logits."""
    n, m = len(bank), len(noise)

    def posterior(j: int) -> float:
        p = math.exp(dot(bank[j], f) / tau) / z
        return p / (p + m / n)

    return -math.log(posterior(i)) - sum(math.log(1 - posterior(j)) for j in noise)


def numeric_gradient(function, f: Tensor, step: float = 1e-5) -> Tensor:  # type: ignore[no-untyped-def]
    gradient = torch.zeros_like(f, dtype=torch.float64)
    for k in range(len(f)):
        up, down = f.double().clone(), f.double().clone()
        up[k] += step
        down[k] -= step
        gradient[k] = (function(up) - function(down)) / (2 * step)
    return gradient


BANK = unit_rows(23, 6, seed=1)
FEATURES = unit_rows(4, 6, seed=2)
OWN = torch.tensor([3, 7, 3, 22])
TAU = 0.2


@pytest.mark.parametrize("chunk_elements", [1, 20, 1 << 22])
def test_softmax_equals_the_definition_for_every_chunk_size(
    monkeypatch: pytest.MonkeyPatch, chunk_elements: int
) -> None:
    monkeypatch.setattr(objectives, "CHUNK_ELEMENTS", chunk_elements)
    features = FEATURES.clone().requires_grad_()
    losses = objectives.softmax_loss(features, BANK, BANK[OWN], TAU)
    losses.sum().backward()
    for b, i in enumerate(OWN.tolist()):
        expected = softmax_by_loops(FEATURES[b].double(), BANK.double(), i, TAU)
        assert losses[b].item() == pytest.approx(expected, rel=1e-5)
        gradient = numeric_gradient(
            lambda f, i=i: softmax_by_loops(f, BANK.double(), i, TAU), FEATURES[b]
        )
        torch.testing.assert_close(features.grad[b].double(), gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("z", [3.0, 51.2])
@pytest.mark.parametrize("chunk_elements", [1, 1 << 22])
def test_nce_equals_the_definition(
    monkeypatch: pytest.MonkeyPatch, shared: bool, z: float, chunk_elements: int
) -> None:
    monkeypatch.setattr(objectives, "GATHERED_ELEMENTS", chunk_elements)
    noise = draw_noise(len(BANK), range(1 if shared else len(OWN)), 9, seed=0, step=0)
    features = FEATURES.clone().requires_grad_()
    positive = objectives.positive_logits(features, BANK[OWN], TAU)
    negative = objectives.noise_logits(features, BANK, noise, TAU)
    losses = objectives.nce_loss(positive, negative, torch.tensor(math.log(z)), len(BANK))
    losses.sum().backward()
    for b, i in enumerate(OWN.tolist()):
        mine = noise[0 if shared else b].tolist()

        def oracle(f: Tensor, i: int = i, mine: list[int] = mine) -> float:
            return nce_by_loops(f, BANK.double(), i, mine, TAU, z)

        assert losses[b].item() == pytest.approx(oracle(FEATURES[b].double()), rel=1e-5)
        gradient = numeric_gradient(oracle, FEATURES[b])
        torch.testing.assert_close(features.grad[b].double(), gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["softmax", "per-image", "shared"])
def test_a_half_precision_bank_is_rounded_storage_and_nothing_more(way: str) -> None:
    """Products and sums are those of the rounded rows in float32: no second rounding."""
    half = unit_rows(500, 16, seed=3).half()
    features = unit_rows(4, 16, seed=2)
    noise = draw_noise(500, range(1 if way == "shared" else 4), 64, seed=0, step=0)

    def losses(f: Tensor, bank: Tensor) -> Tensor:
        if way == "softmax":
            return objectives.log_normalizer(f, bank, TAU)
        return objectives.noise_logits(f, bank, noise, TAU).exp().sum(dim=1)

    found = []
    for bank in (half, half.float()):
        f = features.clone().requires_grad_()
        value = losses(f, bank)
        assert value.dtype == torch.float32
        value.sum().backward()
        found.append((value.detach(), f.grad))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-6, atol=0)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-4)


def test_nce_takes_a_normalizer_per_image() -> None:
    noise = draw_noise(len(BANK), range(len(OWN)), 5, seed=0, step=0)
    exact = objectives.log_normalizer(FEATURES, BANK, TAU)
    losses = objectives.nce_loss(
        objectives.positive_logits(FEATURES, BANK[OWN], TAU),
        objectives.noise_logits(FEATURES, BANK, noise, TAU),
        exact[:, None],
        len(BANK),
    )
    for b, i in enumerate(OWN.tolist()):
        f, bank = FEATURES[b].double(), BANK.double()
        z = sum(math.exp(dot(v, f) / TAU) for v in bank)
        expected = nce_by_loops(f, bank, i, noise[b].tolist(), TAU, z)
        assert losses[b].item() == pytest.approx(expected, rel=1e-5)


def test_sampled_softmax_equals_the_definition() -> None:
    noise = draw_noise(len(BANK), range(len(OWN)), 9, seed=0, step=0)
    features = FEATURES.clone().requires_grad_()
    losses = objectives.sampled_softmax_loss(
        objectives.positive_logits(features, BANK[OWN], TAU),
        objectives.noise_logits(features, BANK, noise, TAU),
    )
    losses.sum().backward()
    for b, i in enumerate(OWN.tolist()):
        rows = [i, *noise[b].tolist()]

        def oracle(f: Tensor, rows: list[int] = rows) -> float:
            terms = [math.exp(dot(BANK[j].double(), f) / TAU) for j in rows]
            return -math.log(terms[0] / sum(terms))

        assert losses[b].item() == pytest.approx(oracle(FEATURES[b].double()), rel=1e-5)
        gradient = numeric_gradient(oracle, FEATURES[b])
        torch.testing.assert_close(features.grad[b].double(), gradient, rtol=1e-5, atol=1e-5)


def test_parametric_and_proximal_equal_their_definitions() -> None:
    weights = torch.randn(23, 6, generator=torch.Generator().manual_seed(5))
    losses = objectives.parametric_loss(FEATURES, weights, OWN)
    proximal = objectives.proximal_term(FEATURES, BANK[OWN])
    for b, i in enumerate(OWN.tolist()):
        f = FEATURES[b].double()
        terms = [math.exp(dot(w, f)) for w in weights.double()]
        assert losses[b].item() == pytest.approx(-math.log(terms[i] / sum(terms)), rel=1e-5)
        expected = sum((x - y) ** 2 for x, y in zip(f.tolist(), BANK[i].tolist(), strict=True))
        assert proximal[b].item() == pytest.approx(expected, rel=1e-5)


def test_nce_with_much_noise_has_the_gradient_of_the_exact_softmax() -> None:
    bank, features, own = unit_rows(50, 8, 3), unit_rows(6, 8, 4), torch.arange(6)
    exact = features.clone().requires_grad_()
    objectives.softmax_loss(exact, bank, bank[own], TAU).sum().backward()
    noise = draw_noise(len(bank), range(6), 20_000, seed=0, step=0)
    sampled = features.clone().requires_grad_()
    log_z = objectives.log_normalizer(features, bank, TAU)
    objectives.nce_loss(
        objectives.positive_logits(sampled, bank[own], TAU),
        objectives.noise_logits(sampled, bank, noise, TAU),
        log_z[:, None],
        len(bank),
    ).sum().backward()
    cosine = torch.nn.functional.cosine_similarity(exact.grad, sampled.grad, dim=1)
    assert cosine.min() > 0.99
    few = features.clone().requires_grad_()
    objectives.nce_loss(
        objectives.positive_logits(few, bank[own], TAU),
        objectives.noise_logits(few, bank, noise[:, :2], TAU),
        log_z[:, None],
        len(bank),
    ).sum().backward()
    poor = torch.nn.functional.cosine_similarity(exact.grad, few.grad, dim=1)
    assert poor.mean() < cosine.mean()


@pytest.mark.parametrize(("temperature", "ratio"), [(0.07, 2.21), (0.1, 1.476)])
def test_first_losses_match_their_analytic_values(temperature: float, ratio: float) -> None:
    n, m, d = 20_000, 4096, 128
    bank, features = unit_rows(n, d, 0), unit_rows(64, d, 1)
    own = torch.arange(64)
    noise = draw_noise(n, range(64), m, seed=0, step=0)
    negative = objectives.noise_logits(features, bank, noise, temperature)
    found = negative.double().exp().mean().item()
    assert found == pytest.approx(ratio, rel=0.05)
    positive = objectives.positive_logits(features, bank[own], temperature)
    nce = objectives.nce_loss(positive, negative, torch.tensor(math.log(n * found)), n).mean()
    # (m + 1) softplus terms near their values for uniform data.
    assert nce.item() == pytest.approx(math.log(m) + 1 / (2 * d * temperature**2) + 1, rel=0.05)
    softmax = objectives.softmax_loss(features, bank, bank[own], temperature).mean()
    expected = math.log(n) + 1 / (2 * d * temperature**2)
    assert softmax.item() == pytest.approx(expected, rel=0.05)

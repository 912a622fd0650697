"""The SVM by SGD against scikit-learn's, and the parts it is made of."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.svm import LinearSVC
from torch import Tensor
from torch.utils.data import Dataset

from instdisc.training.dist import Process
from transfer.finetuning.predictions import predict
from transfer.finetuning.supervised import LoopSettings, Problem, SupervisedTrainer
from transfer.probing.settings import Candidate
from transfer.probing.sources import StoredRows
from transfer.probing.svm import (
    LOSSES,
    Probes,
    ProbesOn,
    Standardizer,
    fit_liblinear,
    softmax_loss,
    squared_hinge,
)

ALONE = Process(0, 1, torch.device("cpu"))


def blobs(num: int, dim: int, num_classes: int, spread: float, seed: int) -> tuple[Tensor, Tensor]:
    """Points around class centres that are the same for every seed."""
    centres = torch.randn(num_classes, dim, generator=torch.Generator().manual_seed(99))
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(num) % num_classes
    # Dimensions of very different size and offset, as feature maps have them.
    scales = torch.logspace(-2, 2, dim)
    rows = centres[labels] + spread * torch.randn(num, dim, generator=rng)
    return (rows + 3) * scales, labels


def train_sgd(
    rows: dict[str, Tensor],
    labels: Tensor,
    costs: tuple[float, ...],
    folder: Path,
    *,
    epochs: int = 20,
    loss: Any = "hinge",
) -> tuple[ProbesOn, dict[str, Standardizer]]:
    """The way transfer.probing.linear goes, on rows in memory."""
    standardizers = {stage: Standardizer.fit(part) for stage, part in rows.items()}
    probes = Probes(standardizers, int(labels.max()) + 1, len(costs))
    widths = [part.shape[1] for part in rows.values()]
    model = ProbesOn(lambda x: dict(zip(rows, x.split(widths, dim=1), strict=True)), probes)
    n = len(labels)
    tried = {stage: [Candidate(cost, 0.8) for cost in costs] for stage in rows}
    groups = probes.groups(standardizers, tried, num_images=n, batch_size=min(64, n), loss=loss)
    table = torch.cat(list(rows.values()), dim=1)
    samples: Dataset[Any] = StoredRows(table, np.arange(n))
    settings = LoopSettings(
        epochs=epochs,
        batch_size=64,
        lr=1.0,
        lr_milestones=(0.6 * epochs, 0.85 * epochs),
        nesterov=True,
    )
    problem = Problem(model, groups, LOSSES[loss], samples, labels, "key")
    SupervisedTrainer(problem, settings, ALONE, folder).train()
    return model, standardizers


def objective(
    weight: np.ndarray, bias: np.ndarray, x: np.ndarray, y: np.ndarray, c: float
) -> float:
    """What liblinear minimises, its penalty on the bias included."""
    sides = np.where(y[:, None] == np.arange(len(weight)), 1.0, -1.0)
    margins = np.maximum(0, 1 - sides * (x @ weight.T + bias))
    return 0.5 * float((weight**2).sum() + (bias**2).sum()) + c * float((margins**2).sum())


@pytest.mark.parametrize("spread", [0.3, 1.5])
def test_sgd_reaches_the_objective_and_accuracy_of_liblinear(tmp_path: Path, spread: float) -> None:
    """Separable and overlapping classes; wide and narrow stages share their settings."""
    stages = {"wide": 400, "narrow": 8}
    rows = {s: blobs(400, dim, 5, spread, 0)[0] for s, dim in stages.items()}
    test = {s: blobs(500, dim, 5, spread, 1)[0] for s, dim in stages.items()}
    labels, truth = torch.arange(400) % 5, torch.arange(500) % 5
    costs = (0.1, 1.0)
    model, standardizers = train_sgd(rows, labels, costs, tmp_path, epochs=40)
    joined = torch.cat(list(test.values()), dim=1)
    ranked = predict(model, StoredRows(joined, np.arange(500)), 500, ALONE, batch_size=100)
    for stage in stages:
        x, v = (standardizers[stage](t[stage]).numpy() for t in (rows, test))
        for number, cost in enumerate(costs):
            svm = LinearSVC(C=cost, random_state=0, max_iter=20_000).fit(x, labels.numpy())
            ours = (ranked[f"{stage}/{number}"][:, 0] == truth).float().mean().item()
            assert abs(ours - svm.score(v, truth.numpy())) <= 0.01
            weight = model.probes.weights[f"{stage}/{number}"].detach().numpy()
            bias = model.probes.biases[f"{stage}/{number}"].detach().numpy()
            reached = objective(weight, bias, x, labels.numpy(), cost)
            best = objective(svm.coef_, svm.intercept_, x, labels.numpy(), cost)
            assert reached <= 1.03 * best
    assert spread > 1 or (ranked["wide/1"][:, 0] == truth).all()


def test_few_images_and_small_costs_do_not_diverge(tmp_path: Path) -> None:
    """The decay 1 / (C n) is then larger than the curvature of the loss."""
    rows, labels = blobs(60, 400, 5, 1.5, 0)
    costs = (0.001, 0.01, 0.1)
    model, standardizers = train_sgd({"a": rows}, labels, costs, tmp_path, epochs=40)
    x = standardizers["a"](rows).numpy()
    for number, cost in enumerate(costs):
        svm = LinearSVC(C=cost, random_state=0, max_iter=20_000).fit(x, labels.numpy())
        weight = model.probes.weights[f"a/{number}"].detach().numpy()
        bias = model.probes.biases[f"a/{number}"].detach().numpy()
        reached = objective(weight, bias, x, labels.numpy(), cost)
        assert reached <= 1.03 * objective(svm.coef_, svm.intercept_, x, labels.numpy(), cost)


def test_probes_side_by_side_are_probes_alone(tmp_path: Path) -> None:
    rows, labels = blobs(90, 12, 3, 1.0, 0)
    both = {"a": rows, "b": rows.flip(1)[:, :7].contiguous()}
    together, _ = train_sgd(both, labels, (0.1, 5.0), tmp_path / "both", epochs=3)
    alone, _ = train_sgd({"b": both["b"]}, labels, (5.0,), tmp_path / "alone", epochs=3)
    torch.testing.assert_close(together.probes.weights["b/1"], alone.probes.weights["b/0"])
    torch.testing.assert_close(together.probes.biases["b/1"], alone.probes.biases["b/0"])
    assert not torch.allclose(together.probes.weights["b/0"], together.probes.weights["b/1"])


def test_softmax_probes_classify_too(tmp_path: Path) -> None:
    rows, labels = blobs(300, 30, 4, 0.5, 0)
    model, _ = train_sgd({"a": rows}, labels, (10.0,), tmp_path, loss="softmax")
    ranked = predict(model, StoredRows(rows, np.arange(300)), 300, ALONE, batch_size=64)
    assert (ranked["a/0"][:, 0] == labels).float().mean() > 0.98


def test_losses_are_what_they_say() -> None:
    scores = {"a/0": torch.randn(4, 3), "a/1": torch.randn(4, 3)}
    labels = torch.tensor([0, 2, 1, 1])
    hinge = torch.zeros(4)
    cross = torch.zeros(4)
    for values in scores.values():
        for i in range(4):
            for c in range(3):
                side = 1.0 if labels[i] == c else -1.0
                hinge[i] += max(0.0, 1 - side * values[i, c].item()) ** 2
            cross[i] -= values[i].log_softmax(0)[labels[i]]
    torch.testing.assert_close(squared_hinge(scores, labels), hinge)
    torch.testing.assert_close(softmax_loss(scores, labels), cross)


def test_standardised_rows_have_unit_length_on_average() -> None:
    rows = blobs(400, 50, 4, 1.0, 0)[0]
    rows[:, 7] = 5.0  # a dead dimension, which must stay finite
    standardizer = Standardizer.fit(rows.half())
    out = standardizer(rows.half())
    assert torch.isfinite(out).all()
    assert out.mean(dim=0).abs().max() < 0.01
    large = Standardizer.fit(torch.randn(500, 20))
    assert large(torch.randn(500, 20)).square().sum(1).mean().item() == pytest.approx(1, abs=0.1)
    x = large(torch.randn(500, 20)).double()
    expected = torch.linalg.eigvalsh(x.T @ x / 500)[-1].item()
    assert large.largest == pytest.approx(expected, rel=0.2)


def test_two_classes_keep_two_rows() -> None:
    rows, labels = blobs(60, 5, 2, 0.5, 0)
    x = Standardizer.fit(rows)(rows).numpy()
    weight, bias = fit_liblinear(x, labels.numpy(), 1.0, seed=0)
    assert weight.shape == (2, 5)
    assert ((x @ weight.T + bias).argmax(1) == labels.numpy()).mean() > 0.95


def test_scores_are_those_of_standardised_rows() -> None:
    """Few rows and many rows take different ways to them."""
    rows = blobs(50, 20, 4, 1.0, 0)[0]
    standardizer = Standardizer.fit(rows)
    probes = Probes({"a": standardizer}, num_classes=4, num_probes=2)
    with torch.no_grad():
        for parameter in probes.parameters():
            parameter.normal_()
    expected = standardizer(rows) @ probes.weights["a/1"].T + probes.biases["a/1"]
    for count in (50, 3):
        scores = probes({"a": rows[:count]})["a/1"]
        torch.testing.assert_close(scores, expected[:count], rtol=1e-3, atol=1e-4)

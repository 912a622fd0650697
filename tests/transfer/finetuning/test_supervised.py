"""The supervised loop alone: batches, steps, schedules, exact resume, predictions."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from instdisc.errors import Interrupted, UserError
from instdisc.images.loading import EvenBatches, build_loader
from instdisc.runs.checkpoint import load_checkpoint
from instdisc.runs.folders import read_jsonl
from instdisc.training.dist import Process
from instdisc.training.seed import seeded
from transfer.finetuning.predictions import accuracy, predict
from transfer.finetuning.supervised import LoopSettings, Problem, SupervisedTrainer

ALONE = Process(0, 1, torch.device("cpu"))


@pytest.mark.parametrize(("n", "batch"), [(20, 256), (300, 256), (10, 3), (7, 7), (5, 1), (12, 4)])
def test_an_epoch_shows_each_image_once_in_even_batches(n: int, batch: int) -> None:
    plan = EvenBatches(n, batch, seed=1, num_steps=0)
    steps = plan.steps_per_epoch
    assert steps == -(-n // batch)
    batches = list(EvenBatches(n, batch, seed=1, num_steps=2 * steps))
    for epoch in range(2):
        part = batches[epoch * steps : (epoch + 1) * steps]
        assert sorted(key for each in part for key in each) == [(epoch, i) for i in range(n)]
        sizes = {len(each) for each in part}
        assert max(sizes) <= batch
        assert max(sizes) - min(sizes) <= 1
        bounds = [plan.bounds(epoch * steps + number) for number in range(steps)]
        assert [last - first for first, last in bounds] == [len(each) for each in part]
    assert n < 5 or batches[:steps] != batches[steps:]


def test_batches_depend_on_seed_and_step_alone() -> None:
    whole = list(EvenBatches(11, 4, seed=2, num_steps=9))
    assert list(EvenBatches(11, 4, seed=2, num_steps=9, start=4)) == whole[4:]
    assert list(EvenBatches(11, 4, seed=3, num_steps=9)) != whole
    shares = [list(EvenBatches(11, 4, 2, 9, rank=rank, world_size=3)) for rank in range(3)]
    joined = [[*a, *b, *c] for a, b, c in zip(*shares, strict=True)]
    assert joined == whole


class Numbers(Dataset[tuple[Tensor, int, str]]):
    """Points around a centre per class; the noise is a function of (epoch, index)."""

    def __init__(self, labels: Tensor, bad: int | None = None) -> None:
        self.labels, self.bad = labels, bad

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int, str]:
        epoch, index = key
        with seeded(0, epoch, index):
            noise = 0.3 * torch.randn(6)
        centre = nn.functional.one_hot(self.labels[index], 6).float()
        return centre + noise, index, "broken.jpg is bad" if index == self.bad else ""


class Net(nn.Module):
    """Batch norm and dropout: state and randomness that a resumed run must get right."""

    def __init__(self) -> None:
        super().__init__()
        with seeded(1, "net"):
            self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
            self.head = nn.Linear(16, 6)

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        features = nn.functional.dropout(self.body(inputs), 0.2, self.training)
        return {"a": self.head(features), "b": -self.head(features)}


def loss(logits: dict[str, Tensor], labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits["a"], labels, reduction="none")


def build(folder: Path, *, bad: int | None = None, **changes: Any) -> SupervisedTrainer:
    """Fifteen steps: 22 points, batches of 8 or 7, five epochs."""
    values: dict[str, Any] = {
        "epochs": 5,
        "batch_size": 8,
        "lr": 0.1,
        "lr_milestones": (2, 4),
        "lr_factor": 0.5,
        "log_every": 1,
        **changes,
    }
    labels = torch.arange(22) % 6
    net = Net()
    groups = [
        {"params": list(net.body.parameters()), "lr_scale": 1.0, "weight_decay": 1e-3},
        {"params": list(net.head.parameters()), "lr_scale": 2.0, "weight_decay": 0.0},
    ]
    problem = Problem(net, groups, loss, Numbers(labels, bad), labels, key="one")
    return SupervisedTrainer(problem, LoopSettings(**values), ALONE, folder)


def assert_same_run(one: Path, two: Path) -> None:
    states = [load_checkpoint(run / "last.pt", "train") for run in (one, two)]
    assert states[0]["step"] == states[1]["step"] == 15
    for part in ("epoch_loss", "model", "optimizer", "scaler"):
        torch.testing.assert_close(states[0][part], states[1][part], rtol=0, atol=0)
    assert read_jsonl(one / "metrics.jsonl") == read_jsonl(two / "metrics.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    build(folder).train()
    return folder


def test_it_learns_and_follows_its_schedule(whole: Path) -> None:
    rows = read_jsonl(whole / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    epochs = [row["epoch_loss"] for row in rows if "epoch_loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 16))
    rates = [0.1] * 6 + [0.05] * 6 + [0.025] * 3
    assert [row["lr"] for row in steps] == pytest.approx(rates)
    for epoch, mean in enumerate(epochs):
        part = [row["loss"] for row in steps[3 * epoch : 3 * epoch + 3]]
        assert mean == pytest.approx(sum(part) / 3)
    assert epochs[-1] < 0.5 * epochs[0]
    groups = load_checkpoint(whole / "last.pt", "train")["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == pytest.approx([0.025, 0.05])
    assert [group["weight_decay"] for group in groups] == [1e-3, 0.0]


def test_a_step_is_sgd_on_the_mean_loss_of_the_batch(tmp_path: Path) -> None:
    """Against plain torch, with everything random turned off."""
    trainer = build(tmp_path, momentum=0.0, lr=0.2)
    trainer.parallel_model.eval()
    (keys,) = list(EvenBatches(22, 8, 0, num_steps=1))
    samples = [trainer.problem.samples[key] for key in keys]
    inputs = torch.stack([each[0] for each in samples])
    indices = torch.tensor([each[1] for each in samples])
    net = Net().eval()
    mean = nn.functional.cross_entropy(net(inputs)["a"], trainer.labels[indices])
    mean.backward()
    returned = trainer.train_step((inputs, indices, [""] * len(keys)))
    assert returned.item() == pytest.approx(mean.item(), rel=1e-6)
    expected = net.head.weight - 0.4 * net.head.weight.grad  # type: ignore[operator] # after backward
    torch.testing.assert_close(trainer.model.head.weight, expected)  # type: ignore[union-attr] # Net


@pytest.mark.parametrize("save_minutes", [0.0, 10.0])
@pytest.mark.parametrize("after", [1, 7, 14])
def test_resume_is_exact(tmp_path: Path, whole: Path, after: int, save_minutes: float) -> None:
    """The loop dies after a step; with no checkpoint yet it starts again, else it goes on."""

    class Died(Exception):
        pass

    trainer = build(tmp_path, save_minutes=save_minutes)
    inner = trainer.train_step

    def dies(batch: Any) -> Tensor:
        if trainer.step == after:
            raise Died
        return inner(batch)

    trainer.train_step = dies  # type: ignore[method-assign] # only this one dies
    with pytest.raises(Died):
        trainer.train()
    again = build(tmp_path, save_minutes=save_minutes)
    again.restore()
    assert again.step == (after if save_minutes == 0 else 0)
    again.train()
    assert_same_run(whole, tmp_path)


def test_a_signal_saves_and_the_rest_is_exact(tmp_path: Path, whole: Path) -> None:
    trainer = build(tmp_path)
    inner = trainer.train_step

    def signalled(batch: Any) -> Tensor:
        if trainer.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(batch)

    trainer.train_step = signalled  # type: ignore[method-assign] # only this one is stopped
    with pytest.raises(Interrupted, match="stopped after step 5"):
        trainer.train()
    again = build(tmp_path)
    again.restore()
    assert again.step == 5
    again.train()
    assert_same_run(whole, tmp_path)


def test_a_step_waits_for_no_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host_syncs: Any
) -> None:
    """Three whole turns of the loop, between a step that logs and the end of the epoch."""
    trainer = build(tmp_path, batch_size=4, epochs=1, log_every=99)
    inner, syncs = trainer.train_step, host_syncs()

    def outer(batch: Any) -> Tensor:
        if trainer.step == 2:
            syncs.__enter__()
        elif trainer.step == 5:
            syncs.__exit__(None, None, None)
        return inner(batch)

    monkeypatch.setattr(trainer, "train_step", outer)
    loader = "transfer.finetuning.supervised.build_loader"  # which is the host's own work
    monkeypatch.setattr(loader, lambda *args, **kwargs: list(build_loader(*args, **kwargs)))
    trainer.train()
    assert trainer.step == 6
    assert syncs.found == []


@pytest.mark.slow  # loading the compiler takes seconds
def test_a_compiled_run_has_the_same_checkpoint(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a backend that compiles nothing, bit for bit."""
    inner = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: inner(module, backend="eager"))
    build(tmp_path, compile=True).train()
    assert_same_run(whole, tmp_path)


def test_workers_do_not_change_a_run(tmp_path: Path, whole: Path) -> None:
    build(tmp_path, workers=2).train()
    assert_same_run(whole, tmp_path)


def test_a_checkpoint_of_another_problem_is_refused(whole: Path) -> None:
    trainer = build(whole)
    object.__setattr__(trainer.problem, "key", "two")
    with pytest.raises(UserError, match="of another run"):
        trainer.restore()


def test_what_cannot_be_trained_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the loss is (nan|inf) at step .*: lower --lr"):
        build(tmp_path / "a", lr=1e30).train()
    with pytest.raises(UserError, match=r"broken.jpg is bad: remove or replace it"):
        build(tmp_path / "b", bad=3).train()
    with pytest.raises(UserError, match="--skip-bad-images"):
        predict(Net(), Numbers(torch.arange(22) % 6, 3), 22, ALONE, batch_size=5)
    with pytest.raises(UserError, match="batches of 1 for 1 process"):
        build(tmp_path / "c", batch_size=1)


def test_predictions_are_ranked_and_in_order(whole: Path) -> None:
    trainer = build(whole)
    trainer.restore()
    labels = trainer.labels
    ranked = predict(trainer.model, Numbers(labels), 22, ALONE, batch_size=5)
    assert set(ranked) == {"a", "b"}
    assert trainer.model.training is False
    with torch.inference_mode():
        rows = torch.stack([Numbers(labels)[0, index][0] for index in range(22)])
        logits = trainer.model(rows)
    for name in ("a", "b"):
        assert ranked[name].shape == (22, 5)
        expected = logits[name].sort(dim=1, descending=True).indices[:, :5]
        assert torch.equal(ranked[name], expected)
    assert (ranked["a"][:, 0] == labels).float().mean() > 0.8
    with pytest.raises(UserError, match="start fewer"):
        predict(trainer.model, Numbers(labels), 2, Process(0, 3, ALONE.device), batch_size=5)


def test_unreadable_images_are_left_out_on_request(tmp_path: Path) -> None:
    """Their loss counts nothing, and neither do they in the accuracy."""
    trainer = build(tmp_path, bad=3, skip_bad=True, epochs=1, momentum=0.0)
    trainer.parallel_model.eval()
    inputs, labels = torch.randn(4, 6), trainer.labels
    indices = torch.tensor([0, 3, 7, 9])
    net = Net().eval()
    losses = loss(net(inputs), labels[indices])
    kept = losses[[0, 2, 3]].sum() / 7  # the first batch has seven images
    returned = trainer.train_step((inputs, indices, ["", "broken.jpg", "", ""]))
    assert returned.item() == pytest.approx(kept.item(), rel=1e-6)
    samples = Numbers(labels, bad=3)
    ranked = predict(trainer.model, samples, 22, ALONE, batch_size=5, skip_bad=True)["a"]
    assert (ranked[3] == -1).all()
    assert (ranked >= 0).all(dim=1).sum() == 21
    hits = [i for i in range(22) if i != 3 and ranked[i, 0] == labels[i]]
    assert accuracy(ranked, labels, 1) == pytest.approx(100 * len(hits) / 21)
    with pytest.raises(UserError, match="none of the images"):
        accuracy(torch.full((2, 5), -1), labels[:2], 1)

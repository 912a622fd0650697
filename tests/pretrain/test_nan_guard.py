"""A loss that is no number: stop with step, files and checkpoint, or leave the batch out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from instdisc.cli import parse
from instdisc.errors import UserError
from instdisc.images.loading import BatchPlan
from instdisc.images.sets import read_folder
from instdisc.runs.checkpoint import load_checkpoint
from instdisc.training.dist import Process
from pretrain.config import PretrainConfig, parse_on_nan
from pretrain.nan_guard import NanGuard
from pretrain.session import Session
from pretrain.trainer import Trainer, pretrain


def config(data: Path, output: Path, **changes: Any) -> PretrainConfig:
    """Six steps: 24 images, batches of 8, two epochs."""
    values = {
        "arch": "resnet18", "data": str(data), "output": output, "image_size": 16,
        "batch_size": 8, "epochs": 2, "lr_milestones": (), "num_negatives": 5, "workers": 0,
        "log_every": 1, "monitor_every": 0, "tensorboard": False, "device": "cpu",
        "embedding_dim": 16, **changes,
    }  # fmt: skip
    return PretrainConfig(**values)


@pytest.fixture
def _nan_at_steps(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The steps of the parameter have a network that gives NaN, and with it norms that see it."""
    steps, inner = request.param, Trainer.train_step

    def outer(self: Trainer, batches: Any) -> Tensor:
        def spoil(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (inputs[0] * float("nan"),)

        hook = self.model.register_forward_pre_hook(spoil) if self.step in steps else None
        try:
            return inner(self, batches)
        finally:
            if hook is not None:
                hook.remove()

    monkeypatch.setattr(Trainer, "train_step", outer)


@pytest.mark.usefixtures("_nan_at_steps")
@pytest.mark.parametrize("_nan_at_steps", [{4}], indirect=True)
def test_it_stops_with_the_step_the_files_and_the_last_good_checkpoint(
    image_tree: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    with pytest.raises(UserError) as refused:
        pretrain(config(image_tree, output))
    line = str(refused.value)
    assert "the loss is nan at step 4" in line
    assert str(image_tree / "train") in line
    assert f"resume from {output / 'last.pt'}" in line
    assert load_checkpoint(output / "last.pt", "train")["step"] == 3
    (row,) = map(json.loads, (output / "nan_batches.jsonl").read_text().splitlines())
    assert row["step"] == 4
    assert len(set(row["images"])) == 8
    assert all(Path(name).is_file() for name in row["images"])


@pytest.mark.usefixtures("_nan_at_steps")
@pytest.mark.parametrize("_nan_at_steps", [{1}, {2}], indirect=True)
def test_between_steps_that_log_it_stops_before_anything_is_saved(
    image_tree: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A step later, or where the epoch ends with the step; the step and its images are told."""
    output, step = tmp_path / "run", min(request.node.callspec.params["_nan_at_steps"])
    with pytest.raises(UserError, match=f"the loss is nan at step {step} .*start again"):
        pretrain(config(image_tree, output, log_every=99))
    assert not (output / "last.pt").exists()
    (row,) = map(json.loads, (output / "nan_batches.jsonl").read_text().splitlines())
    plan = BatchPlan(24, 8, seed=0, num_steps=6)
    images = read_folder(image_tree / "train", "t", "train")
    assert row["images"] == [images.name(index) for _, index in list(plan)[step]]


def test_the_images_of_the_process_that_failed_are_named(image_tree: Path, tmp_path: Path) -> None:
    session = Session(config(image_tree, tmp_path), Process(0, 3, torch.device("cpu")))
    session.train = read_folder(image_tree / "train", "t", "train")
    guard = NanGuard(session, [])
    indices = torch.tensor([5, 6, 1, 2, 8, 9])
    assert guard.accepts(torch.tensor([1.0, 2.0, 3.0]), 6, indices)
    assert guard.accepts(torch.tensor([1.0, torch.inf, 3.0]), 7, indices)
    with pytest.raises(UserError, match=r"the loss is inf at step 7 \(images"):
        guard.accepts(torch.tensor([torch.nan] * 3), 8, indices)
    (row,) = map(json.loads, (tmp_path / "nan_batches.jsonl").read_text().splitlines())
    assert row == {
        "step": 7, "loss": "inf", "images": [session.train.name(1), session.train.name(2)]
    }  # fmt: skip


@pytest.mark.usefixtures("_nan_at_steps")
@pytest.mark.parametrize("_nan_at_steps", [{1, 4}], indirect=True)
def test_batches_are_left_out_and_leave_no_trace(image_tree: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    with pytest.raises(UserError, match="at step 4"):
        pretrain(config(image_tree, output, on_nan=("skip", "1")))
    pretrain(config(image_tree, output, on_nan=("skip", "2")))  # may be raised in a resumed run
    state = load_checkpoint(output / "last.pt", "train")
    assert state["step"] == 6
    assert state["num_skipped"] == 2
    assert all(bool(value.isfinite().all()) for value in state["model"].values())
    assert bool(state["bank"].isfinite().all())
    assert int(state["model"]["backbone.trunk.bn1.num_batches_tracked"]) == 4


def test_weights_that_are_no_numbers_are_not_saved(
    image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gradient may overflow where the loss did not."""
    output, inner = tmp_path / "run", Trainer.train_step

    def outer(self: Trainer, batches: Any) -> Tensor:
        loss = inner(self, batches)
        if self.step == 6:
            next(self.model.parameters()).data.fill_(torch.inf)
        return loss

    monkeypatch.setattr(Trainer, "train_step", outer)
    with pytest.raises(UserError, match=r"weights are NaN or infinite after step 6.*last\.pt"):
        pretrain(config(image_tree, output))
    assert load_checkpoint(output / "last.pt", "train")["step"] == 3


def test_the_flag(image_tree: Path) -> None:
    argv = ["--data", str(image_tree), "--on-nan", "skip", "3"]
    found = parse(PretrainConfig, argv)
    assert parse_on_nan(found.on_nan) == 3
    assert parse_on_nan(PretrainConfig().on_nan) == 0
    for words in ((), ("skip",), ("skip", "0"), ("skip", "-1"), ("stop", "3"), ("go",)):
        with pytest.raises(UserError, match="write stop, or skip N"):
            PretrainConfig(on_nan=words)

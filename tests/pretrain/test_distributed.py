"""Two gloo processes against one: the same losses, the same bank."""

import multiprocessing
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from instdisc import backbones
from instdisc.checkpoint import load_checkpoint
from instdisc.cli import UserError
from instdisc.dist import init_process
from instdisc.runs import read_jsonl
from pretrain.config import PretrainConfig
from pretrain.pipeline import pretrain

FORK = multiprocessing.get_context("fork")


def tiny(stem: str, batch_norm: bool) -> nn.Module:
    """A backbone free of batch statistics, whose gradient does not depend on how a batch is cut."""
    layers: dict[str, nn.Module] = {}
    for stage, width in enumerate((3, 8, 8, 8, 8)):
        layers[f"conv{stage + 1}"] = nn.Sequential(
            nn.Conv2d(width, 8, 3, stride=1 + (stage == 0)), nn.GroupNorm(2, 8), nn.ReLU()
        )
    return nn.Sequential(*layers.values(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.fixture(autouse=True)
def _tiny_arch(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = backbones.Arch(tiny, 8, (8, 8, 8, 8, 8), ("0", "1", "2", "3", "4"))
    monkeypatch.setitem(backbones.ARCHS, "tiny", entry)


def config(data: Path, output: Path, **changes: Any) -> PretrainConfig:
    """Twenty steps of eight images."""
    values = {
        "arch": "tiny",
        "data": str(data),
        "output": output,
        "image_size": 24,
        "batch_size": 8,
        "epochs": 7,
        "lr_milestones": (5,),
        "num_negatives": 6,
        "proximal_weight": 0.3,
        "num_neighbors": 4,
        "workers": 0,
        "log_every": 1,
        "monitor_every": 7,
        "tensorboard": False,
        "device": "cpu",
        **changes,
    }
    return PretrainConfig(**values)


def worker(rank: int, port: int, run: PretrainConfig, world_size: int = 2) -> None:
    import os

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    pretrain(run)


def run_on_two(run: PretrainConfig) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [FORK.Process(target=worker, args=(rank, port, run)) for rank in (0, 1)]
    for child in children:
        child.start()
    for child in children:
        child.join(120)
    assert [child.exitcode for child in children] == [0, 0]


@pytest.mark.parametrize(
    "changes",
    [
        {"objective": "nce"},
        {"objective": "nce", "negatives": "shared", "normalizer": "ema"},
        {"objective": "nce", "normalizer": "exact", "accumulate": 2},
        {"objective": "softmax"},
        {"objective": "parametric"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_two_processes_train_like_one(
    image_tree: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    pretrain(config(image_tree, tmp_path / "one", **changes))
    run_on_two(config(image_tree, tmp_path / "two", **changes))
    one, two = (read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (one, two)]
    assert len(losses[0]) == 21
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert losses[0][0] != losses[0][-1]
    banks = [load_checkpoint(tmp_path / n / "last.pt", "train")["bank"] for n in ("one", "two")]
    torch.testing.assert_close(banks[0], banks[1], atol=1e-4, rtol=0)
    assert one[-1]["knn_bank"] == two[-1]["knn_bank"]


def test_a_run_moves_between_one_and_two_processes(image_tree: Path, tmp_path: Path) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    pretrain(config(image_tree, whole, monitor_every=0))
    run_on_two(config(image_tree, moved, monitor_every=0, epochs=4))
    pretrain(config(image_tree, moved, monitor_every=0))
    banks = [load_checkpoint(run / "last.pt", "train")["bank"] for run in (whole, moved)]
    torch.testing.assert_close(banks[0], banks[1], atol=1e-4, rtol=0)


def test_banks_that_differ_stop_training(
    image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pretrain.memory_bank import MemoryBank

    inner = MemoryBank.checksum
    import os

    monkeypatch.setattr(
        MemoryBank, "checksum", lambda self: inner(self) + int(os.environ.get("RANK", "0"))
    )
    with pytest.raises(AssertionError, match=r"\[1, 1\] == \[0, 0\]|\[.*\] == \[0, 0\]"):
        run_on_two(config(image_tree, tmp_path / "run", monitor_every=0))


def test_a_partly_set_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="start with torchrun"):
        init_process("cpu")

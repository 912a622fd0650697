"""Two gloo processes against one: the same losses, the same bank."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from instdisc.cli import from_dict
from instdisc.errors import UserError
from instdisc.networks.weights import open_weights
from instdisc.runs.checkpoint import load_checkpoint
from instdisc.runs.folders import read_jsonl
from instdisc.runs.row_files import load_all_rows
from instdisc.training.dist import Process, init_process
from pretrain.config import PretrainConfig
from pretrain.session import Session

# Processes that start torch take seconds each.
pytestmark = pytest.mark.slow

# Run by each process, after `tiny_code`. Argument: JSON of [port, config] pairs, run one after the
# other.
WORKER = """
import json, os, sys
from instdisc.cli import from_dict
from pretrain.config import PretrainConfig
from pretrain.bank import MemoryBank
from pretrain.trainer import pretrain

if "SPOIL" in os.environ:
    checksum = MemoryBank.checksum
    MemoryBank.checksum = lambda self: checksum(self) + int(os.environ["RANK"])
for port, values in json.loads(sys.argv[1]):
    if "RANK" in os.environ:
        os.environ["MASTER_PORT"] = str(port)
    pretrain(PretrainConfig(**{**from_dict(PretrainConfig, values), "arch": "tiny"}))
"""
# Run by each of two processes: ResNet-18 with its batch norms. Arguments: JSON of the config, and a
# folder for what each measures, and with which weights and statistics.
MEASURED = """
import json, os, sys
import torch
from instdisc.cli import from_dict
from pretrain.config import PretrainConfig
from pretrain.monitor import Monitor
from pretrain.trainer import pretrain

inner = Monitor.measure

def measure(self, model, bank, *args):
    found = inner(self, model, bank, *args)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    torch.save([found, state], f"{sys.argv[2]}/{os.environ['RANK']}.pt")
    return found

Monitor.measure = measure
pretrain(PretrainConfig(**from_dict(PretrainConfig, json.loads(sys.argv[1]))))
"""
VARIANTS: dict[str, dict[str, Any]] = {
    "nce": {},
    "nce shared ema": {"negatives": "shared", "normalizer": "ema"},
    "nce exact accumulate": {"normalizer": "exact", "accumulate": 2},
    "softmax": {"objective": "softmax"},
    "parametric": {"objective": "parametric"},
    "nce sharded": {"bank_placement": "sharded"},
    "nce shared sharded half": {
        "negatives": "shared",
        "bank_placement": "sharded",
        "bank_dtype": "float16",
    },
    "softmax sharded accumulate": {
        "objective": "softmax",
        "bank_placement": "sharded",
        "accumulate": 2,
    },
}


def config(data: Path, output: Path, **changes: Any) -> dict[str, Any]:
    """Twenty-one steps of eight images."""
    return {
        "data": str(data),
        "output": str(output),
        "image_size": 24,
        "batch_size": 8,
        "epochs": 7,
        "lr_milestones": [5],
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(source: str, *arguments: str, world_size: int, **env: str) -> list[int]:
    """Runs the source in that many processes; their exit codes."""
    children, port = [], str(free_port())
    for rank in range(world_size):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        described = {**ranks, **place} if world_size > 1 else {}
        children.append(
            subprocess.Popen(
                [sys.executable, "-c", source, *arguments], env={**os.environ, **described, **env}
            )
        )
    return [child.wait(300) for child in children]


def run(code: str, configs: list[dict[str, Any]], world_size: int, **env: str) -> list[int]:
    """Runs the configs one after the other; the exit codes of the processes."""
    argument = json.dumps([(free_port(), values) for values in configs])
    return start(code + WORKER, argument, world_size=world_size, **env)


@pytest.fixture(scope="module")
def runs(
    image_tree: Path, tiny_code: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[int, Path]:
    """Every variant, by one process and by two; and a run that moves from two to one."""
    root = tmp_path_factory.mktemp("runs")
    for world_size in (2, 1):
        folder = root / str(world_size)
        configs = [config(image_tree, folder / name, **v) for name, v in VARIANTS.items()]
        epochs = 4 if world_size == 2 else 7
        placement = "sharded" if world_size == 2 else "cpu"
        moved = [
            config(image_tree, root / "moved", monitor_every=0, epochs=epochs),
            config(
                image_tree,
                root / "sharded",
                monitor_every=0,
                epochs=epochs,
                bank_placement=placement,
            ),
        ]
        assert run(tiny_code, [*configs, *moved], world_size) == [0] * world_size
    return {0: root / "moved", 1: root / "1", 2: root / "2", -1: root / "sharded"}


def bank(run: Path) -> torch.Tensor:
    return load_all_rows(load_checkpoint(run / "last.pt", "train")["bank"], run / "last.pt")


@pytest.mark.parametrize("variant", VARIANTS)
def test_two_processes_train_like_one(runs: dict[int, Path], variant: str) -> None:
    one, two = (read_jsonl(runs[size] / variant / "metrics.jsonl") for size in (1, 2))
    losses = [[row["loss"] for row in rows if "loss" in row] for rows in (one, two)]
    assert len(losses[0]) == 21
    # A row that differs in its last bit may be rounded to the other half-precision neighbour, and
    # over the steps that grows; one step agrees to 1e-5: test_sharded_bank.py.
    half = "half" in variant
    assert losses[0] == pytest.approx(losses[1], abs=1e-4, rel=1e-4 if half else 0)
    assert len(set(losses[0])) > 10  # it trains; two losses may well be equal to the last bit
    banks = (bank(runs[size] / variant) for size in (1, 2))
    torch.testing.assert_close(*banks, atol=1e-3 if half else 1e-4, rtol=0)
    assert {"knn_bank", "knn_recomputed"} <= two[-1].keys()


def test_a_run_moves_from_two_processes_to_one(runs: dict[int, Path]) -> None:
    torch.testing.assert_close(bank(runs[0]), bank(runs[1] / "nce"), atol=1e-4, rtol=0)


def test_a_run_moves_from_a_sharded_bank_to_host_memory(runs: dict[int, Path]) -> None:
    torch.testing.assert_close(bank(runs[-1]), bank(runs[1] / "nce"), atol=1e-4, rtol=0)
    rows = read_jsonl(runs[-1] / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 22))


def test_batch_norm_is_the_same_wherever_it_is_measured_or_saved(
    image_tree: Path, tmp_path: Path
) -> None:
    """And what two processes measure is what one finds in the file that they wrote."""
    values = config(
        image_tree,
        tmp_path / "run",
        arch="resnet18",
        image_size=32,
        epochs=2,
        monitor_every=1,
        lr=1e-4,
    )
    codes = start(MEASURED, json.dumps(values), str(tmp_path), world_size=2)
    assert codes == [0, 0]
    (found, first), (too, second) = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)
    )
    state = load_checkpoint(tmp_path / "run" / "last.pt", "train")
    assert first.keys() == second.keys() == state["model"].keys()
    for name, value in state["model"].items():
        assert torch.equal(first[name], value), name
        assert torch.equal(second[name], value), name
    settings = PretrainConfig(**from_dict(PretrainConfig, values))
    session = Session(settings, Process(0, 1, torch.device("cpu")))
    model = open_weights(tmp_path / "run").embedding
    assert model is not None
    assert session.monitor is not None
    alone = session.monitor.measure(model, state["bank"], lambda: None)
    written = read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]
    for name, number in alone.items():
        assert found[name] == too[name] == written[name]
        assert found[name] == pytest.approx(number, rel=1e-5), name


def test_banks_that_differ_stop_training(image_tree: Path, tiny_code: str, tmp_path: Path) -> None:
    codes = run(tiny_code, [config(image_tree, tmp_path / "run", monitor_every=0)], 2, SPOIL="1")
    assert 0 not in codes
    assert not (tmp_path / "run" / "last.pt").exists()


def test_a_partly_set_environment_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match="start with torchrun"):
        init_process("cpu")

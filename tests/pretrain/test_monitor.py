"""The monitor during training: stopped in the middle, shared over processes."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from instdisc.errors import Interrupted
from instdisc.features import extract
from instdisc.neighbors import shared
from instdisc.networks import backbones
from instdisc.runs.checkpoint import load_checkpoint
from instdisc.runs.folders import read_jsonl
from pretrain.config import PretrainConfig
from pretrain.trainer import pretrain


def tiny(stem: str, batch_norm: bool) -> nn.Module:
    def stage(width: int, stride: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, 8, 3, stride), nn.BatchNorm2d(8), nn.ReLU())

    stages = [stage(3, 2), *(stage(8, 1) for _ in range(4))]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def config(data: Path, output: Path) -> dict[str, Any]:
    """Six steps; 24 images to search and 6 to classify: four batches each time it measures."""
    return {
        "arch": "tiny", "data": str(data), "output": output, "image_size": 24, "batch_size": 8,
        "epochs": 2, "num_negatives": 5, "num_neighbors": 4, "workers": 0, "log_every": 1,
        "monitor_every": 1, "tensorboard": False, "device": "cpu", "save_minutes": 0.0,
    }  # fmt: skip


def facts(run: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The rows without the times; weights and bank."""
    timed = ("time_", "epoch_time_", "images_per_second")
    rows = [
        {name: value for name, value in row.items() if not name.startswith(timed)}
        for row in read_jsonl(run / "metrics.jsonl")
    ]
    state = load_checkpoint(run / "last.pt", "train")
    return rows, {**state["model"], "bank": state["bank"]}


def assert_same(one: Path, other: Path) -> None:
    (rows, tensors), (others, other_tensors) = facts(one), facts(other)
    assert rows == others
    assert sum("knn_recomputed" in row for row in rows) == 3
    assert all(torch.equal(tensors[name], other_tensors[name]) for name in tensors)


class Signals:
    """SIGUSR2 to this process when something has happened so often."""

    def __init__(self) -> None:
        self.count = self.at = 0

    def note(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGUSR2)


def test_a_signal_while_it_measures_stops_at_once_and_the_run_goes_on_to_the_same_rows(
    image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        backbones.ARCHS, "tiny", backbones.Arch(tiny, 8, (8,) * 5, ("0", "1", "2", "3", "4"))
    )
    monkeypatch.setattr(shared, "QUERIES_BETWEEN_CHECKS", 2)
    batches, searches = Signals(), Signals()
    iterate, classify = extract.iterate_features, shared.classify

    def count_batches(*args: Any, **kwargs: Any) -> Iterator[Any]:
        for batch in iterate(*args, **kwargs):
            batches.note()
            yield batch

    def count_searches(*args: Any, **kwargs: Any) -> Any:
        searches.note()
        return classify(*args, **kwargs)

    monkeypatch.setattr(extract, "iterate_features", count_batches)
    monkeypatch.setattr(shared, "classify", count_searches)

    def run(output: Path) -> None:
        batches.count = searches.count = 0
        pretrain(PretrainConfig(**config(image_tree, output)))

    run(tmp_path / "whole")
    assert (batches.count, searches.count) == (12, 18)
    # Untrained; after the first epoch; after the second, which a resumed run measures first.
    for events, at, step in ((batches, 2, 0), (batches, 6, 3), (batches, 7, 6), (searches, 4, 6)):
        events.at = at
        saved = f", saved in {tmp_path / 'run' / 'last.pt'}" if step else ""
        with pytest.raises(Interrupted, match=f"stopped after step {step}{saved}: run again"):
            run(tmp_path / "run")
        assert events.count == at  # nothing more was computed
        events.at = 0
    run(tmp_path / "run")
    assert (batches.count, searches.count) == (4, 6)
    assert_same(tmp_path / "whole", tmp_path / "run")
    run(tmp_path / "run")
    assert batches.count == 0  # finished


# Run by each of two processes; the arguments: JSON of the config, which event to signal at (rank 1
# alone), and where to write what this process has measured.
WORKER = """
import json, os, sys, time
from pathlib import Path
from test_monitor import Signals, config, tiny
from instdisc.errors import Interrupted
from instdisc.features import extract
from instdisc.networks import backbones
from instdisc.training import dist
from pretrain import session
from pretrain.config import PretrainConfig
from pretrain.monitor import Monitor
from pretrain.trainer import pretrain

data, output, at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
backbones.ARCHS["tiny"] = backbones.Arch(tiny, 8, (8,) * 5, ("0", "1", "2", "3", "4"))
rank = os.environ["RANK"]
signals = Signals()
signals.at = at if rank == "1" else 0
iterate, measure, load = extract.iterate_features, Monitor.measure, session.load_images
measured = []

def count(*args, **kwargs):
    for batch in iterate(*args, **kwargs):
        signals.note()
        yield batch

def remember(*args, **kwargs):
    measured.append(measure(*args, **kwargs))
    return measured[-1]

def load_slowly(*args, **kwargs):
    if rank == "0":
        time.sleep(3 * dist.training_timeout().total_seconds() if at == 0 else 0)
    return load(*args, **kwargs)

extract.iterate_features, Monitor.measure, session.load_images = count, remember, load_slowly
code = 0
try:
    pretrain(PretrainConfig(**config(data, output)))
except Interrupted:
    code = 75
Path(f"{output}.{rank}.json").write_text(json.dumps(measured))
sys.exit(code)
"""


def run_two(*argv: str, **env: str) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = []
    for rank in "01":
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        path = {"PYTHONPATH": str(Path(__file__).parent)}
        command = [sys.executable, "-c", WORKER, *argv]
        children.append(
            subprocess.Popen(command, env={**os.environ, **ranks, **place, **path, **env})
        )
    return [child.wait(300) for child in children]


@pytest.mark.slow
def test_two_processes_measure_alike_and_stop_together(image_tree: Path, tmp_path: Path) -> None:
    """The first is three times as long as their timeout in listing the images, meanwhile."""
    whole, stopped = tmp_path / "whole", tmp_path / "run"
    assert run_two(str(image_tree), str(whole), "0", INSTDISC_TIMEOUT_SECONDS="5") == [0, 0]
    first, second = (json.loads(Path(f"{whole}.{rank}.json").read_text()) for rank in "01")
    assert first == second
    assert len(first) == 3
    # The second process is signalled alone, in its second batch after the first epoch.
    assert run_two(str(image_tree), str(stopped), "5") == [75, 75]
    assert load_checkpoint(stopped / "last.pt", "train")["step"] == 3
    assert run_two(str(image_tree), str(stopped), "-1") == [0, 0]
    assert_same(whole, stopped)

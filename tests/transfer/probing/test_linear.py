"""Linear probing end to end: stored and streamed, both solvers, processes, refusals."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from instdisc.cli import from_dict
from instdisc.errors import Interrupted
from instdisc.images.sets import ImageSet
from instdisc.images.transforms import InputSpec
from instdisc.names import STAGES
from instdisc.networks.backbones import backbone_payload, build_backbone
from instdisc.runs.checkpoint import load_file, save_checkpoint
from instdisc.runs.results import Result, read_results
from transfer.finetuning.supervised import SupervisedTrainer
from transfer.knn import main as knn
from transfer.linear import main
from transfer.probing.linear import default_epochs, run_linear
from transfer.probing.pooled import NotFrozenError, StageFeatures
from transfer.probing.settings import LinearConfig

WORKER = """
import json, os, sys
from instdisc.cli import from_dict
from transfer.probing.settings import LinearConfig
from transfer.probing.linear import run_linear

for port, values in json.loads(sys.argv[1]):
    os.environ["MASTER_PORT"] = str(port)
    run_linear(LinearConfig(**from_dict(LinearConfig, values)))
"""


def values(output: Path, **changes: Any) -> dict[str, Any]:
    return {
        "output": str(output),
        "stage": ["conv1", "conv5", "embedding"],
        "cost": [0.1, 10.0],
        "held_out": 0.25,
        "batch_size": 8,
        "epochs": 6,
        "precision": "float32",
        "workers": 0,
        "device": "cpu",
        **changes,
    }


def config(output: Path, **changes: Any) -> LinearConfig:
    return LinearConfig(**from_dict(LinearConfig, values(output, **changes)))


def facts(rows: list[Result]) -> list[tuple[str, str, float, float]]:
    return [(r.details["stage"], r.metric, r.details["cost"], r.value) for r in rows]


def test_rows_say_what_was_measured(tiny_network: Path, tmp_path: Path) -> None:
    rows = run_linear(config(tmp_path / "run"))
    assert read_results() == rows
    found = [(row.details["stage"], row.metric) for row in rows]
    assert found == [(s, m) for s in ("conv1", "conv5", "embedding") for m in ("top1", "top5")]
    for row in rows:
        assert row.protocol.startswith(f"stage={row.details['stage']} solver=sgd cost=0.1,10")
        assert set(row.details["held_out"]) == {"0.1", "10"}
        best = max(row.details["held_out"].values())
        assert row.details["held_out"][f"{row.details['cost']:g}"] == best
        assert (row.details["num_held_out"], row.details["num_train"]) == (6, 24)
        assert row.details["trained_on_held_out"] is True
    per_class = rows[0].details["per_class"]
    assert rows[0].value == pytest.approx(sum(per_class.values()) / 3)
    # 8 channels on a 10x10 map, where the rule would allow a grid of 35.
    assert [row.details["dim"] for row in rows[::2]] == [8 * 11 * 11, 8 * 3 * 3, 4]
    assert not list((tmp_path / "run").rglob("last.pt"))
    assert rows[0].value > 60  # the classes differ by colour


def test_streaming_gives_what_stored_features_give(tiny_network: Path, tmp_path: Path) -> None:
    """One cost, so that both train on all images."""
    stored = run_linear(config(tmp_path / "a", cost=[1.0]))
    streamed = run_linear(config(tmp_path / "b", cost=[1.0], cache="off"))
    assert facts(stored) == facts(streamed)
    assert "streamed" in streamed[0].protocol
    logs = [(tmp_path / d / "log.txt").read_text() for d in ("a", "b")]
    assert "from the store" not in logs[0]
    runs = [json.loads(line) for d in ("a", "b") for line in _last_metrics(tmp_path / d)]
    assert runs[0]["epoch_loss"] == pytest.approx(runs[1]["epoch_loss"], rel=1e-4)


def _last_metrics(output: Path) -> list[str]:
    (file,) = output.glob("sgd-*/metrics.jsonl")
    return file.read_text().splitlines()[-1:]


def test_a_probe_of_the_embedding_finds_what_knn_has_stored(
    tiny_network: Path, tmp_path: Path
) -> None:
    assert knn(["--k", "3", "-j", "0", "--device", "cpu"]) == 0
    run_linear(config(tmp_path / "run", stage=["embedding"], precision=None))
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("from the store") == 2


def test_too_little_room_streams(tiny_network: Path, tmp_path: Path) -> None:
    rows = run_linear(config(tmp_path / "run", cache_gb=1e-9))
    assert "streamed" in rows[0].protocol
    assert rows[0].details["trained_on_held_out"] is False
    assert "streaming the images instead" in (tmp_path / "run" / "log.txt").read_text()


def test_augmentation_changes_training_only(tiny_network: Path, tmp_path: Path) -> None:
    rows = run_linear(config(tmp_path / "run", augment=True, stage=["conv5"], epochs=2))
    assert "augment=True" in rows[0].protocol


def test_liblinear_and_sgd_agree(tiny_network: Path, tmp_path: Path) -> None:
    options = {"cost": [1.0], "epochs": 60, "stage": ["conv1", "conv5"]}
    sgd = run_linear(config(tmp_path / "a", **options))
    liblinear = run_linear(config(tmp_path / "b", solver="liblinear", **options))
    assert [row.value for row in sgd] == [row.value for row in liblinear]
    run_linear(config(tmp_path / "c", solver="liblinear", stage=["conv5"]))  # and a choice of C


def test_a_network_that_changes_leaves_no_result(
    tiny_network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real ResNet-18 whose first batch norm is left in training mode."""
    model = build_backbone("resnet18")
    payload = {
        **backbone_payload(model),
        "input": InputSpec(size=32).to_dict(),
        "pretraining": load_file(tiny_network)["pretraining"],
    }
    save_checkpoint(tmp_path / "r18.pt", "backbone", payload)
    frozen = config(tmp_path / "ok", weights=str(tmp_path / "r18.pt"), stage=["conv5"], epochs=1)
    assert len(run_linear(frozen)) == 2
    inner = StageFeatures.__init__

    def loose(self: StageFeatures, *args: Any) -> None:
        inner(self, *args)
        self.weights.backbone.trunk.bn1.train()  # type: ignore[union-attr] # ResNet

    monkeypatch.setattr(StageFeatures, "__init__", loose)
    moving = config(tmp_path / "no", weights=str(tmp_path / "r18.pt"), stage=["conv4"], epochs=1)
    with pytest.raises(NotFrozenError):
        run_linear(moving)
    assert len(read_results()) == 2


@pytest.mark.parametrize("cache", ["on", "off"])
def test_no_validation_image_is_opened_before_the_probes_are_trained(
    tiny_network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: str
) -> None:
    trained: list[int] = []
    inner_open, inner_train = ImageSet.open, SupervisedTrainer.train
    expected = 2 if cache == "on" else 1  # with stored features the chosen C is trained again

    def guarded(self: ImageSet, index: int) -> Any:
        assert self.split == "train" or len(trained) == expected, "a validation image too early"
        return inner_open(self, index)

    def train(self: SupervisedTrainer) -> None:
        inner_train(self)
        trained.append(self.step)

    monkeypatch.setattr(ImageSet, "open", guarded)
    monkeypatch.setattr(SupervisedTrainer, "train", train)
    run_linear(config(tmp_path / "run", cache=cache))
    assert len(trained) == expected


def test_a_stopped_run_goes_on_exactly(
    tiny_network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_linear(config(tmp_path / "whole"))
    inner = SupervisedTrainer.train_step

    def outer(self: SupervisedTrainer, batch: Any) -> torch.Tensor:
        if self.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(SupervisedTrainer, "train_step", outer)
        with pytest.raises(Interrupted):
            run_linear(config(tmp_path / "stopped"))
    resumed = run_linear(config(tmp_path / "stopped"))
    assert facts(resumed) == facts(whole)
    log = (tmp_path / "stopped" / "log.txt").read_text()
    assert "going on after step 8" in log


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_two_processes_probe_like_one(tiny_source: str, tiny_network: Path, tmp_path: Path) -> None:
    """With stored features and with streamed images."""
    runs = [values(tmp_path / f"two-{cache}", cache=cache, cost=[1.0]) for cache in ("on", "off")]
    arguments = json.dumps([(free_port(), run) for run in runs])
    children = []
    for rank in range(2):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        env = {**os.environ, **ranks, "MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, "-c", tiny_source + WORKER, arguments]
        children.append(subprocess.Popen(command, env=env))
    assert [child.wait(300) for child in children] == [0, 0]
    two = read_results()
    shutil.rmtree(tmp_path / "runs" / "features")
    for number, cache in enumerate(("on", "off")):
        one = run_linear(config(tmp_path / f"one-{cache}", cache=cache, cost=[1.0]))
        assert facts(two[6 * number : 6 * number + 6]) == facts(one)
        folders = (tmp_path / f"{count}-{cache}" for count in ("one", "two"))
        losses = [json.loads(_last_metrics(folder)[0])["epoch_loss"] for folder in folders]
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "conv6"], "invalid choice: 'conv6'"),
        (["--stage"], "--stage: each once"),
        (["--cost", "0"], "--cost must be positive"),
        (["--solver", "liblinear", "--loss", "softmax"], "has --loss hinge only"),
        (["--augment", "--cache", "on"], "--augment makes new images"),
        (["--cache", "on", "--cache-gb", "0"], "no room for"),
        (["--solver", "liblinear", "--memory-gb", "1e-6"], "use --solver sgd, or raise"),
        (["--weights", "nothing"], "no such run, file"),
        (["--weights", "random:tiny", "--data", "nowhere"], "does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tiny_network: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    try:
        code: int | str | None = main([*arguments, "--device", "cpu", "--workers", "0"])
    except SystemExit as exit:  # argparse's own refusals
        code = exit.code
    assert code == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_one_pass_is_enough_for_imagenet() -> None:
    assert [default_epochs(n) for n in (2000, 50_000, 1_281_167)] == [12, 2, 1]


@pytest.mark.slow
def test_sgd_reaches_liblinear_on_real_data(shared_data: Path, tmp_path: Path) -> None:
    """Supervised ResNet-18, imagenette, at 64 pixels for time."""
    model = build_backbone("resnet18")
    state = load_file(shared_data / "weights" / "resnet18_trunk_imagenet_fp16.pth")
    model.trunk.load_state_dict(state)
    payload = {
        **backbone_payload(model),
        "input": InputSpec(size=64).to_dict(),
        "pretraining": {"config": {"data": str(shared_data / "imagenette-mini")}},
    }
    save_checkpoint(tmp_path / "r18.pt", "backbone", payload)
    options = {"weights": str(tmp_path / "r18.pt"), "batch_size": 250, "epochs": None}
    options |= {"stage": list(STAGES), "cost": [1.0], "precision": None}
    sgd = run_linear(config(tmp_path / "a", **options))
    liblinear = run_linear(config(tmp_path / "b", solver="liblinear", **options))
    for ours, theirs in zip(sgd[::2], liblinear[::2], strict=True):
        assert ours.value >= theirs.value - 1.0, ours.details["stage"]
    assert sgd[-2].value > 75

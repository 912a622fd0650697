"""Linear probing end to end: stored and streamed, both solvers, processes, refusals."""

import dataclasses
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from instdisc.cli import from_dict, parse, to_dict
from instdisc.errors import Interrupted
from instdisc.images.subsets import hold_out
from instdisc.images.transforms import InputSpec
from instdisc.names import STAGES
from instdisc.networks.backbones import backbone_payload, build_backbone
from instdisc.runs.checkpoint import load_file, save_checkpoint
from instdisc.runs.results import Result, read_results
from transfer.finetuning.supervised import SupervisedTrainer
from transfer.knn import main as knn
from transfer.linear import main
from transfer.probing.linear import LinearProbing, run_linear
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


def recipe_values(output: Path, recipe: str, **changes: Any) -> dict[str, Any]:
    """A recipe of the command, shortened."""
    plain = {"recipe": recipe, "batch_size": 8, "epochs": 6, "workers": 0, "device": "cpu"}
    arguments = parse(LinearConfig, ["--recipe", recipe])
    return {**to_dict(arguments), **plain, "output": str(output), **changes}


def recipe_config(output: Path, recipe: str, **changes: Any) -> LinearConfig:
    return LinearConfig(**from_dict(LinearConfig, recipe_values(output, recipe, **changes)))


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
    rows = run_linear(config(tmp_path / "run", augment="crops", stage=["conv5"], epochs=2))
    assert "augment=crops" in rows[0].protocol


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
    tiny_network: Path,
    tmp_path: Path,
    cache: str,
    guard_validation: Callable[[int], tuple[list[int], list[str]]],
) -> None:
    expected = 2 if cache == "on" else 1  # with stored features the chosen C is trained again
    trained, _ = guard_validation(expected)
    run_linear(config(tmp_path / "run", cache=cache))
    assert len(trained) == expected


RECIPE_STAGES = {
    "moco": ("backbone",),
    "vissl": tuple(STAGES),
    "openselfsup": tuple(STAGES),
}


@pytest.mark.parametrize("recipe", RECIPE_STAGES)
def test_a_recipe_trains_its_layers_on_random_crops(
    tiny_network: Path, tmp_path: Path, recipe: str
) -> None:
    rows = run_linear(recipe_config(tmp_path / "run", recipe, epochs=12))
    assert [row.details["stage"] for row in rows[::2]] == list(RECIPE_STAGES[recipe])
    for row in rows:
        changed = "epochs=12 batch_size=8"
        assert row.protocol == f"stage={row.details['stage']} recipe={recipe} {changed}"
        assert (row.details["cost"], row.details["num_held_out"]) == (None, 0)
    assert not (tmp_path / "runs" / "features").exists()
    assert max(row.value for row in rows[::2]) > 60  # the classes differ by colour


def test_layers_of_several_rates_train_as_each_alone(
    tiny_network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All share the features of one pass; the one that does best on held-out images is used."""
    kept: dict[str, Any] = {}
    inner = SupervisedTrainer.train

    def train(self: SupervisedTrainer) -> None:
        inner(self)
        kept[self.folder.parent.name] = self

    monkeypatch.setattr(SupervisedTrainer, "train", train)
    rates = [0.001, 0.1, 0.01]
    rows = run_linear(recipe_config(tmp_path / "all", "vissl", lr=rates, held_out=0.25))
    for stage in STAGES:
        top1 = next(row for row in rows if row.details["stage"] == stage)
        scores = top1.details["held_out"]
        assert list(scores) == ["lr=0.001", "lr=0.1", "lr=0.01"]
        assert scores[f"lr={top1.details['lr']:g}"] == max(scores.values())
        assert top1.details["num_held_out"] == 6
        assert "lr=0.001,0.1,0.01" in top1.protocol
    together = kept["all"]
    monkeypatch.setattr(LinearProbing, "_choose", _choose_first(LinearProbing._choose))
    for number, rate in enumerate(rates):
        run_linear(recipe_config(tmp_path / f"{number}", "vissl", lr=[rate], held_out=0.25))
        alone = kept[f"{number}"].model.probes
        for stage in STAGES:
            theirs = alone.layers[f"{stage}/0"].weight
            assert torch.equal(together.model.probes.layers[f"{stage}/{number}"].weight, theirs)


def _choose_first(inner: Callable[..., Any]) -> Callable[..., Any]:
    """Trains a single candidate without the held-out images too, as several are."""

    def choose(self: LinearProbing, train: Any) -> Any:
        choice = inner(self, train)
        kept, _ = hold_out(train.labels, self.config.held_out, self.config.seed)
        model = self._fit(train.subset(kept), {s: (c,) for s, c in choice.chosen.items()})
        return dataclasses.replace(choice, model=model)

    return choose


@pytest.mark.parametrize("recipe", ["moco", "vissl"])
def test_a_stopped_recipe_goes_on_to_the_same_bits(
    tiny_network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    ends: dict[str, dict[str, torch.Tensor]] = {}
    inner_train, inner_step = SupervisedTrainer.train, SupervisedTrainer.train_step

    def train(self: SupervisedTrainer) -> None:
        inner_train(self)
        ends[self.folder.parent.name] = self.model.state_dict()

    def step(self: SupervisedTrainer, batch: Any) -> torch.Tensor:
        if self.folder.parent.name == "stopped" and self.step == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner_step(self, batch)

    monkeypatch.setattr(SupervisedTrainer, "train", train)
    monkeypatch.setattr(SupervisedTrainer, "train_step", step)
    run_linear(recipe_config(tmp_path / "whole", recipe))
    with pytest.raises(Interrupted):
        run_linear(recipe_config(tmp_path / "stopped", recipe))
    run_linear(recipe_config(tmp_path / "stopped", recipe))
    assert "going on after step 8" in (tmp_path / "stopped" / "log.txt").read_text()
    assert ends["whole"].keys() == ends["stopped"].keys()
    assert all(torch.equal(ends["whole"][name], ends["stopped"][name]) for name in ends["whole"])


def test_a_shorter_training_keeps_the_parts_of_a_schedule() -> None:
    assert parse(LinearConfig, ["--recipe", "moco", "--epochs", "20"]).milestones == (12, 16)
    given = ["--recipe", "moco", "--epochs", "20", "--lr-milestones", "5"]
    assert parse(LinearConfig, given).milestones == (5,)


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
    """With stored features, with streamed images, and with batch norm over both processes."""
    runs = [values(tmp_path / f"two-{cache}", cache=cache, cost=[1.0]) for cache in ("on", "off")]
    runs.append(recipe_values(tmp_path / "two-vissl", "vissl"))
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
    run_linear(recipe_config(tmp_path / "one-vissl", "vissl"))
    folders = (tmp_path / f"{count}-vissl" for count in ("one", "two"))
    losses = [json.loads(_last_metrics(folder)[0])["epoch_loss"] for folder in folders]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "conv6"], "invalid choice: 'conv6'"),
        (["--stage"], "--stage: each once"),
        (["--cost", "0"], "--cost must be positive"),
        (["--recipe", "moco", "--cost", "1"], "--cost is of SVMs, --weight-decay of the layers"),
        (["--weight-decay", "0"], "give one of them"),
        (["--cost"], "give one of them"),
        (["--batch-norm", "plain"], "add --recipe vissl"),
        (["--recipe", "vissl", "--wd", "-1"], "--weight-decay must not be negative"),
        (["--recipe", "moco", "--lr", "3", "3"], "--lr: each once"),
        (["--recipe", "moco", "--lr", "0"], "--lr must be positive"),
        (["--recipe", "moco", "--solver", "liblinear"], "and no recipe"),
        (["--recipe", "moco", "--cache", "on"], "--augment makes new images"),
        (["--momentum", "0"], "above 0 for --nesterov"),
        (["--solver", "liblinear", "--loss", "softmax"], "has --loss hinge only"),
        (["--augment", "crops", "--cache", "on"], "--augment makes new images"),
        (["--cache", "on", "--cache-gb", "0"], "no room for"),
        (["--solver", "liblinear", "--memory-gb", "1e-6"], "use --solver sgd, or raise"),
        (["--weights", "nothing"], "no such run, file"),
        (["--weights", "random:tiny", "--data", "nowhere"], "does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tiny_network: Path, refusal: Callable[..., str], arguments: list[str], message: str
) -> None:
    assert message in refusal(main, arguments)


@pytest.fixture
def supervised_network(shared_data: Path, tmp_path: Path) -> Path:
    """The backbone.pt of a supervised ResNet-18 for imagenette, at 64 pixels for time."""
    model = build_backbone("resnet18")
    state = load_file(shared_data / "weights" / "resnet18_trunk_imagenet_fp16.pth")
    model.trunk.load_state_dict(state)
    payload = {
        **backbone_payload(model),
        "input": InputSpec(size=64).to_dict(),
        "pretraining": {"config": {"data": str(shared_data / "imagenette-mini")}},
    }
    save_checkpoint(tmp_path / "r18.pt", "backbone", payload)
    return tmp_path / "r18.pt"


@pytest.mark.slow
def test_sgd_reaches_liblinear_on_real_data(supervised_network: Path, tmp_path: Path) -> None:
    """The paper's probes; MoCo's and VISSL's as published, but for the random crops, for time."""
    options = {"weights": str(supervised_network), "batch_size": 250, "epochs": 28}
    options |= {"stage": list(STAGES), "cost": [1.0], "precision": None}
    sgd = run_linear(config(tmp_path / "a", **options))
    liblinear = run_linear(config(tmp_path / "b", solver="liblinear", **options))
    for ours, theirs in zip(sgd[::2], liblinear[::2], strict=True):
        assert ours.value >= theirs.value - 1.0, ours.details["stage"]
    assert sgd[-2].value > 75
    for recipe in ("moco", "vissl"):
        arguments = ["--recipe", recipe, "--augment", "off", "--weights", str(supervised_network)]
        arguments += ["--output", str(tmp_path / recipe), "--workers", "0", "--device", "cpu"]
        rows = run_linear(parse(LinearConfig, arguments))
        assert rows[-2].value >= liblinear[-2].value - 2.0, recipe

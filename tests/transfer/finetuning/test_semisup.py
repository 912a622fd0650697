"""Semi-supervised fine-tuning end to end on tiny images: guard, resume, processes, refusals."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from instdisc.cli import from_dict
from instdisc.errors import UserError
from instdisc.images.transforms import InputSpec
from instdisc.networks.backbones import Embedding, backbone_payload, build_backbone
from instdisc.runs.checkpoint import save_checkpoint
from instdisc.runs.folders import read_jsonl
from instdisc.runs.results import read_results, summarize
from transfer.finetuning.semisup import run_semisup
from transfer.finetuning.settings import SemisupConfig

# Run by other interpreters, after the code that makes the tiny architecture.
WORKER = """
import json, os, signal, sys
import torch
from instdisc.cli import from_dict
from transfer.finetuning.settings import SemisupConfig
from transfer.finetuning.semisup import run_semisup
from transfer.finetuning.supervised import SupervisedTrainer

values = json.loads(sys.argv[1])
killed_after = values.pop("killed_after", None)
inner = SupervisedTrainer.train_step

def outer(self, batch):
    loss = inner(self, batch)
    if self.step == killed_after:
        os.kill(os.getpid(), signal.SIGKILL)
    return loss

inner_train = SupervisedTrainer.train

def train(self):
    inner_train(self)
    torch.save(self.model.state_dict(), self.folder / f"rank{self.process.rank}.pt")

SupervisedTrainer.train_step = outer
SupervisedTrainer.train = train
run_semisup(SemisupConfig(**from_dict(SemisupConfig, values)))
"""


def values(output: Path, **changes: Any) -> dict[str, Any]:
    """Six steps: 24 images, half of them labelled, batches of 6, three epochs."""
    return {
        "output": str(output),
        "labeled": [0.5],
        "subset": "balanced",
        "epochs": 3,
        "batch_size": 6,
        "lr": 0.05,
        "lr_milestones": [2],
        "workers": 0,
        "log_every": 1,
        "keep_checkpoint": True,
        "device": "cpu",
        **changes,
    }


def config(output: Path, **changes: Any) -> SemisupConfig:
    return SemisupConfig(**from_dict(SemisupConfig, values(output, **changes)))


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def final_state(output: Path) -> dict[str, torch.Tensor]:
    file = only(output, "pretrained-*/last.pt")
    return torch.load(file, weights_only=True)["model"]


def spawn(tiny_source: str, arguments: dict[str, Any], world_size: int = 1) -> list[int]:
    """Runs the task in other interpreters; their exit codes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = []
    for rank in range(world_size):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        described = {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env = {**os.environ, **(described if world_size > 1 else {})}
        command = [sys.executable, "-c", tiny_source + WORKER, json.dumps(arguments)]
        children.append(subprocess.Popen(command, env=env))
    return [child.wait(300) for child in children]


@pytest.mark.slow
def test_sigkill_in_mid_run_and_the_same_command_is_exact(
    tiny_source: str, tiny_network: Path, tmp_path: Path
) -> None:
    run_semisup(config(tmp_path / "whole"))
    arguments = values(tmp_path / "killed", save_minutes=0.0)
    assert spawn(tiny_source, {**arguments, "killed_after": 3}) == [-signal.SIGKILL]
    # Step 3 was done and not yet saved: the run goes on from step 2, in mid-epoch 1 of 2 steps.
    partial = torch.load(only(tmp_path / "killed", "*/last.pt"), weights_only=True)
    assert partial["step"] == 2
    rows = run_semisup(config(tmp_path / "killed", save_minutes=0.0))
    whole, resumed = final_state(tmp_path / "whole"), final_state(tmp_path / "killed")
    assert whole.keys() == resumed.keys()
    for name in whole:
        assert torch.equal(whole[name], resumed[name]), name
    metrics = [read_jsonl(only(tmp_path / d, "*/metrics.jsonl")) for d in ("whole", "killed")]
    assert metrics[0] == metrics[1]
    scores = [
        json.loads(only(tmp_path / d, "*/result.json").read_text()) for d in ("whole", "killed")
    ]
    assert scores[0] == scores[1]
    assert rows[0].value == scores[0]["top1"]


@pytest.mark.slow
def test_two_processes_train_like_one(tiny_source: str, tiny_network: Path, tmp_path: Path) -> None:
    """With 12 images in batches of 6 and 5, whose shares differ between the processes."""
    arguments = values(tmp_path / "two", batch_size=5)
    assert spawn(tiny_source, arguments, world_size=2) == [0, 0]
    run_semisup(config(tmp_path / "one", batch_size=5))
    one, two = (
        [r["loss"] for r in read_jsonl(only(tmp_path / d, "*/metrics.jsonl")) if "loss" in r]
        for d in ("one", "two")
    )
    assert len(one) == 9
    assert one == pytest.approx(two, abs=1e-5)
    assert len(set(one)) == 9
    left, right = final_state(tmp_path / "one"), final_state(tmp_path / "two")
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=1e-5, rtol=0)
    rows = summarize(read_results())
    assert [(measured.count, row.metric) for row, measured in rows] == [(1, "top1"), (1, "top5")]


@pytest.mark.slow
def test_batch_norm_is_evaluated_as_it_is_saved(image_tree: Path, tmp_path: Path) -> None:
    """ResNet-18 in two processes, each of which evaluates a part of the images."""
    payload = {
        **backbone_payload(Embedding(build_backbone("resnet18"), 4)),
        "input": InputSpec(size=32).to_dict(),
        "pretraining": {"config": {"data": str(image_tree)}, "dataset": image_tree.name},
    }
    save_checkpoint(tmp_path / "resnet18" / "backbone.pt", "backbone", payload)
    arguments = values(tmp_path / "two", epochs=1, weights=str(tmp_path / "resnet18"))
    assert spawn("", arguments, world_size=2) == [0, 0]
    saved = final_state(tmp_path / "two")
    assert int(saved["backbone.trunk.bn1.num_batches_tracked"]) == 2
    for rank in range(2):
        file = only(tmp_path / "two", f"pretrained-*/rank{rank}.pt")
        evaluated = torch.load(file, weights_only=True)
        assert evaluated.keys() == saved.keys()
        for name, value in saved.items():
            assert torch.equal(evaluated[name], value), name


def test_no_validation_image_is_opened_before_training_has_ended(
    tiny_network: Path,
    tmp_path: Path,
    guard_validation: Callable[[int], tuple[list[int], list[str]]],
) -> None:
    """A loader that fails if they are; with a sweep, which must not choose on them either."""
    trained, opened = guard_validation(3)
    sweep = {"sweep": True, "sweep_lr": [0.05, 1e-6], "sweep_head_lr_scale": [1.0]}
    rows = run_semisup(config(tmp_path / "run", held_out=0.25, **sweep))
    # Two trials of the sweep: 9 images, 3 held out; the last on all 12, then the 6 of val.
    assert trained == [6, 6, 6]
    assert opened.count("val") == 6
    assert opened[-6:] == ["val"] * 6
    assert [each["lr"] for each in rows[0].details["sweep"]] == [0.05, 1e-6]
    assert rows[0].details["lr"] in (0.05, 1e-6)
    assert "sweep" in rows[0].protocol


def test_the_sweep_takes_the_best_on_held_out_labels(tiny_network: Path, tmp_path: Path) -> None:
    sweep = {"sweep": True, "sweep_lr": [1e-7, 0.1], "sweep_head_lr_scale": [1.0, 10.0]}
    rows = run_semisup(config(tmp_path / "run", epochs=6, lr_milestones=[], **sweep))
    tried = rows[0].details["sweep"]
    best = max(tried, key=lambda each: (each["top1"], each["top5"]))
    assert len(tried) == 4
    assert (rows[0].details["lr"], rows[0].details["head_lr_scale"]) == (
        best["lr"],
        best["head_lr_scale"],
    )
    assert len(list((tmp_path / "run").glob("sweep-*/result.json"))) == 4


def test_rows_trials_and_a_second_call(tiny_network: Path, tmp_path: Path) -> None:
    run = config(tmp_path / "run", labeled=[0.25, 0.5], init=["pretrained", "scratch"], trials=2)
    rows = run_semisup(run)
    assert len(rows) == 2 * 2 * 2 * 2
    assert read_results() == rows
    for row in rows:
        text = Path(row.details["labels_file"]).read_text()
        assert len(text.splitlines()) == row.details["num_labeled"]
        assert row.details["num_labeled"] in (6, 12)
        assert row.task == "semisup"
        assert f"labeled={row.details['fraction']} subset=balanced" in row.protocol
        assert "lr=0.05" in row.protocol  # not the paper's, so it is named
    assert {row.weights for row in rows} == {"tiny", "scratch"}
    assert {row.seed for row in rows} == {0, 1}
    # Another seed, other labels; another start, the same labels.
    hashes = {
        (r.weights, r.seed, r.details["num_labeled"]): r.details["labels_sha256"] for r in rows
    }
    assert hashes["tiny", 0, 6] == hashes["scratch", 0, 6]
    assert len(set(hashes.values())) == 4
    assert [measured.count for _, measured in summarize(rows)] == [2] * 8
    # Again: nothing is trained, nothing is written twice.
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("result.json")}
    again = run_semisup(run)
    assert [row.value for row in again] == [row.value for row in rows]
    assert len(read_results()) == len(rows)
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "run").rglob("result.json")} == before
    # Another setting is another measurement, and is not mistaken for the first.
    run_semisup(config(tmp_path / "run", lr=0.01))
    assert len(read_results()) == len(rows) + 2
    run_semisup(config(tmp_path / "run", lr=0.01, overwrite=True))
    assert len(read_results()) == len(rows) + 4
    for ending, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        assert (tmp_path / "run" / f"curve{ending}").read_bytes().startswith(magic)


def test_a_list_file_decides_the_labels(tiny_network: Path, tmp_path: Path) -> None:
    names = [f"class{label}/{number}.png" for label in range(3) for number in (1, 5, 7)]
    (tmp_path / "nine.txt").write_text("\n".join(names))
    rows = run_semisup(
        config(tmp_path / "run", labeled=[], label_lists=[str(tmp_path / "nine.txt")])
    )
    assert Path(rows[0].details["labels_file"]).read_text().splitlines() == names
    assert rows[0].details["fraction"] == 9 / 24
    assert "subset=list" in rows[0].protocol


def test_more_labels_than_a_batch_and_fewer(tiny_network: Path, tmp_path: Path) -> None:
    run_semisup(config(tmp_path / "run", batch_size=256, epochs=2))
    rows = read_jsonl(only(tmp_path / "run", "*/metrics.jsonl"))
    assert [row["step"] for row in rows if "loss" in row] == [1, 2]


def test_bfloat16_on_a_cpu_is_refused_where_its_gradients_are_wrong(
    image_tree: Path, tmp_path: Path
) -> None:
    payload = {**backbone_payload(build_backbone("resnet18")), "pretraining": {}}
    file = tmp_path / "backbone.pt"
    save_checkpoint(file, "backbone", {**payload, "input": InputSpec(size=16).to_dict()})
    with pytest.raises(UserError, match="single pixel of 16-pixel images"):
        run_semisup(config(tmp_path / "run", weights=str(file), data=str(image_tree), amp="bf16"))
    assert not any((tmp_path / "run").glob("pretrained-*"))

"""The README's commands as a new user types them, on the embedded images. Minutes: marked slow."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

WRITTEN = ("config.json", "log.txt", "metrics.jsonl", "last.pt", "backbone.pt")


def run(cwd: Path, repo: Path, command: str) -> str:
    """Runs `python script flags` from another folder, with every core, as a user would."""
    script, *flags = shlex.split(command)[1:]
    env = {k: v for k, v in os.environ.items() if k not in ("INSTDISC_RUNS", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, str(repo / script), *flags],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("a new user's folder")


def test_the_first_command_verbatim_then_export(home: Path, repo: Path) -> None:
    said = run(home, repo, "python pretrain/run.py --arch resnet50")
    assert "DEMO DATA" in said
    folder = home / "runs" / "pretrain" / "resnet50"
    for name in WRITTEN:
        assert (folder / name).stat().st_size > 0, name
    assert json.loads((folder / "config.json").read_text())["data"] == "demo"
    trained, untrained = re.findall(r"recomputed (\d+\.\d+)% \(untrained (\d+\.\d+)\)", said)[-1]
    assert float(trained) > float(untrained), "what a newcomer sees first has learnt nothing"
    again = run(home, repo, "python pretrain/run.py --arch resnet50")
    assert "nothing to do" in again
    said = run(home, repo, "python pretrain/export.py")
    for target in ("timm", "detectron2", "torchvision"):
        assert f"{target}: " in said
    assert (folder / "export" / "report.json").exists()


def test_the_second_command_verbatim(home: Path, repo: Path) -> None:
    said = run(home, repo, "python transfer/semisup.py --labeled 0.01")
    assert "DEMO DATA" in said
    rows = results(home, "semisup")
    assert {row["metric"] for row in rows} >= {"top1", "top5"}
    assert {row["weights"] for row in rows} == {"resnet50", "scratch"}
    assert {row["dataset"] for row in rows} == {"demo"}


def test_the_third_command_verbatim(home: Path, repo: Path) -> None:
    said = run(home, repo, "python transfer/detect.py --cfg detection_configs/faster_r50.yaml")
    assert "DEMO DATA" in said
    count = re.search(r"(\d+) of (\d+) tensors of resnet50 arrived", said)
    assert count is not None
    assert count[1] == count[2]
    assert re.search(r"mAP \d+\.\d+ \(demo\)", said)
    assert "from scratch: not measured yet" in said
    rows = results(home, "detect")
    assert {row["dataset"] for row in rows} == {"demo"}
    assert 0 <= rows[0]["value"] <= 100
    folder = home / "runs" / "detect" / "faster_r50-ours" / "trial-0"
    assert len(list((folder / "pictures").glob("*.png"))) == 8


def results(home: Path, task: str) -> list[dict[str, Any]]:
    rows = map(json.loads, (home / "runs" / "results.jsonl").open())
    return [row for row in rows if row["task"] == task]


@pytest.mark.parametrize("arch", ["alexnet", "vgg16", "resnet18"])
def test_the_other_networks_train_on_the_demo_images(home: Path, repo: Path, arch: str) -> None:
    said = run(home, repo, f"python pretrain/run.py --arch {arch} --epochs 1 --save-minutes 60")
    assert "kNN bank" in said
    for name in WRITTEN:
        assert (home / "runs" / "pretrain" / arch / name).stat().st_size > 0, name
    losses = [
        row["loss"]
        for row in map(json.loads, (home / "runs" / "pretrain" / arch / "metrics.jsonl").open())
        if "loss" in row
    ]
    assert max(losses) < 30, "diverged"


@pytest.mark.parametrize(
    ("config", "arch"),
    [("fast_alexnet", "alexnet"), ("fast_vgg16", "vgg16"), ("faster_r18", "resnet18")],
)
def test_the_other_detectors_run_the_same_way(
    home: Path, repo: Path, config: str, arch: str
) -> None:
    flags = "--pictures 1 SOLVER.MAX_ITER 2"
    said = run(home, repo, f"python transfer/detect.py --cfg {config} {flags}")
    assert f"tensors of {arch} arrived" in said
    assert "(demo)" in said


BENCHMARKS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda script: script.stem)
def test_every_benchmark_measures_and_writes(tmp_path: Path, repo: Path, script: Path) -> None:
    said = run(tmp_path, repo, f"python benchmarks/{script.name} --quick --output found.json")
    assert "written to found.json" in said
    assert "ratio" in said or "%" in said
    assert json.loads((tmp_path / "found.json").read_text())["provenance"]

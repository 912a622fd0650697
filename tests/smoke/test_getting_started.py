"""docs/getting-started.md followed to the end in a fresh folder; only sizes are smaller. Slow."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

from instdisc.images import demo

pytestmark = pytest.mark.slow
SIZES = {  # what the page says -> what is done here
    "--image-size 64 --epochs 100": "--image-size 32 --epochs 2 --monitor-every 1",
    "--labeled 0.5 1": "--labeled 0.5 1 -j 0 --extra 'semisup --epochs 1' 'linear --epochs 1'",
    "'linear --epochs 1' --extra": "'linear --epochs 1'",  # the page's own; the last --extra counts
    "resnet50 --data labelled/": "resnet18 --data labelled/",
    "faster_r50": "faster_r18 --pictures 1",
    "VOCdevkit": "VOCdevkit SOLVER.MAX_ITER 2 INPUT.MIN_SIZE_TEST 64 INPUT.MIN_SIZE_TRAIN (64,)",
    "/data/imagenet": "labelled/",
    "--cluster local": "--dry-run --cluster local",
    "python slurm/submit.py --nodes 2 --gpus 8": "python slurm/submit.py --dry-run --gpus 8",
}
RECORDER = """
import json
class init:  # of wandb; of mlflow the function below
    def __init__(self, **settings): pass
    def log(self, row, step): log_metrics(row, step)
def log_metrics(row, step):
    with open("logged.jsonl", "a") as file: file.write(json.dumps([step, row]) + "\\n")
"""


def read_page(repo: Path, heading: str) -> list[str]:
    """The commands below a heading; of a command's comment nothing is left."""
    text = (repo / "docs/getting-started.md").read_text("utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```\n(.*?)^```$", section, flags=re.M | re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line.partition("  #")[0].strip() for line in lines if line.startswith("python ")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos, a few labelled ones, a checkpoint, a devkit and CIFAR's name."""
    home = tmp_path_factory.mktemp("a new user's folder")
    tree = demo.write_classification(home / "made", train_per_class=8, val_per_class=4)
    (home / "photos" / "more").mkdir(parents=True)
    for path in (tree / "train").glob("*/*"):
        Image.open(path).convert("RGB").save(home / "photos" / "more" / f"{path.stem}.jpg")
    shutil.copy(next((home / "photos" / "more").iterdir()), home / "photos" / "one.jpg")
    for split in ("train", "val"):
        for folder in sorted((tree / split).iterdir())[:3]:
            shutil.copytree(folder, home / "labelled" / split / folder.name)
    devkit = demo.write_detection(home / "made", num_trainval=8, num_test=4)
    devkit.rename(home / "VOCdevkit")
    torch.manual_seed(0)
    network = timm.create_model("resnet18", num_classes=0)
    state = {f"module.encoder_q.{name}": value for name, value in network.state_dict().items()}
    torch.save({"arch": "resnet18", "epoch": 1, "state_dict": state}, home / "their.pth")
    (home / "cifar-10-batches-bin").mkdir()
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        (home / "cifar-10-batches-bin" / f"{name}.bin").write_bytes(bytes(3073 * 10))
    return home


def follow(home: Path, repo: Path, command: str) -> str:
    """Runs a command of the page in the user's folder."""
    for given, smaller in SIZES.items():
        command = command.replace(given, smaller)
    script, *flags = shlex.split(command)[1:]
    words = [script, *flags] if script == "-c" else [str(repo / script), *flags]
    env = {k: v for k, v in os.environ.items() if k != "INSTDISC_RUNS"} | {"PYTHONPATH": "fakes"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=home,
        env=env,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def test_images_without_labels(home: Path, repo: Path) -> None:
    commands = read_page(repo, "I have images without labels")
    assert len(commands) == 5
    said = [follow(home, repo, command) for command in commands]
    assert "RankMe" in said[0]
    assert "(the query itself)" in said[1]
    assert (home / "runs/retrieve/resnet18/query.html").exists()
    assert {path.name for path in (home / "runs/embed/resnet18").glob("photos-*")} == {
        "photos-backbone.npy",
        "photos-backbone.csv",
    }
    folder = home / "runs/pretrain/resnet18/export/timm"
    assert (folder / "README.md").exists()
    assert timm.create_model(f"local-dir:{folder}", pretrained=True).num_features == 512
    assert "6 parts, 0 left out, 0 failed" in said[4]
    assert (home / "runs/report/report.html").exists()


def test_a_checkpoint(home: Path, repo: Path) -> None:
    commands = read_page(repo, "I have a checkpoint")
    assert len(commands) == 5
    said = [follow(home, repo, command) for command in commands]
    assert "module.encoder_q.: 120 tensors" in said[0]
    assert (home / "runs/pretrain/theirs/backbone.pt").exists()
    assert "6 parts, 0 left out, 0 failed" in said[2]
    assert "theirs" in said[3]
    assert re.search(r"mAP \d+\.\d+, VOC07 11-point", said[4])


def test_a_cluster_and_what_would_be_submitted(home: Path, repo: Path) -> None:
    (home / "slurm.toml").write_text('partition = "gpu"\ntime = "24h"\n')
    commands = read_page(repo, "I have a cluster")
    assert len(commands) == 5
    said = [follow(home, repo, command) for command in commands if "status.py" not in command]
    for text in said[:2]:
        assert "#SBATCH --partition=gpu" in text
        assert "#SBATCH --gpus-per-node=8" in text
        assert "#SBATCH --time=1440" in text
    assert "study table2: 15 jobs" in said[2]
    assert "study table1: 41 jobs" in said[3]


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_metrics_for_another_tracker(home: Path, repo: Path, package: str) -> None:
    """The lines were tried with the packages; here a recorder takes their place."""
    (command,) = [c for c in read_page(repo, "Watching a run") if package in c]
    (home / "fakes").mkdir(exist_ok=True)
    (home / "fakes" / f"{package}.py").write_text(RECORDER)
    (home / "logged.jsonl").unlink(missing_ok=True)
    follow(home, repo, command)
    logged = [json.loads(line) for line in (home / "logged.jsonl").open()]
    rows = [json.loads(line) for line in (home / "runs/pretrain/resnet18/metrics.jsonl").open()]
    assert [step for step, _ in logged] == [row["step"] for row in rows]
    assert [r.get("loss") for _, r in logged] == [row.get("loss") for row in rows]
    assert any("rankme" in row for _, row in logged)

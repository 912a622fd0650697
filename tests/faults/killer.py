"""Kills a command at random moments, starts it again, compares it with an undisturbed run.

    python tests/faults/killer.py pretrain --kills 20

Children are forked from this process, which has imported everything: a start costs little. A child
is killed (SIGKILL) either some time after its start, or at one of its operations on files: when
it opens a file for writing, renames, links or removes one. After each kill all files that the child
left must be whole. The last line of output is JSON: what was done, how often.
"""

import argparse
import json
import os
import random
import re
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from instdisc.cli import from_dict
from instdisc.images.demo import write_detection
from instdisc.images.transforms import InputSpec
from instdisc.networks import backbones
from instdisc.networks.backbones import Embedding, backbone_payload, build_backbone
from instdisc.runs import folders
from instdisc.runs.checkpoint import load_file, save_checkpoint
from instdisc.runs.results import Result, append_results, check_results
from instdisc.training.seed import seeded

WRITES = os.O_WRONLY | os.O_RDWR
CHANGES = {"os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"}
Run = Callable[[Path], None]
Facts = Callable[[Path], dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """A command: what to run on a folder, and what of the folder must come out the same."""

    run: Run
    facts: Facts
    num_kills: int


def tiny(stem: str, batch_norm: bool) -> nn.Module:
    """A network of milliseconds."""

    def stage(width: int, stride: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, 8, 3, stride), nn.BatchNorm2d(8), nn.ReLU())

    stages = [stage(3, 2), *(stage(8, 1) for _ in range(4))]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def write_images(root: Path) -> Path:
    """24 training and 6 validation images of three classes."""
    for split, count in (("train", 8), ("val", 2)):
        for label in range(3):
            folder = root / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.random.default_rng([label, number]).integers(0, 56, (24, 24, 3))
                colour = np.random.default_rng(label).integers(0, 200, 3)
                image = Image.fromarray((pixels + colour).astype(np.uint8))
                image.save(folder / f"{number}.png")
    return root


def write_backbone(path: Path, arch: str, data: Path, size: int) -> Path:
    """A checkpoint as pretraining leaves it."""
    with seeded(0, "backbone"):
        model = Embedding(build_backbone(arch), 8)
    payload = {
        **backbone_payload(model),
        "input": InputSpec(size=size).to_dict(),
        "pretraining": {"config": {"data": str(data)}, "dataset": "images"},
    }
    save_checkpoint(path, "backbone", payload)
    return path


def tensors(state: Any, path: str = "") -> dict[str, Any]:
    """All tensors of a checkpoint as bytes."""
    if isinstance(state, Tensor):
        return {path: state.contiguous().numpy().tobytes()}
    if not isinstance(state, dict | list | tuple):
        return {}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return {k: v for name, each in items for k, v in tensors(each, f"{path}/{name}").items()}


def rows_of(folder: Path) -> dict[str, Any]:
    """What the results say; a row may be there twice if a run died after writing it."""
    rows, problems = check_results(folder / "runs" / "results.jsonl")
    assert not problems, problems
    return {f"{r.task} {r.protocol} {r.metric} {r.seed}": r.value for r in rows}


def losses_of(file: Path) -> list[Any]:
    """Losses by step."""
    return [
        (row["step"], row.get("loss"), row.get("epoch_loss")) for row in folders.read_jsonl(file)
    ]


def pretraining(root: Path) -> Task:
    """Twelve steps, each saved."""
    from pretrain.config import PretrainConfig
    from pretrain.trainer import pretrain

    data = write_images(root / "images")
    values = {
        "arch": "tiny", "data": str(data), "image_size": 24, "batch_size": 6, "epochs": 3,
        "lr_milestones": (2,), "num_negatives": 5, "num_neighbors": 4, "workers": 0,
        "embedding_dim": 8, "log_every": 1, "monitor_every": 2, "tensorboard": False,
        "device": "cpu", "save_minutes": 0.0, "bank_momentum": 0.5,
    }  # fmt: skip

    def facts(folder: Path) -> dict[str, Any]:
        names = ("last.pt", "backbone.pt")
        found = {name: tensors(load_file(folder / "run" / name)) for name in names}
        return {**found, "losses": losses_of(folder / "run" / "metrics.jsonl")}

    def run(folder: Path) -> None:
        pretrain(PretrainConfig(**values, output=folder / "run"))  # type: ignore[arg-type]

    return Task(run, facts, 22)


def semisup(root: Path) -> Task:
    """Two initialisations of six steps, each saved."""
    from transfer.finetuning.semisup import run_semisup
    from transfer.finetuning.settings import SemisupConfig

    data = write_images(root / "images")
    weights = write_backbone(root / "weights" / "backbone.pt", "tiny", data, 24)
    values = {
        "weights": str(weights), "labeled": [0.5], "subset": "balanced", "epochs": 3,
        "batch_size": 6, "lr": 0.05, "lr_milestones": [2], "workers": 0, "log_every": 1,
        "keep_checkpoint": True, "device": "cpu", "save_minutes": 0.0,
        "init": ["pretrained", "scratch"],
    }  # fmt: skip

    def facts(folder: Path) -> dict[str, Any]:
        found: dict[str, Any] = {"rows": rows_of(folder)}
        for file in sorted((folder / "run").glob("*-*/*")):
            name = f"{file.parent.name}/{file.name}"
            if file.name in ("last.pt", "last.previous.pt"):
                found[name] = tensors(load_file(file)) if file.name == "last.pt" else None
            elif file.name in ("result.json", "labels.txt"):
                found[name] = file.read_text()
        return {name: value for name, value in found.items() if value is not None}

    def run(folder: Path) -> None:
        given = {**values, "output": str(folder / "run")}
        run_semisup(SemisupConfig(**from_dict(SemisupConfig, given)))

    return Task(run, facts, 18)


def linear(root: Path) -> Task:
    """Features of three stages, then probes, each step saved."""
    from transfer.probing.linear import run_linear
    from transfer.probing.settings import LinearConfig

    data = write_images(root / "images")
    weights = write_backbone(root / "weights" / "backbone.pt", "tiny", data, 24)
    values = {
        "weights": str(weights), "stage": ["conv1", "conv5"], "cost": [0.1, 10.0],
        "held_out": 0.25, "batch_size": 8, "epochs": 3, "precision": "float32", "workers": 0,
        "device": "cpu", "save_minutes": 0.0,
    }  # fmt: skip

    def run(folder: Path) -> None:
        given = {**values, "output": str(folder / "run")}
        run_linear(LinearConfig(**from_dict(LinearConfig, given)))

    return Task(run, lambda folder: {"rows": rows_of(folder)}, 18)


def features(root: Path) -> Task:
    """transfer/knn.py: features of both splits into the store, then the vote."""
    from transfer.nearest.knn import run_knn
    from transfer.nearest.settings import KnnConfig

    data = write_images(root / "images")
    weights = write_backbone(root / "weights" / "backbone.pt", "tiny", data, 24)
    values = {
        "weights": str(weights), "features": ["embedding", "conv3"], "num_neighbors": [3, 5],
        "batch_size": 4, "workers": 0, "device": "cpu",
    }  # fmt: skip

    def facts(folder: Path) -> dict[str, Any]:
        stored = {p.name: p.read_bytes() for p in folder.rglob("*.npy")}
        return {"rows": rows_of(folder), **stored}

    def run(folder: Path) -> None:
        run_knn(KnnConfig(**from_dict(KnnConfig, {**values, "output": str(folder / "run")})))

    return Task(run, facts, 16)


def proposals(root: Path) -> Task:
    """Selective search over a few scenes."""
    from transfer.detection.proposals import make_proposals
    from transfer.detection.voc import VocSplit

    split = VocSplit(write_detection(root / "voc", num_trainval=8, num_test=1), 2007, "trainval")

    def run(folder: Path) -> None:
        out = folder / "run" / "proposals.pkl"
        if not out.exists():
            make_proposals(split, out, progress=False)

    def facts(folder: Path) -> dict[str, Any]:
        return {"file": (folder / "run" / "proposals.pkl").read_bytes()}

    return Task(run, facts, 12)


def detection(root: Path) -> Task:
    """A small Faster R-CNN, a checkpoint every other iteration."""
    from instdisc.training.dist import init_process
    from transfer.detection.settings import DetectConfig
    from transfer.detection.task import run_detect

    scenes = write_detection(root / "voc", num_trainval=4, num_test=2)
    weights = write_backbone(root / "weights" / "backbone.pt", "resnet18", root, 64)
    opts = (
        *("INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MIN_SIZE_TEST", "64"),
        *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", "8", "MODEL.RPN.POST_NMS_TOPK_TRAIN", "20"),
        *("MODEL.RPN.POST_NMS_TOPK_TEST", "5", "SOLVER.MAX_ITER", "4"),
        *("SOLVER.IMS_PER_BATCH", "2", "DATALOADER.NUM_WORKERS", "0"),
        *("MODEL.ANCHOR_GENERATOR.SIZES", "[[32,64]]", "SOLVER.STEPS", "(3,)"),
        *("MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION", "4", "SOLVER.CHECKPOINT_PERIOD", "1"),
    )

    def run(folder: Path) -> None:
        config = DetectConfig(
            cfg=Path("faster_r18"), weights=str(weights), voc_root=str(scenes), device="cpu",
            pictures=1, output=folder / "run", opts=opts,
        )  # fmt: skip
        run_detect(config, init_process("cpu"))

    def facts(folder: Path) -> dict[str, Any]:
        trial = folder / "run" / "trial-0"
        result = json.loads((trial / "result.json").read_text())
        model = tensors(load_file(trial / "model_final.pth")["model"])
        return {"rows": rows_of(folder), "model": model, "result": result}

    return Task(run, facts, 6)


def report(root: Path) -> Task:
    """A report over an older one: every file is of the one or of the other."""
    from transfer.reporting.report import write_report
    from transfer.reporting.settings import ReportConfig

    def row(task: str, value: float, seed: int) -> Result:
        protocol = "k=200 tau=0.07 embedding" if task == "knn" else "stage=conv5 solver=sgd"
        return Result(
            task=task, protocol=protocol, arch="resnet18", weights="run", weights_hash="w" * 64,
            dataset="imagenet", data_fingerprint="d" * 64, metric="top1", value=value, seed=seed,
            config_hash="c" * 64, details={}, provenance={},
        )  # fmt: skip

    older, newer = root / "older.jsonl", root / "newer.jsonl"
    append_results([row("knn", 40.0, 0)], older)
    append_results([row("knn", 41.0, 1), row("linear", 44.0, 0)], newer)

    def content(file: Path) -> bytes:
        return re.sub(rb"\d{4}-\d\d-\d\d \d\d:\d\d UTC", b"", file.read_bytes())

    def write(results: Path, output: Path) -> None:
        write_report(ReportConfig(results=results, output=output, figures=False))

    def files(folder: Path) -> dict[str, Any]:
        # The path of the rows is on the page, and both runs read the same file.
        paths = (p for p in folder.rglob("*") if p.is_file() and not p.name.startswith("."))
        return {str(p.relative_to(folder)): content(p) for p in paths}

    def run(folder: Path) -> None:
        if not (folder / "run" / "report.html").exists():
            write(older, folder / "run")
        write(newer, folder / "run")

    return Task(run, lambda folder: files(folder / "run"), 14)


TASKS: dict[str, Callable[[Path], Task]] = {
    "pretrain": pretraining,
    "semisup": semisup,
    "linear": linear,
    "features": features,
    "proposals": proposals,
    "detect": detection,
    "report": report,
}


def check_files(folder: Path) -> int:
    """Refuses any file that a killed run left half written; returns how many were looked at."""
    count = 0
    for file in folder.rglob("*"):
        if not file.is_file() or file.name.endswith(".tmp") or file.name.startswith(".lock"):
            continue
        count += 1
        if file.suffix in (".pt", ".pth"):
            load_file(file)
        elif file.suffix == ".json" and file.name != "metrics.json":
            json.loads(file.read_text("utf-8"))
        elif file.name == "metrics.jsonl":
            folders.read_jsonl(file)
        elif file.name == "report.html":
            assert file.read_bytes().rstrip().endswith(b"</html>"), file
    return count


class Child:
    """One start of a task, forked."""

    def __init__(self, task: Task, folder: Path, stop_at: int | None, exactly: bool) -> None:
        self.pipe, told = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(told)
            return
        os.close(self.pipe)
        code = 3
        try:
            log = os.open(folder / "child.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ["INSTDISC_RUNS"] = str(folder / "runs")
            count = watch_files(folder, told, stop_at, exactly)
            task.run(folder)
            os.write(told, f"{count()}\n".encode())
            code = 0
        except BaseException:  # the child must not go on as if it were the parent
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)

    def wait(self, seconds: float | None) -> str:
        """What the child says within so many seconds; empty if nothing, or if it has ended."""
        ready, _, _ = select.select([self.pipe], [], [], seconds)
        return os.read(self.pipe, 100).decode() if ready else ""

    def end(self, *, kill: bool) -> int:
        """Its exit code, or minus the signal."""
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


def watch_files(folder: Path, told: int, stop_at: int | None, exactly: bool) -> Callable[[], int]:
    """Counts what this process does to files below the folder; tells, or dies, at one of them."""
    root, count = str(folder), 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        writing = event == "open" and isinstance(args[2], int) and bool(args[2] & WRITES)
        if not (writing or event in CHANGES):
            return
        if not any(isinstance(each, str | Path) and str(each).startswith(root) for each in args):
            return
        count += 1
        if count == stop_at and exactly:
            os.kill(os.getpid(), signal.SIGKILL)
        elif count == stop_at:
            os.write(told, b"now\n")

    sys.addaudithook(hook)
    return lambda: count


def undisturbed(task: Task, folder: Path) -> tuple[int, float]:
    """A whole run: how often it changes files, and how long it takes."""
    folder.mkdir()
    started = time.monotonic()
    child = Child(task, folder, None, False)
    said = child.wait(None)
    code = child.end(kill=False)
    assert code == 0, (folder / "child.log").read_text()[-3000:]
    return int(said), time.monotonic() - started


def torment(task: Task, root: Path, num_kills: int, seed: int) -> dict[str, Any]:
    """Kills, starts again, compares; what was done."""
    num_events, seconds = undisturbed(task, root / "whole")
    wanted = task.facts(root / "whole")
    draw = random.Random(seed)
    kills = starts = finished = files = 0
    while not finished or kills < num_kills:
        folder = root / f"killed{finished}"
        folder.mkdir(exist_ok=True)
        starts += 1
        # The later half of a run is reached by runs that go on; each kind of moment gets its share.
        kind = draw.choice(("time", "exactly", "soon after")) if kills < num_kills else "never"
        stop_at = draw.randint(1, num_events) if kind in ("exactly", "soon after") else None
        child = Child(task, folder, stop_at, kind == "exactly")
        said = child.wait(draw.uniform(0, seconds) if kind == "time" else None)
        if kind == "soon after" and said == "now\n":
            time.sleep(draw.uniform(0, 0.02))
        code = child.end(kill=kind == "time" or said == "now\n")
        if code == -signal.SIGKILL:
            kills += 1
            files += check_files(folder)
            continue
        assert code == 0, f"start {starts}: {(folder / 'child.log').read_text()[-3000:]}"
        found = task.facts(folder)
        assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
        for name, value in wanted.items():
            assert found[name] == value, f"{name} differs after {kills} kills"
        left = [p for p in (folder / "run").rglob(".*") if p.name.startswith((".lock", ".last"))]
        assert not left, f"left behind: {left}"
        finished += 1
    return {"kills": kills, "starts": starts, "whole_runs": finished, "files_checked": files}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # It is a process of its own at each start, and no part of a result.
    folders.git_revision = lambda: None
    backbones.ARCHS["tiny"] = backbones.Arch(tiny, 8, (8,) * 5, ("0", "1", "2", "3", "4"))
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch).resolve()
        task = TASKS[args.task](root)
        kills = task.num_kills if args.kills is None else args.kills
        started = time.monotonic()
        done = torment(task, root, kills, args.seed)
        seconds = round(time.monotonic() - started, 1)
    sys.stdout.write(json.dumps({"task": args.task, **done, "seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()

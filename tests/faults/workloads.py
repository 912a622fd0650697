"""The commands as small as they can be, for tests that kill, stop or starve them.

`TASKS` has all of them. A new command needs a function that takes a folder for its input and gives
a `Task`, and a line in `TASKS`: kills, kills of ranks and the counts of docs/results follow.
"""

import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from instdisc.cli import from_dict
from instdisc.images.demo import write_detection, write_segmentation
from instdisc.images.transforms import InputSpec
from instdisc.networks import backbones
from instdisc.networks.backbones import Embedding, backbone_payload, build_backbone
from instdisc.runs import folders
from instdisc.runs.checkpoint import load_file, save_checkpoint
from instdisc.runs.results import Result, append_results, check_results
from instdisc.runs.row_files import load_all_rows
from instdisc.training.seed import seeded

Run = Callable[[Path], None]
Facts = Callable[[Path], dict[str, Any]]


def prepare() -> None:
    """What this process and its forks need before they make or run a task."""
    torch.set_num_threads(1)
    # It is a process of its own at each start, and no part of a result.
    folders.git_revision = lambda: None
    backbones.ARCHS["tiny"] = backbones.Arch(tiny, 8, (8,) * 5, ("0", "1", "2", "3", "4"))


@dataclass(frozen=True)
class Task:
    """A command: what to run on a folder, and what of the folder must come out the same."""

    run: Run
    facts: Facts


@dataclass(frozen=True)
class Workload:
    """How to make a task, what documents call it, and its part of a hundred kills."""

    title: str
    kills: int
    make: Callable[[Path], Task]


def tiny(stem: str, batch_norm: bool) -> nn.Module:
    """A network of milliseconds."""

    def stage(width: int, stride: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, 8, 3, stride), nn.BatchNorm2d(8), nn.ReLU())

    stages = [stage(3, 2), *(stage(8, 1) for _ in range(4))]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def write_images(root: Path) -> Path:
    """24 training and 6 validation images of three classes; those that are there stay."""
    if root.exists():
        return root
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
    """A checkpoint as pretraining leaves it; one that is there stays."""
    if path.exists():
        return path
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
    """A digest of every tensor of a checkpoint: pytest would take hours to show unequal bytes."""
    if isinstance(state, Tensor):
        return {path: hashlib.sha256(state.contiguous().numpy().tobytes()).hexdigest()}
    if not isinstance(state, dict | list | tuple):
        return {}
    items = state.items() if isinstance(state, dict) else enumerate(state)
    return {k: v for name, each in items for k, v in tensors(each, f"{path}/{name}").items()}


def load_with_rows(file: Path) -> Any:
    """A checkpoint with the rows of its bank, wherever they are."""
    content = load_file(file)
    if "bank" in content:
        content["bank"] = load_all_rows(content["bank"], file)
    return content


def rows_of(folder: Path) -> dict[str, Any]:
    """What the results say; a row may be there twice if a run died after writing it."""
    rows, problems = check_results(folder / "runs" / "results.jsonl")
    assert not problems, problems
    return {f"{r.task} {r.protocol} {r.metric} {r.seed}": r.value for r in rows}


def command(execute: Callable[[Any], object], config_type: type[Any], **values: Any) -> Run:
    """A command with these values, in the folder `run`."""

    def run(folder: Path) -> None:
        given = {**values, "output": str(folder / "run")}
        execute(config_type(**from_dict(config_type, given)))

    return run


def only_rows(folder: Path) -> dict[str, Any]:
    """Of a command that leaves nothing but results."""
    return {"rows": rows_of(folder)}


def losses_of(file: Path) -> list[Any]:
    """Losses by step."""
    return [
        (row["step"], row.get("loss"), row.get("epoch_loss")) for row in folders.read_jsonl(file)
    ]


def pretraining(root: Path, **changes: Any) -> Task:
    """Twelve steps, each saved, with other values of some flags."""
    from pretrain.config import PretrainConfig
    from pretrain.trainer import pretrain

    data = write_images(root / "images")
    values = {
        "arch": "tiny", "data": str(data), "image_size": 24, "batch_size": 6, "epochs": 3,
        "lr_milestones": (2,), "num_negatives": 5, "num_neighbors": 4, "workers": 0,
        "embedding_dim": 8, "log_every": 1, "monitor_every": 2, "tensorboard": False,
        "device": "cpu", "save_minutes": 0.0, "bank_momentum": 0.5, **changes,
    }  # fmt: skip

    def facts(folder: Path) -> dict[str, Any]:
        files = [folder / "run" / name for name in ("last.pt", "backbone.pt")]
        found = {file.name: tensors(load_with_rows(file)) for file in files}
        return {**found, "losses": losses_of(folder / "run" / "metrics.jsonl")}

    def run(folder: Path) -> None:
        pretrain(PretrainConfig(**values, output=folder / "run"))  # type: ignore[arg-type]

    return Task(run, facts)


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

    return Task(command(run_semisup, SemisupConfig, **values), facts)


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

    return Task(command(run_linear, LinearConfig, **values), only_rows)


def voc_svm(root: Path) -> Task:
    """Features of two stages, then SVMs, full and low-shot; each finished stage is kept."""
    from transfer.probing.settings import VocSvmConfig
    from transfer.probing.voc_svm import run_voc_svm

    scenes = write_detection(root / "voc", num_trainval=30, num_test=12)
    weights = write_backbone(root / "weights" / "backbone.pt", "tiny", root, 24)
    values = {
        "weights": str(weights), "data": str(scenes), "stage": ["conv1", "conv5"],
        "cost": [0.1, 0.01], "low_shot": True, "shots": [1], "samples": 2, "batch_size": 8,
        "workers": 0, "device": "cpu",
    }  # fmt: skip

    return Task(command(run_voc_svm, VocSvmConfig, **values), only_rows)


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

    return Task(command(run_knn, KnnConfig, **values), facts)


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

    return Task(run, facts)


# Images of a few pixels, few regions, a checkpoint at each of four iterations.
SMALL_DETECTOR = (
    *("INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MIN_SIZE_TEST", "64"),
    *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", "8", "MODEL.RPN.POST_NMS_TOPK_TRAIN", "20"),
    *("MODEL.RPN.POST_NMS_TOPK_TEST", "5", "SOLVER.MAX_ITER", "4", "SOLVER.STEPS", "(3,)"),
    *("SOLVER.IMS_PER_BATCH", "2", "SOLVER.CHECKPOINT_PERIOD", "1"),
    *("DATALOADER.NUM_WORKERS", "0", "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION", "4"),
)


def detection(root: Path) -> Task:
    """A small Faster R-CNN on VOC."""
    scenes = write_detection(root / "voc", num_trainval=4, num_test=2)
    anchors = ("MODEL.ANCHOR_GENERATOR.SIZES", "[[32,64]]")
    return detector(root, "faster_r18", anchors, voc_root=str(scenes))


def segmentation(root: Path) -> Task:
    """A small Mask R-CNN on COCO."""
    scenes = write_segmentation(root / "coco", num_train=4, num_val=2)
    small = (
        *("MODEL.FPN.OUT_CHANNELS", "8", "MODEL.ROI_BOX_HEAD.FC_DIM", "8"),
        *("MODEL.ROI_MASK_HEAD.CONV_DIM", "8", "MODEL.ROI_MASK_HEAD.NUM_CONV", "1"),
        *("MODEL.ROI_MASK_HEAD.POOLER_RESOLUTION", "4"),
    )
    return detector(root, "coco/mask_r18_fpn", small, coco_root=str(scenes))


def detector(root: Path, cfg: str, opts: tuple[str, ...], **data: str) -> Task:
    """transfer/detect.py with a config as small as it can be."""
    from transfer.detection.settings import DetectConfig
    from transfer.detection.task import run_detect

    weights = write_backbone(root / "weights" / "backbone.pt", "resnet18", root, 64)

    def run(folder: Path) -> None:
        config = DetectConfig(
            cfg=Path(cfg), weights=str(weights), device="cpu", pictures=1, output=folder / "run",
            opts=(*SMALL_DETECTOR, *opts), **data,  # type: ignore[arg-type]
        )  # fmt: skip
        run_detect(config)

    def facts(folder: Path) -> dict[str, Any]:
        trial = folder / "run" / "trial-0"
        result = json.loads((trial / "result.json").read_text())
        model = tensors(load_file(trial / "model_final.pth")["model"])
        return {"rows": rows_of(folder), "model": model, "result": result}

    return Task(run, facts)


def result_row(task: str, value: float, seed: int) -> Result:
    """A number, as a command would write it."""
    protocol = "k=200 tau=0.07 embedding" if task == "knn" else "stage=conv5 solver=sgd"
    return Result(
        task=task, protocol=protocol, arch="resnet18", weights="run", weights_hash="w" * 64,
        dataset="imagenet", data_fingerprint="d" * 64, metric="top1", value=value, seed=seed,
        config_hash="c" * 64, details={}, provenance={},
    )  # fmt: skip


def report(root: Path) -> Task:
    """A report over an older one: every file is of the one or of the other."""
    from transfer.reporting.report import write_report
    from transfer.reporting.settings import ReportConfig

    older, newer = root / "older.jsonl", root / "newer.jsonl"
    append_results([result_row("knn", 40.0, 0)], older)
    append_results([result_row("knn", 41.0, 1), result_row("linear", 44.0, 0)], newer)

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

    return Task(run, lambda folder: files(folder / "run"))


def repair(root: Path) -> Task:
    """transfer/report.py --repair: damaged lines leave a file of results."""
    from transfer.reporting.report import run_report
    from transfer.reporting.settings import ReportConfig

    damaged = root / "damaged.jsonl"
    for seed in range(300):
        append_results([result_row("knn", 40.0, seed)], damaged)
        if seed % 30 == 0:
            with damaged.open("a") as file:
                file.write('{"task": "knn", "cut": 1')

    def run(folder: Path) -> None:
        results = folder / "runs" / "results.jsonl"
        if not results.exists():
            results.parent.mkdir(exist_ok=True)
            shutil.copy(damaged, results.with_suffix(".tmp"))
            results.with_suffix(".tmp").rename(results)
        run_report(ReportConfig(results=results, repair=True))

    def facts(folder: Path) -> dict[str, Any]:
        moved = (folder / "runs" / "results.jsonl.damaged").read_text().splitlines()
        return {"rows": rows_of(folder), "moved": set(moved)}

    return Task(run, facts)


def embed(root: Path) -> Task:
    """transfer/embed.py: features of all images, as a table and a list."""
    from transfer.nearest.embed import run_embed
    from transfer.nearest.settings import EmbedConfig

    data = write_images(root / "images")
    weights = write_backbone(root / "weights" / "backbone.pt", "tiny", data, 24)
    values = {"weights": str(weights), "batch_size": 4, "workers": 0, "device": "cpu"}

    def facts(folder: Path) -> dict[str, Any]:
        files = ("images-backbone.npy", "images-backbone.csv")
        return {name: (folder / "run" / name).read_bytes() for name in files}

    return Task(command(run_embed, EmbedConfig, **values), facts)


def retrieve(root: Path) -> Task:
    """transfer/retrieve.py: neighbours of the validation images, as numbers and a page."""
    from transfer.nearest.retrieve import run_retrieve
    from transfer.nearest.settings import RetrieveConfig

    data = write_images(root / "images")
    weights = write_backbone(root / "weights" / "backbone.pt", "tiny", data, 24)
    values = {
        "weights": str(weights), "num_neighbors": 3, "num_cases": 2, "batch_size": 4, "workers": 0,
        "device": "cpu",
    }  # fmt: skip

    def facts(folder: Path) -> dict[str, Any]:
        page = (folder / "run" / "retrieval.html").read_text("utf-8")
        return {"rows": rows_of(folder), "pictures": re.findall(r'src="data:[^"]*"', page)}

    return Task(command(run_retrieve, RetrieveConfig, **values), facts)


def fewshot(root: Path) -> Task:
    """transfer/fewshot.py: features of all images into the store, then episodes."""
    from transfer.nearest.fewshot import run_fewshot
    from transfer.nearest.settings import FewshotConfig

    data = write_images(root / "images")
    weights = write_backbone(root / "weights" / "backbone.pt", "tiny", data, 24)
    values = {
        "weights": str(weights), "ways": 2, "shots": [1, 3], "queries": 2, "episodes": 20,
        "split": "all", "batch_size": 4, "workers": 0, "device": "cpu",
    }  # fmt: skip

    return Task(command(run_fewshot, FewshotConfig, **values), only_rows)


def suite(root: Path) -> Task:
    """transfer/suite.py: two tasks, each a process, which outlives a suite that is killed."""
    from transfer.suites.settings import SuiteConfig
    from transfer.suites.suite import run_suite

    data = write_images(root / "images")
    weights = write_backbone(root / "weights" / "backbone.pt", "resnet18", data, 24)
    config = SuiteConfig(
        weights=(str(weights),), tasks=("linear", "knn"), data=str(data), workers=0, device="cpu",
        extra=("linear --stage backbone --epochs 1", "knn --k 3"), report=False,
    )  # fmt: skip

    def run(folder: Path) -> None:
        assert run_suite(config) == 0

    def facts(folder: Path) -> dict[str, Any]:
        records = (folder / "runs" / "suite").rglob("*.json")
        codes = {file.name: json.loads(file.read_text())["exit_code"] for file in records}
        return {"rows": rows_of(folder), "codes": codes}

    return Task(run, facts)


def arranged(root: Path) -> Task:
    """instdisc.images.arrange: class folders of links."""
    from instdisc.images.class_folders import arrange
    from instdisc.images.settings import ArrangeConfig

    flat, names = root / "flat", [f"ILSVRC2012_val_{number:08d}" for number in range(1, 201)]
    flat.mkdir()
    for name in names:
        (flat / f"{name}.JPEG").touch()
    rows = [f"{name},n{number % 20:08d} 1 2 3 4" for number, name in enumerate(names)]
    file = root / "val.csv"
    file.write_text("\n".join(["ImageId,PredictionString", *rows, ""]))

    def run(folder: Path) -> None:
        output = folder / "run"
        arrange(ArrangeConfig(layout="imagenet-val", images=flat, list=file, output=output))

    def facts(folder: Path) -> dict[str, Any]:
        links = (folder / "run").rglob("*.JPEG")
        return {str(link.relative_to(folder)): str(link.readlink()) for link in links}

    return Task(run, facts)


def imported(root: Path) -> Task:
    """pretrain/import_weights.py: a torchvision checkpoint as backbone.pt."""
    from torchvision.models import resnet18

    from instdisc.importers.api import run_import
    from instdisc.importers.settings import ImportConfig

    file = root / "resnet18.pth"
    with seeded(0, "peer"):
        torch.save(resnet18().state_dict(), file)

    def run(folder: Path) -> None:
        output = folder / "run" / "backbone.pt"
        run_import(ImportConfig(file=file, output=output, overwrite=True))

    return Task(run, lambda f: {"backbone": tensors(load_file(f / "run" / "backbone.pt"))})


def exported(root: Path) -> Task:
    """pretrain/export.py over an export that is there."""
    from instdisc.export.bundle import run_export
    from instdisc.export.settings import ExportConfig

    weights = write_backbone(root / "weights" / "backbone.pt", "resnet18", root, 32)

    def run(folder: Path) -> None:
        values = {"weights": weights, "to": ("torchvision",), "output": folder / "run"}
        run_export(ExportConfig(**values, overwrite=True))  # type: ignore[arg-type]

    def facts(folder: Path) -> dict[str, Any]:
        files = [p for p in (folder / "run").rglob("*") if p.is_file()]
        names = {str(p.relative_to(folder)): None for p in files}
        return names | {p.name: tensors(load_file(p)) for p in files if p.suffix == ".pth"}

    return Task(run, facts)


TASKS = {
    "pretrain": Workload("pretraining, saving in the background", 17, pretraining),
    "pretrain-sharded": Workload(
        "pretraining, rows of the bank in files of their own",
        7,
        functools.partial(pretraining, bank_placement="sharded"),
    ),
    "semisup": Workload("semisup", 12, semisup),
    "linear": Workload("linear", 12, linear),
    "voc_svm": Workload("VOC07 SVMs", 7, voc_svm),
    "features": Workload("kNN and its feature store", 9, features),
    "fewshot": Workload("fewshot", 4, fewshot),
    "embed": Workload("embed", 5, embed),
    "retrieve": Workload("retrieve", 3, retrieve),
    "proposals": Workload("proposals", 6, proposals),
    "detect": Workload("detection on VOC", 3, detection),
    "detect-coco": Workload("detection and masks on COCO", 2, segmentation),
    "suite": Workload("suite", 1, suite),
    "export": Workload("export", 2, exported),
    "import": Workload("import", 2, imported),
    "arrange": Workload("class folders of links", 2, arranged),
    "report": Workload("report", 4, report),
    "repair": Workload("repair of results", 2, repair),
}


def check_files(folder: Path) -> tuple[int, list[str]]:
    """Reads all files that a run left: how many there are, and those that are half written."""
    count, damaged = 0, []
    for file in folder.rglob("*"):
        if not file.is_file() or file.name.endswith(".tmp") or file.name.startswith(".lock"):
            continue
        count += 1
        try:
            if file.suffix in (".pt", ".pth"):
                load_with_rows(file)
            elif file.suffix == ".json" and file.name != "metrics.json":
                json.loads(file.read_text("utf-8"))
            elif file.name == "metrics.jsonl":
                folders.read_jsonl(file)
            elif file.suffix == ".html":
                assert file.read_bytes().rstrip().endswith(b"</html>")
        except Exception as error:  # whatever a reader says of it
            damaged.append(f"{file}: {type(error).__name__}: {error}")
    return count, damaged

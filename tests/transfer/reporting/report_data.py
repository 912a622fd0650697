"""Rows and run folders as the tasks write them, made up: the oracle of the report's tests."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from instdisc.runs.results import Result
from transfer.nearest.feature_map import FeatureMap, draw_sheet

FACTS: dict[str, Any] = {
    "arch": "resnet18", "objective": "nce", "num_negatives": 4096, "epochs": 200, "epoch": 200.0,
    "dataset": "imagenet", "data_fingerprint": "f" * 64, "train_fraction": 1.0,
    "embedding_dim": 128, "temperature": 0.07, "proximal_weight": 0.0, "bank_momentum": 0.0,
    "negatives": "per-image", "lr": 0.03, "image_size": 224, "stem": "imagenet",
    "batch_size": 256, "seed": 0,
}  # fmt: skip
SIZES = {"imagenet": (1_281_167, 1000), "places205": (2_448_873, 205), "cifar10": (50_000, 10)}
KNN = "k=200 tau=0.07 embedding"
VOC07 = "voc07-trainval -> voc07-test"
VOC0712 = "voc07-trainval+voc12-trainval -> voc07-test"


def make_row(**changes: Any) -> Result:
    """A kNN row of ResNet-18 on ImageNet, but for the changes; `facts` are of its pretraining."""
    dataset = changes.get("dataset", "imagenet")
    facts = {**FACTS, "arch": changes.get("arch", "resnet18"), **changes.pop("facts", {})}
    count, classes = SIZES.get(dataset, (2000, 10))
    details = {
        "num_train": count, "num_classes": classes, "pretraining": facts,
        **changes.pop("details", {}),
    }  # fmt: skip
    values = {
        "task": "knn", "protocol": KNN, "arch": "resnet18", "weights": "run",
        "weights_hash": "w" * 64, "dataset": dataset, "data_fingerprint": dataset[:1] * 64,
        "metric": "top1", "value": 40.0, "seed": 0, "config_hash": "c" * 64, "details": details,
        "provenance": {}, **changes,
    }  # fmt: skip
    return Result(**values)


def table1_rows() -> list[Result]:
    """Six objectives, two seeds, kNN and linear SVM, at a small scale of CIFAR-10."""
    settings = [("parametric", 4096), ("nce", 1), ("nce", 10), ("nce", 512), ("nce", 4096)]
    rows = []
    for number, (objective, count) in enumerate([*settings, ("softmax", 4096)]):
        for seed in (0, 1):
            facts = {
                "objective": objective, "num_negatives": count, "seed": seed, "epochs": 20,
                "epoch": 20.0, "dataset": "cifar10", "train_fraction": 0.1, "temperature": 0.1,
                "batch_size": 128, "image_size": 32,
            }  # fmt: skip
            common: dict[str, Any] = {
                "facts": facts, "dataset": "cifar10", "weights": f"{objective}-{count}-s{seed}",
            }  # fmt: skip
            rows.append(make_row(value=30.0 + number + seed, **common))
            svm = "stage=embedding solver=sgd"
            rows.append(make_row(task="linear", protocol=svm, value=25.0 + number, **common))
    return rows


def study_rows() -> list[Result]:
    """Something of every table, of real data and of the demo."""
    rows = table1_rows()
    for arch, gain in (("resnet50", 5.0), ("alexnet", 0.0)):
        for stage in range(1, 6):
            protocol = f"stage=conv{stage} solver=sgd"
            for dataset in ("imagenet", "places205"):
                value = 10.0 + 6 * stage + gain
                rows.append(
                    make_row(
                        task="linear", protocol=protocol, arch=arch, value=value, dataset=dataset
                    )
                )
        rows.append(make_row(arch=arch, value=30.0 + gain))
    rows.append(make_row(arch="alexnet", weights="random:alexnet", value=3.1, facts={}))
    rows.append(make_row(weights="timm:resnet50.a1_in1k", arch="timm:resnet50.a1_in1k",
                         value=71.0, details={"pretraining": {}}))  # fmt: skip
    for dim in (32, 64, 128, 256):
        rows.append(make_row(facts={"embedding_dim": dim}, value=30.0 + dim / 32))
    for fraction in (0.01, 0.1):
        for init in ("run", "scratch"):
            curve = "subset=random recipe=paper"
            for seed in (0, 1):
                details = {"fraction": fraction, "num_labeled": round(1_281_167 * fraction),
                           "curve": curve}  # fmt: skip
                value = 40.0 * fraction**0.1 + (5 if init == "run" else 0) + seed
                rows.append(
                    make_row(
                        task="semisup",
                        protocol=f"labeled={fraction:.4g} {curve}",
                        weights=init,
                        metric="top5",
                        value=value,
                        seed=seed,
                        details=details,
                        arch="resnet50",
                    )
                )
    for weights, value in (("run", 63.0), ("scratch", 21.0), ("supervised:r50.pth", 74.5)):
        for metric in ("ap50_11point", "ap50_area", "ap", "ap75"):
            rows.append(
                make_row(
                    task="detect",
                    protocol=f"faster_r50, {VOC07}",
                    weights=weights,
                    metric=metric,
                    value=value,
                    arch="resnet50",
                    dataset=VOC07,
                    details={"iterations": 150000, "num_train": 5011, "num_test": 4952},
                )
            )
    both = {"iterations": 24000, "num_train": 16551, "num_test": 4952}
    rows.append(
        make_row(
            task="detect",
            protocol=f"faster_r50_syncbn, {VOC0712}",
            metric="ap50_area",
            value=79.0,
            arch="resnet50",
            dataset=VOC0712,
            details=both,
        )
    )
    rows.append(make_row(dataset="imagenette-mini", value=55.5))
    return rows + demo_rows()


def many_rows(networks: int = 200, columns: int = 15) -> list[Result]:
    """Many networks, each measured in many ways."""
    rows = []
    for number in range(networks):
        facts = {"lr": 0.001 * (number + 1)}
        for column in range(columns):
            protocol = f"k={column + 1} tau=0.07 conv{column % 5 + 1}"
            rows.append(
                make_row(
                    weights=f"run-{number}",
                    facts=facts,
                    task="knn" if column < 5 else "linear",
                    protocol=protocol if column < 5 else f"stage=conv5 solver=sgd c={column}",
                    value=20 + (7 * number + 3 * column) % 60 + number / 1000,
                    dataset=("imagenet", "places205", "other")[column % 3],
                )
            )
    return rows


def demo_rows() -> list[Result]:
    """What `make demo` leaves."""
    facts = {"dataset": "demo", "epochs": 4, "epoch": 4.0, "objective": "softmax"}
    common: dict[str, Any] = {"dataset": "demo", "facts": facts, "arch": "resnet50"}
    return [
        make_row(value=14.5, **common),
        make_row(metric="top5", value=66.6, **common),
        make_row(task="semisup", metric="top5", value=61.25, **common,
                 protocol="labeled=0.01 subset=balanced recipe=demo",
                 details={"fraction": 0.01, "num_labeled": 20, "curve": "demo"}),
        make_row(task="detect", metric="ap50_11point", value=9.87, **common,
                 protocol=f"faster_r50, {VOC07}"),
        make_row(task="retrieve", metric="precision_at_10", value=12.5, protocol="k=10 embedding",
                 details={"folder": "retrieve/demo"}, **common),
    ]  # fmt: skip


def write_runs(root: Path) -> None:
    """Pretrainings with and without the proximal term, a retrieval figure, detectors' curves."""
    for name, data, weight in (
        *(("real-off", "imagenet", 0.0), ("real-on", "imagenet", 1.0)),
        ("demo", "demo", 0.0),
    ):
        folder = root / "pretrain" / name
        folder.mkdir(parents=True)
        config = {**FACTS, "data": data, "proximal_weight": weight}
        (folder / "config.json").write_text(json.dumps(config))
        rows: list[dict[str, float]] = []
        for epoch in range(1, 21):
            loss = 10 / epoch**0.3 + weight / 4
            rows.append({"step": epoch * 2 - 1, "epoch": epoch - 0.5, "loss": loss + 0.1})
            end = {"step": epoch * 2, "epoch": float(epoch), "epoch_loss": loss}
            rows.append({**end, "knn_recomputed": 20.0 + epoch} if epoch % 5 == 0 else end)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, config in (("demo", {"data": "demo"}), ("real", {"data": "imagenet"})):
        folder = root / "retrieve" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
        Image.new("RGB", (1200, 500), "#c8d6e5").save(folder / "retrieval.png")
    for name, root_of_data in (("faster_r50-ours", "voc"), ("faster_r50-scratch", "voc")):
        folder = root / "detect" / name / "trial-0"
        folder.mkdir(parents=True)
        (folder.parent / "config.json").write_text(json.dumps({"voc_root": root_of_data}))
        fall = 0.3 if name.endswith("ours") else 0.8
        curves = {
            f"class {number}": {
                "recall": [i / 20 for i in range(20)],
                "precision": [1 - fall * i / 20 for i in range(20)],
            }
            for number in range(20)
        }
        curves["class 0"] = {"recall": [0.0, 0.0], "precision": [0.0, 0.0]}  # nothing to show
        (folder / "precision_recall.json").write_text(json.dumps(curves))
        (folder / "pictures").mkdir()
        for number in range(3):
            picture = Image.new("RGB", (600 + number, 200), "#e5d6c8")
            picture.save(folder / "pictures" / f"{number}.png")
    rng = np.random.default_rng(0)
    images = [Image.new("RGB", (20, 20), tuple(rng.integers(0, 255, 3))) for _ in range(60)]
    points, labels = rng.random((60, 2)), np.arange(60) % 12
    names = [f"kind {number}" for number in range(12)]
    FeatureMap("60 images", points, labels, names, draw_sheet(images)).save(
        root / "retrieve" / "real"
    )

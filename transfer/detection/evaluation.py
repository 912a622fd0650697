"""A detector over the test images: detections, AP by every definition, the files that keep them."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from torch import nn

from instdisc.runs.folders import write_json, write_text
from instdisc.runs.log import progress
from instdisc.training.dist import Process
from transfer.detection.average_precision import (
    Detections,
    Result,
    collect,
    evaluate,
    save_comp4,
)
from transfer.detection.data import VocData, build_test_loader, check_readable

Rows = list[tuple[str, list[int], list[float], list[list[float]]]]


@torch.no_grad()
def detect(
    model: nn.Module, cfg: CfgNode, data: VocData, process: Process
) -> dict[str, Detections]:
    """Detections of all test images by class; the other processes than the first get none."""
    model.eval()
    loader = build_test_loader(cfg, data, process.rank, process.world_size)
    rows: Rows = []
    for batch in progress(loader, title="testing", enabled=process.is_main):
        for image, output in zip(check_readable(batch), model(batch), strict=True):
            found = output["instances"].to("cpu")
            boxes = found.pred_boxes.tensor.tolist()
            rows.append(
                (image["image_id"], found.pred_classes.tolist(), found.scores.tolist(), boxes)
            )
    parts: list[Rows] = comm.gather(rows)
    place = {record["image_id"]: i for i, record in enumerate(data.test)}
    gathered = sorted((row for part in parts for row in part), key=lambda row: place[row[0]])
    return collect(gathered, data.class_names)


def measure(found: dict[str, Detections], data: VocData) -> tuple[dict[str, float], Result]:
    """Every AP in percent, and the 11-point result with its curves."""
    eleven = evaluate(found, data.test, data.class_names, method="11point")  # type: ignore[arg-type]
    area = evaluate(found, data.test, data.class_names, method="area")  # type: ignore[arg-type]
    values = {
        "ap50_11point": eleven.mean_ap(0.5),
        "ap50_area": area.mean_ap(0.5),
        "ap75": area.mean_ap(0.75),
        "ap": area.ap,
    }
    return {name: 100 * value for name, value in values.items()}, eleven


def _percent(value: float) -> float | None:
    return None if math.isnan(value) else 100 * value


def per_class(result: Result) -> dict[str, float | None]:
    """AP at IoU 0.5 of each class in percent; None where the test images have no such object."""
    return {name: _percent(value) for name, value in result.per_class(0.5).items()}


def save_evaluation(
    folder: Path, found: dict[str, Detections], values: dict[str, float], result: Result, split: str
) -> None:
    """Writes comp4 files, AP, curves and their figure, and a table in Markdown."""
    save_comp4(folder / "inference", split, found)
    write_json(folder / "inference" / "ap.json", {**values, "per_class": per_class(result)})
    curves = {
        name: {"recall": curve.recall.tolist(), "precision": curve.precision.tolist()}
        for name, curve in result.curves.items()
    }
    write_text(folder / "precision_recall.json", json.dumps(curves) + "\n")
    write_text(folder / "per_class.md", table(values, result))
    _draw_curves(folder / "precision_recall.png", result)


def table(values: dict[str, float], result: Result) -> str:
    """The paper's kind of table: AP of every class and their mean."""
    names = [*result.class_names, "mAP"]
    cells = [*per_class(result).values(), values["ap50_11point"]]
    shown = [" - " if cell is None else f"{cell:.1f}" for cell in cells]
    return (
        f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n| {' | '.join(shown)} |\n\n"
        f"VOC07 11-point AP at IoU 0.5, in percent. By area: AP50 {values['ap50_area']:.2f}, "
        f"AP75 {values['ap75']:.2f}, AP {values['ap']:.2f}.\n"
    )


def _draw_curves(path: Path, result: Result) -> None:
    # Heavy to import, and only the first process draws.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes: Any = figure.subplots()
    for name, curve in result.curves.items():
        value = result.per_class(0.5)[name]
        if not math.isnan(value):
            axes.plot(curve.recall, curve.precision, label=f"{name} {100 * value:.1f}", linewidth=1)
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
    axes.set_title("Precision and recall at IoU 0.5; 11-point AP beside each class")
    figure.legend(loc="outside right upper", fontsize="small", frameon=False)
    figure.savefig(path, dpi=120)

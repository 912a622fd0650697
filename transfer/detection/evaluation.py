"""A detector over the test images: detections, AP by every definition, files and pictures."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data.catalog import Metadata
from detectron2.data.detection_utils import convert_image_to_rgb, read_image
from detectron2.structures import Boxes, BoxMode, Instances
from detectron2.utils import comm
from detectron2.utils.visualizer import Visualizer
from PIL import Image
from pycocotools import mask as mask_tools
from torch import Tensor, nn

from instdisc.runs.folders import write_json, write_text
from instdisc.runs.log import progress
from instdisc.training.dist import Process
from transfer.detection.average_precision import collect, evaluate, save_comp4
from transfer.detection.coco import to_ground_truth
from transfer.detection.coco_ap import Found, Kind, score, to_results
from transfer.detection.data import DetectionData, build_test_loader, check_readable

# The metrics that describe a run: the paper's, or COCO's of boxes and masks.
HEADLINES = {"ap50_11point": "mAP", "ap_box": "box AP", "ap_mask": "mask AP"}
MIN_SCORE = 0.3  # of a detection that is drawn
SHORT_SIDE = 240  # small images are enlarged: labels have a fixed size
RESULTS = "coco_instances_results.json"  # Detectron2's own name
# AP, AP50 and AP75 by each definition.
LINES = {
    "VOC07 11-point, as Detectron2 prints them": ("ap_11point", "ap50_11point", "ap75_11point"),
    "VOC, by area": ("ap", "ap50_area", "ap75"),
    "boxes": ("ap_box", "ap50_box", "ap75_box"),
    "masks": ("ap_mask", "ap50_mask", "ap75_mask"),
}


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What was measured.

    Attributes:
        values: metrics in percent, the one to name first at the beginning.
        per_class: the AP of each class in percent; None where the images have no such object.
        curves: class -> recall and precision at IoU 0.5.
        what: what `per_class` holds.
    """

    values: dict[str, float]
    per_class: dict[str, float | None]
    curves: dict[str, tuple[list[float], list[float]]]
    what: str


@torch.no_grad()
def detect(model: nn.Module, cfg: CfgNode, data: DetectionData, process: Process) -> list[Found]:
    """Detections of all test images, in their order; other processes than the first get none."""
    model.eval()
    loader = build_test_loader(cfg, data, process.rank, process.world_size)
    rows: list[Found] = []
    for batch in progress(loader, title="testing", enabled=process.is_main):
        for image, output in zip(check_readable(batch), model(batch), strict=True):
            found = output["instances"].to("cpu")
            rows.append(
                Found(
                    image["image_id"],
                    found.pred_classes.tolist(),
                    found.scores.tolist(),
                    found.pred_boxes.tensor.tolist(),
                    _encode(found.pred_masks) if found.has("pred_masks") else None,
                )
            )
    parts: list[list[Found]] = comm.gather(rows)
    place = {record["image_id"]: i for i, record in enumerate(data.test)}
    return sorted((row for part in parts for row in part), key=lambda row: place[row.image_id])


def _encode(masks: Tensor) -> list[dict[str, Any]]:
    """Masks (N, H, W) as compressed run lengths that JSON can hold."""
    packed = mask_tools.encode(np.asfortranarray(masks.numpy().transpose(1, 2, 0), np.uint8))
    return [{"size": list(m["size"]), "counts": m["counts"].decode("ascii")} for m in packed]


def measure(found: Sequence[Found], data: DetectionData) -> Evaluation:
    """Every AP: VOC's definitions, or COCO's of boxes and, where the records have them, masks."""
    return _measure_voc(found, data) if data.category_ids is None else _measure_coco(found, data)


def _measure_voc(found: Sequence[Found], data: DetectionData) -> Evaluation:
    detections = collect((row[:4] for row in found), data.class_names)
    eleven = evaluate(detections, data.test, data.class_names, method="11point")  # type: ignore[arg-type]
    area = evaluate(detections, data.test, data.class_names, method="area")  # type: ignore[arg-type]
    values = {
        "ap50_11point": eleven.mean_ap(0.5),
        "ap75_11point": eleven.mean_ap(0.75),
        "ap_11point": eleven.ap,
        "ap50_area": area.mean_ap(0.5),
        "ap75": area.mean_ap(0.75),
        "ap": area.ap,
    }
    return Evaluation(
        values={name: 100 * value for name, value in values.items()},
        per_class={
            name: None if math.isnan(value) else 100 * value
            for name, value in eleven.per_class(0.5).items()
        },
        curves={
            name: (curve.recall.tolist(), curve.precision.tolist())
            for name, curve in eleven.curves.items()
        },
        what="VOC07 11-point AP at IoU 0.5",
    )


def _measure_coco(found: Sequence[Found], data: DetectionData) -> Evaluation:
    assert data.category_ids is not None
    categories = list(zip(data.category_ids, data.class_names, strict=True))
    truth, results = to_ground_truth(data.test, categories), to_results(found, data.category_ids)
    with_masks = any(row.masks is not None for row in found)
    kinds: tuple[Kind, ...] = ("bbox", "segm") if with_masks else ("bbox",)
    scores = [score(truth, results, kind) for kind in kinds]
    values = {name: value for each in scores for name, value in each.values.items()}
    what = "AP of boxes, IoU 0.5 to 0.95, by pycocotools"
    return Evaluation(values, scores[0].per_class, scores[0].curves, what)


def summarise(values: Mapping[str, float]) -> str:
    """A run's headlines in a few words."""
    named = ((word, values.get(name)) for name, word in HEADLINES.items())
    return ", ".join(f"{word} {value:.2f}" for word, value in named if value is not None)


def save_evaluation(
    folder: Path, found: Sequence[Found], evaluation: Evaluation, data: DetectionData, split: str
) -> None:
    """Writes detections (comp4 files, or COCO's results), AP, curves, their figure, a table."""
    stored = folder / "inference"
    if data.category_ids is None:
        save_comp4(stored, split, collect((row[:4] for row in found), data.class_names))
    else:
        stored.mkdir(parents=True, exist_ok=True)
        write_text(stored / RESULTS, json.dumps(to_results(found, data.category_ids)) + "\n")
    write_json(stored / "ap.json", {**evaluation.values, "per_class": evaluation.per_class})
    curves = {
        name: {"recall": recall, "precision": precision}
        for name, (recall, precision) in evaluation.curves.items()
    }
    write_text(folder / "precision_recall.json", json.dumps(curves) + "\n")
    write_text(folder / "per_class.md", f"{table(evaluation)}\n{class_table(evaluation)}")
    _draw_curves(folder / "precision_recall.png", evaluation)


def table(evaluation: Evaluation) -> str:
    """AP, AP50 and AP75 by every definition."""
    lines = ["|  | AP | AP50 | AP75 |", "|---|---|---|---|"]
    for line, metrics in LINES.items():
        cells = [evaluation.values.get(name) for name in metrics]
        if any(cell is not None for cell in cells):
            lines.append(f"| {line} | {' | '.join(map(_shown, cells))} |")
    return "\n".join(lines) + "\n"


def class_table(evaluation: Evaluation) -> str:
    """The paper's kind of table: AP of every class and their mean."""
    names = [*evaluation.per_class, "mean"]
    cells = [*evaluation.per_class.values(), next(iter(evaluation.values.values()))]
    return (
        f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n| {' | '.join(map(_shown, cells))} |\n\n"
        f"{evaluation.what}, in percent.\n"
    )


def _shown(value: float | None) -> str:
    return " - " if value is None else f"{value:.1f}"


def _draw_curves(path: Path, evaluation: Evaluation) -> None:
    # Heavy to import, and only the first process draws.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes: Any = figure.subplots()
    for name, (recall, precision) in evaluation.curves.items():
        value = evaluation.per_class[name]
        if value is not None:
            axes.plot(recall, precision, label=f"{name} {value:.1f}", linewidth=1)
    axes.set(xlabel="recall", ylabel="precision", xlim=(0, 1), ylim=(0, 1.02))
    axes.set_title(f"Precision and recall at IoU 0.5; beside each class: {evaluation.what}")
    many = len(evaluation.curves) > 25
    figure.legend(
        loc="outside right upper",
        fontsize="xx-small" if many else "small",
        frameon=False,
        ncols=2 if many else 1,
    )
    figure.savefig(path, dpi=120)


def _picture(pixels: Any, boxes: Any, labels: list[str], masks: Any, scale: float) -> Any:
    canvas = Visualizer(pixels, Metadata(name="drawing"), scale=scale)
    return canvas.overlay_instances(boxes=boxes, labels=labels, masks=masks).get_image()


@torch.no_grad()
def draw_detections(
    folder: Path, model: nn.Module, cfg: CfgNode, data: DetectionData, count: int
) -> list[Path]:
    """Draws test images, spread evenly over the split, as PNG files; what it wrote.

    Ground truth is at the left, the detections are at the right.
    """
    model.eval()
    step = max(1, len(data.test) // max(count, 1))
    indices = list(range(0, len(data.test), step))[:count]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for index, batch in zip(indices, build_test_loader(cfg, data, 0, 1, indices), strict=True):
        record = data.test[index]
        found: Instances = model(batch)[0]["instances"].to("cpu")
        found = found[found.scores >= MIN_SCORE]
        pixels = convert_image_to_rgb(read_image(record["file_name"], "RGB"), "RGB")
        scale = max(1.0, SHORT_SIDE / min(pixels.shape[:2]))
        names, objects = data.class_names, record["annotations"]
        corners = [BoxMode.convert(a["bbox"], a["bbox_mode"], BoxMode.XYXY_ABS) for a in objects]
        truth = Boxes(torch.tensor(corners).reshape(-1, 4))
        said = [names[a["category_id"]] for a in objects]
        outlines = [a["segmentation"] for a in objects if "segmentation" in a] or None
        left = _picture(pixels, truth, said, outlines, scale)
        labels = [
            f"{names[kind]} {score:.2f}"
            for kind, score in zip(found.pred_classes.tolist(), found.scores.tolist(), strict=True)
        ]
        masks = found.pred_masks.numpy() if found.has("pred_masks") else None
        right = _picture(pixels, found.pred_boxes, labels, masks, scale)
        gap = np.full((left.shape[0], 8, 3), 255, np.uint8)
        path = folder / f"{record['image_id']}.png"
        Image.fromarray(np.concatenate([left, gap, right], axis=1)).save(path)
        written.append(path)
    return written

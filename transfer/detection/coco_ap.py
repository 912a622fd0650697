"""COCO's average precision of boxes and masks, by pycocotools."""

import contextlib
import copy
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

Kind = Literal["bbox", "segm"]
# pycocotools' twelve numbers begin with these; the others are recalls.
NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
SUFFIXES: dict[Kind, str] = {"bbox": "_box", "segm": "_mask"}


class Found(NamedTuple):
    """Detections of one image: categories (N,), scores (N,), boxes (N, 4) by corners, N masks.

    Masks are compressed run lengths of the image's size; None where the detector has none.
    """

    image_id: Any
    categories: list[int]
    scores: list[float]
    boxes: list[list[float]]
    masks: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class CocoScore:
    """What pycocotools says of boxes, or of masks.

    Attributes:
        values: ap_box, ap50_box, ... in percent; a size of object that does not occur has none.
        per_class: AP over IoU 0.5 to 0.95 in percent; None where there is no such object.
        curves: precision at 101 recalls from 0 to 1, at IoU 0.5, of the classes with objects.
    """

    values: dict[str, float]
    per_class: dict[str, float | None]
    curves: dict[str, tuple[list[float], list[float]]]


def to_results(images: Iterable[Found], category_ids: Sequence[int]) -> list[dict[str, Any]]:
    """COCO's results format: a dict for each detection, with the file's own ids."""
    results = []
    for found in images:
        masks = found.masks if found.masks is not None else [None] * len(found.scores)
        columns = (found.categories, found.scores, found.boxes, masks)
        for category, score, (x1, y1, x2, y2), mask in zip(*columns, strict=True):
            row: dict[str, Any] = {
                "image_id": found.image_id,
                "category_id": category_ids[category],
                "bbox": [x1, y1, x2 - x1, y2 - y1],
                "score": score,
            }
            results.append(row if mask is None else {**row, "segmentation": mask})
    return results


def score(truth: Mapping[str, Any], results: Sequence[Mapping[str, Any]], kind: Kind) -> CocoScore:
    """Evaluates results (of `to_results`, or read from a file) against the ground truth.

    Args:
        truth: of `coco.to_ground_truth`.
        results: detections.
        kind: boxes, or masks.
    """
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        known = _index(copy.deepcopy(dict(truth)))
        # Of masks the size decides what is small, so boxes are left out.
        rows = [{k: v for k, v in row.items() if kind == "bbox" or k != "bbox"} for row in results]
        found = known.loadRes(rows) if rows else _index({**truth, "annotations": []})
        evaluator = COCOeval(known, found, kind)
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    suffix = SUFFIXES[kind]
    values = {
        name + suffix: 100 * float(value)
        for name, value in zip(NAMES, evaluator.stats, strict=False)
        if value >= 0
    }
    # (thresholds, recalls, classes, sizes of object, most detections an image)
    precision = evaluator.eval["precision"][:, :, :, 0, -1]
    per_class: dict[str, float | None] = {}
    curves = {}
    recall = evaluator.params.recThrs.tolist()
    names = {each["id"]: each["name"] for each in truth["categories"]}
    for place, number in enumerate(evaluator.params.catIds):
        own = precision[:, :, place]
        exists = bool((own > -1).any())
        per_class[names[number]] = 100 * float(own[own > -1].mean()) if exists else None
        if exists:
            curves[names[number]] = (recall, np.maximum(own[0], 0).tolist())
    return CocoScore(values, per_class, curves)


def _index(dataset: Mapping[str, Any]) -> Any:
    known = COCO()
    known.dataset = dict(dataset)
    known.createIndex()
    return known

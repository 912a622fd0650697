"""Average precision as the PASCAL VOC devkit defines it (the metric of the paper's section 4.4).

Matching, per class and IoU threshold: detections in order of falling score, each looks at the
object of its image that it overlaps most. Below the threshold it is a false positive. If that
object is difficult the detection counts for nothing. If it is taken, the detection is a duplicate
and a false positive; else it is a true positive and takes the object. Difficult objects are not
missed either: recall counts the others only.

Choices where the definition is not unique:

- Equal scores, `ties`: "numpy" sorts with `np.argsort(-scores)`, as the customary Python evaluators
  do, so published numbers come out to the sixth decimal. That sort is not stable and which of two
  equals comes first depends on the CPU (AVX-512 or not); "stable" keeps the given order everywhere,
  as the devkit does. On a real detector with six-decimal scores the two differ by 4e-6.
- The 11 recall levels are k * 0.1 in floating point, as in those evaluators: 3, 6 and 7 come out a
  hair above the decimal number, and a recall of exactly 0.3 does not reach the fourth level.
- Overlap equal to the threshold matches, as in the devkit.
- A class with no object that counts has no AP: it is NaN, and stays out of the means.
- A class with objects and without detections has AP 0.
- Scores are compared at full precision; Detectron2's own evaluator rounds them to 3 decimals.

Boxes are (x1, y1, x2, y2) in continuous coordinates, as Detectron2 predicts and `voc.read_voc`
reads: x1 and y1 are one less than the devkit's. So width is x2 - x1, which is the devkit's
inclusive `x2 - x1 + 1`, and so is the IoU. `to_devkit` and `from_devkit` go between the two.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from instdisc.errors import UserError
from instdisc.untrusted.limits import read_limited
from transfer.detection.voc import Record

Method = Literal["11point", "area"]
Ties = Literal["numpy", "stable"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
COCO_THRESHOLDS = tuple(percent / 100 for percent in range(50, 100, 5))


@dataclass(frozen=True)
class Detections:
    """Detections of one class: image ids (N,), scores (N,), continuous boxes (N, 4)."""

    image_ids: Sequence[str]
    scores: Floats
    boxes: Floats

    def __post_init__(self) -> None:
        count = len(self.image_ids)
        if self.scores.shape != (count,) or self.boxes.shape != (count, 4):
            raise UserError(
                f"{count} image ids, scores {self.scores.shape}, boxes {self.boxes.shape}: "
                "expected (N,), (N,) and (N, 4)"
            )
        if not (np.isfinite(self.scores).all() and np.isfinite(self.boxes).all()):
            raise UserError(
                "detections have NaN or infinite scores or boxes: did training diverge?"
            )


@dataclass(frozen=True)
class Curve:
    """Precision and recall of one class, (N,) each, after each detection by falling score."""

    recall: Floats
    precision: Floats
    scores: Floats
    num_positives: int


@dataclass(frozen=True)
class Result:
    """AP of every class at every threshold, as fractions of one; AP50 is `mean_ap(0.5)`.

    Attributes:
        class_names: (C,).
        thresholds: (T,) IoU.
        method: how AP comes from the curve.
        table: (T, C) AP; NaN for a class without objects that count.
        curves: class name -> curve at the first threshold.
    """

    class_names: tuple[str, ...]
    thresholds: tuple[float, ...]
    method: Method
    table: Floats
    curves: dict[str, Curve]

    def per_class(self, threshold: float = 0.5) -> dict[str, float]:
        """AP of each class at one threshold."""
        return dict(zip(self.class_names, self.table[self._row(threshold)].tolist(), strict=True))

    def mean_ap(self, threshold: float = 0.5) -> float:
        """Mean over the classes that have objects; NaN if none has."""
        return _mean(self.table[self._row(threshold)])

    @property
    def ap(self) -> float:
        """Mean over classes and thresholds; COCO's AP where those are 0.5:0.05:0.95."""
        return _mean(self.table)

    def _row(self, threshold: float) -> int:
        rows = np.flatnonzero(np.isclose(self.thresholds, threshold, rtol=0, atol=1e-9))
        if not rows.size:
            raise UserError(f"AP at IoU {threshold} was not asked for: only {self.thresholds}")
        return int(rows[0])


def evaluate(
    detections: Mapping[str, Detections],
    ground_truth: Sequence[Record],
    class_names: Sequence[str],
    *,
    method: Method = "11point",
    thresholds: Sequence[float] = COCO_THRESHOLDS,
    ties: Ties = "numpy",
) -> Result:
    """Average precision of detections against annotated images.

    Args:
        detections: class name -> its detections; a class may be absent.
        ground_truth: records as `voc.read_voc` gives them.
        class_names: category id -> name.
        method: `11point` (VOC2007) or `area` (VOC2010 and later).
        thresholds: IoU a match needs, in (0, 1].
        ties: order of detections with equal scores, see the top of this module.
    """
    if method not in ("11point", "area"):
        raise UserError(f"unknown AP method {method!r}: expected 11point or area")
    if not thresholds or not all(0 < t <= 1 for t in thresholds):
        raise UserError(f"IoU thresholds {tuple(thresholds)}: expected numbers in (0, 1]")
    foreign = set(detections) - set(class_names)
    if foreign:
        raise UserError(f"detections of unknown class {min(foreign)!r}: expected {class_names}")
    rows = {record["image_id"]: row for row, record in enumerate(ground_truth)}
    assert len(rows) == len(ground_truth), "an image id occurs twice in the ground truth"

    objects = [(row, a) for row, r in enumerate(ground_truth) for a in r["annotations"]]
    image = np.array([row for row, _ in objects], np.int64)
    category = np.array([a["category_id"] for _, a in objects], np.int64)
    boxes = np.array([a["bbox"] for _, a in objects], np.float64).reshape(-1, 4)
    difficult = np.array([a.get("difficult", False) for _, a in objects], bool)

    table = np.full((len(thresholds), len(class_names)), np.nan)
    curves: dict[str, Curve] = {}
    nothing = Detections([], np.zeros(0), np.zeros((0, 4)))
    for column, name in enumerate(class_names):
        own = category == column  # the objects keep the order of their images
        found = detections.get(name, nothing)
        order = np.argsort(-found.scores, kind="stable" if ties == "stable" else None)
        overlap, best = _best_overlap(
            _rows_of(found.image_ids, rows)[order], found.boxes[order], image[own], boxes[own]
        )
        for row, threshold in enumerate(thresholds):
            curve = _curve(overlap >= threshold, best, difficult[own], found.scores[order])
            table[row, column] = average_precision(curve, method)
            if row == 0:
                curves[name] = curve
    return Result(tuple(class_names), tuple(thresholds), method, table, curves)


def average_precision(curve: Curve, method: Method) -> float:
    """AP of one curve; NaN when nothing could be found."""
    if not curve.num_positives:
        return float("nan")
    # The best precision at this recall or any higher one.
    envelope = np.maximum.accumulate(curve.precision[::-1])[::-1]
    if method == "11point":
        first = np.searchsorted(curve.recall, np.arange(11) * 0.1)  # first with recall >= level
        return float(np.append(envelope, 0.0)[first].sum() / 11)
    return float(np.diff(curve.recall, prepend=0.0) @ envelope)


def collect(
    images: Iterable[tuple[str, ArrayLike, ArrayLike, ArrayLike]], class_names: Sequence[str]
) -> dict[str, Detections]:
    """Sorts detections by class; an image is (id, category ids (N,), scores (N,), boxes (N, 4))."""
    rows: dict[str, list[tuple[str, float, list[float]]]] = {name: [] for name in class_names}
    for image_id, categories, scores, boxes in images:
        columns = (np.asarray(values).tolist() for values in (categories, scores, boxes))
        for category, score, box in zip(*columns, strict=True):
            rows[class_names[category]].append((image_id, score, box))
    return {
        name: Detections(
            [row[0] for row in own],
            np.array([row[1] for row in own], np.float64),
            np.array([row[2] for row in own], np.float64).reshape(-1, 4),
        )
        for name, own in rows.items()
    }


def box_iou(a: Floats, b: Floats) -> Floats:
    """IoU of boxes (..., 4) with boxes (..., 4), broadcast against each other."""
    size = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    shared = np.prod(np.maximum(size, 0.0), axis=-1)
    total = np.prod(a[..., 2:] - a[..., :2], axis=-1) + np.prod(b[..., 2:] - b[..., :2], axis=-1)
    union = total - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def to_devkit(boxes: Floats) -> Floats:
    """Continuous boxes (N, 4) as 1-based inclusive ones."""
    return boxes + np.array([1.0, 1.0, 0.0, 0.0])


def from_devkit(boxes: Floats) -> Floats:
    """1-based inclusive boxes (N, 4) as continuous ones."""
    return boxes - np.array([1.0, 1.0, 0.0, 0.0])


def save_comp4(folder: Path, split: str, detections: Mapping[str, Detections]) -> None:
    """Writes comp4_det_<split>_<class>.txt for each class: `id score x1 y1 x2 y2` a line."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in detections.items():
        rows = zip(found.image_ids, found.scores, to_devkit(found.boxes), strict=True)
        # repr: the file keeps the order of scores that differ in a late digit.
        lines = [f"{i} {float(s)!r} {' '.join(repr(float(v)) for v in b)}\n" for i, s, b in rows]
        (folder / f"comp4_det_{split}_{name}.txt").write_text("".join(lines), encoding="utf-8")


def load_comp4(folder: Path, split: str, class_names: Iterable[str]) -> dict[str, Detections]:
    """Reads comp4_det_<split>_<class>.txt of each class; all must be there."""
    found = {}
    for name in class_names:
        path = folder / f"comp4_det_{split}_{name}.txt"
        try:
            lines = read_limited(path).decode("utf-8").splitlines()
            fields = [line.split() for line in lines if line]
            numbers = np.array([row[1:] for row in fields], np.float64).reshape(len(fields), 5)
        except FileNotFoundError:
            raise UserError(f"no detections {path}: each class has its own file") from None
        except ValueError:
            raise UserError(f"{path}: expected `id score x1 y1 x2 y2` on each line") from None
        boxes = from_devkit(numbers[:, 1:])
        found[name] = Detections([row[0] for row in fields], numbers[:, 0], boxes)
    return found


def _mean(table: Floats) -> float:
    valid = table[~np.isnan(table)]
    return float(valid.mean()) if valid.size else float("nan")


def _rows_of(image_ids: Sequence[str], rows: Mapping[str, int]) -> Ints:
    try:
        return np.array([rows[i] for i in image_ids], np.int64)
    except KeyError as error:
        raise UserError(f"detections in image {error}, which the annotations lack") from None


def _best_overlap(
    image: Ints, boxes: Floats, object_image: Ints, objects: Floats
) -> tuple[Floats, Ints]:
    """For detections (N,), (N, 4): the highest IoU and its object (N,) each; -1 where none.

    Objects (M,), (M, 4) are sorted by image. Every detection meets every object of its image, in
    one flat list of pairs: no loop over images.
    """
    first = np.searchsorted(object_image, image, side="left")
    count = np.searchsorted(object_image, image, side="right") - first
    overlap, best = np.full(len(image), -1.0), np.full(len(image), -1, np.int64)
    some = np.flatnonzero(count)
    if not some.size:
        return overlap, best
    count = count[some]
    start = np.cumsum(count) - count  # of each detection's pairs
    detection = np.repeat(some, count)
    candidate = np.arange(count.sum()) - np.repeat(start - first[some], count)
    iou = box_iou(boxes[detection], objects[candidate])
    overlap[some] = np.maximum.reduceat(iou, start)
    # Among equals the first object, as the devkit's strict comparison keeps it.
    tied = np.where(iou == overlap[detection], candidate, len(objects))
    best[some] = np.minimum.reduceat(tied, start)
    return overlap, best


def _curve(matched: Bools, best: Ints, difficult: Bools, scores: Floats) -> Curve:
    """Curve of detections (N,) sorted by falling score."""
    ignored = np.zeros(len(best), bool)
    ignored[matched] = difficult[best[matched]]
    claims = np.flatnonzero(matched & ~ignored)
    hit = np.zeros(len(best), bool)
    hit[claims[np.unique(best[claims], return_index=True)[1]]] = True  # the first claim on each
    true, false = np.cumsum(hit), np.cumsum(~hit & ~ignored)
    num_positives = int(np.count_nonzero(~difficult))
    # Before the first detection that counts, precision is 0 / 0: taken as 0.
    precision = true / np.maximum(true + false, 1)
    return Curve(true / max(num_positives, 1), precision, scores, num_positives)

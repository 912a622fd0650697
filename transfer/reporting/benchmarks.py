"""Benchmarks beside the paper's, with numbers that others published under their protocols.

Imports no torch. published.csv has a line for each network: the benchmark, the method, what it can
be compared with, what the source remarks, and the numbers in the order of the benchmark's columns.
"""

import csv
import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from instdisc.names import STAGES
from transfer.reporting.paper_numbers import (
    LATER_DETECTION,
    OPENSELFSUP,
    VOC0712_COLUMNS,
    Published,
)
from transfer.reporting.rows import Entry

FILE = Path(__file__).with_name("published.csv")
SHOTS = (1, 2, 4, 8, 16, 32, 64, 96)


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One protocol on one data set.

    Attributes:
        slug: its name in published.csv, and that of its table.
        title: its heading.
        data: the data set, as `rows.name_data` calls it.
        columns: of the published numbers, in their order.
        protocol: how those were measured.
        task: the command that measures it here.
        place: the column of a measurement; None where it belongs elsewhere.
        is_same: whether a measurement was made with the published protocol, so that a difference
            means something; told by its family.
        more: numbers of other sources under the same protocol.
        choose: which of the measurements that fit stand beside the published ones.
        note: what else a reader must know.
    """

    slug: str
    title: str
    data: str
    columns: tuple[str, ...]
    protocol: str
    task: str
    place: Callable[[Entry], str | None]
    is_same: Callable[[str], bool]
    more: tuple[Published, ...] = ()
    choose: Callable[[Sequence[Entry]], list[Entry]] = list
    note: str = ""

    @property
    def published(self) -> list[Published]:
        """All that was published."""
        rows = []
        for line in _lines():
            if line["benchmark"] == self.slug:
                pairs = zip(self.columns, line["values"].split(), strict=True)
                values = {column: float(number) for column, number in pairs if number != "-"}
                method, kind, remark = line["method"], line["kind"], line["remark"]
                rows.append(
                    Published("", method, "resnet50", values, kind, OPENSELFSUP, remark)  # type: ignore[arg-type] # checked by tests
                )
        return [*rows, *self.more]

    def fits(self, entry: Entry) -> bool:
        """Whether a measurement belongs to it."""
        is_here = entry.task == self.task and entry.data == self.data
        return is_here and self.place(entry) is not None


@cache
def _lines() -> tuple[dict[str, str], ...]:
    with FILE.open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


def _place_of_svm(entry: Entry) -> str | None:
    return entry.place.partition(" ")[2] or "full" if entry.metric == "mAP" else None


def _choose_stage(entries: Sequence[Entry]) -> list[Entry]:
    """Of each network the stage with the best mAP; all labels count before a few."""
    found: dict[tuple[str, str], dict[str, list[Entry]]] = {}
    for entry in entries:
        stage = entry.place.partition(" ")[0]
        found.setdefault((entry.network.key, entry.family), {}).setdefault(stage, []).append(entry)

    def worth(group: list[Entry]) -> tuple[bool, float]:
        full = [entry for entry in group if " " not in entry.place]
        return bool(full), max(entry.measured.mean for entry in full or group)

    return [entry for stages in found.values() for entry in max(stages.values(), key=worth)]


def _is_stage(entry: Entry) -> str | None:
    wanted = "recipe=" in entry.family and entry.metric == "top-1"
    return entry.place if wanted and entry.place in STAGES else None


def _is_pooled(entry: Entry) -> str | None:
    wanted = "recipe=" in entry.family and entry.metric == "top-1"
    return "pooled" if wanted and entry.place == "backbone" else None


def _has_iterations(family: str, name: str, count: int) -> bool:
    words = family.split(", ")
    return words[0] in (name, name.rpartition("/")[2]) and f"{count} iterations" in words


COCO_COLUMNS = tuple(f"{what} {ap}" for what in ("box", "mask") for ap in ("AP", "AP50", "AP75"))
FIVE_STAGES = (
    "batch norm without affine and a linear layer on each of five stages, pooled to about 9,000 "
    "numbers, trained together; lr 0.01, batch 256, weight decay 1e-4, 90 epochs"
)
BENCHMARKS = (
    Benchmark(
        "voc07-svm",
        "VOC2007 classification: linear SVMs, all labels and low-shot, mAP",
        "VOC2007",
        ("full", *(f"k={shots}" for shots in SHOTS)),
        "one linear SVM a class on the best of five stages, C by 3-fold cross-validation, mAP on "
        "test (Goyal et al. 2019); k positives a class, mean of five samples",
        "voc_svm",
        _place_of_svm,
        lambda family: not family,
        choose=_choose_stage,
    ),
    Benchmark(
        "imagenet-stages",
        "ImageNet: linear classifiers on five stages, top-1",
        "ImageNet",
        STAGES,
        FIVE_STAGES,
        "linear",
        _is_stage,
        lambda family: family == "recipe=openselfsup",
    ),
    Benchmark(
        "imagenet-pooled",
        "ImageNet: linear classifier on the pooled last stage, top-1",
        "ImageNet",
        ("pooled",),
        "one linear layer on the averaged last stage; lr 30, batch 256, no weight decay, "
        "100 epochs (MoCo)",
        "linear",
        _is_pooled,
        lambda family: family == "recipe=moco",
    ),
    Benchmark(
        "places205-stages",
        "Places205: linear classifiers on five stages, top-1",
        "Places205",
        STAGES,
        FIVE_STAGES,
        "linear",
        _is_stage,
        lambda family: family == "recipe=openselfsup",
    ),
    Benchmark(
        "imagenet-semisup",
        "ImageNet: fine-tuning with 1% and 10% of the labels",
        "ImageNet",
        ("1% top-1", "1% top-5", "10% top-1", "10% top-5"),
        "SimCLR's lists of images, 20 epochs, learning rates by network as remarked",
        "semisup",
        lambda entry: entry.column,
        lambda family: "recipe=openselfsup" in family.split(" "),
        note="The paper shows a figure without numbers: at 1% of the labels its networks lead the "
        "others by about ten points of top-5.",
    ),
    Benchmark(
        "voc0712-detection",
        "VOC2007 + 2012 detection: Faster R-CNN, ResNet-50-C4",
        "VOC2007 + 2012",
        VOC0712_COLUMNS,
        "trainval of 2007 and 2012 -> test of 2007, 24,000 iterations, synchronised batch norm "
        "(MoCo's recipe); AP as Detectron2 prints it, 11-point at every IoU",
        "detect",
        lambda entry: entry.metric,
        lambda family: _has_iterations(family, "faster_r50_syncbn", 24_000),
        LATER_DETECTION,
    ),
    Benchmark(
        "coco-detection",
        "COCO 2017: Mask R-CNN, ResNet-50-C4, 2x",
        "COCO 2017",
        COCO_COLUMNS,
        "train2017 -> val2017, 180,000 iterations (2x), box and mask AP by COCO's rule",
        "detect",
        lambda entry: entry.metric if entry.metric.startswith(("box", "mask")) else None,
        lambda family: _has_iterations(family, "coco/mask_r50_c4_2x", 180_000),
    ),
)

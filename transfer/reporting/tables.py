"""The paper's tables beside what was measured. Imports no torch."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from instdisc.names import PAPER_DETECTORS, STAGES
from transfer.reporting import paper_numbers as paper
from transfer.reporting.benchmarks import BENCHMARKS
from transfer.reporting.grids import Grid, Measurements, by_network, match_lines
from transfer.reporting.paper_numbers import Published
from transfer.reporting.parts import (
    PAPER_KNN,
    PAPER_SVM,
    SCALE,
    ablation_line,
    anchors,
    benchmark_grids,
    describe_scale,
    is_readout,
    is_standard,
    is_svm,
    objectives_grid,
    plain_grids,
    row_of_table1,
)
from transfer.reporting.rows import Entry

DETECTOR_NAMES = {
    "alexnet": "Fast R-CNN, AlexNet",
    "vgg16": "Fast R-CNN, VGG16",
    "resnet50": "Faster R-CNN (C4), ResNet-50",
}
VOC07_SPLITS = "voc07-trainval -> voc07-test"


class Tables:
    """Builds all tables, and remembers which measurements have found their place."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        everything = list(entries)
        self.entries = [entry for entry in everything if not entry.is_demo]
        self.demo = [entry for entry in everything if entry.is_demo]
        self.placed: set[int] = set()

    def _take(self, wanted: Callable[[Entry], bool]) -> list[Entry]:
        found = [entry for entry in self.entries if wanted(entry)]
        self.placed.update(map(id, found))
        return found

    def build(self) -> list[Grid]:
        """The paper's tables in its order, what else was measured, and the demo."""
        grids = [
            *self.objectives(),
            *self.readouts("table2", "Table 2: ImageNet, top-1", "ImageNet", paper.TABLE2),
            anchors(
                "table2-anchors",
                "ImageNet: what others published",
                "ImageNet",
                paper.IMAGENET_ANCHORS,
            ),
            *self.readouts("table3", "Table 3: Places205, top-1", "Places205", paper.TABLE3),
            *self.ablation("4", "size of the embedding", "embedding_dim", paper.TABLE4),
            *self.ablation("5", "size of the training set", "train_fraction", paper.TABLE5),
            *self.benchmarks(),
            *self.semisupervised(),
            *self.detection(),
        ]
        rest = [entry for entry in self.entries if id(entry) not in self.placed]
        grids += plain_grids("other", "Also measured", rest, is_demo=False)
        return grids + plain_grids("demo", "Demo", self.demo, is_demo=True)

    def objectives(self) -> list[Grid]:
        """Table 1: a grid for each scale of training; the paper's alone if nothing was measured."""

        def fits(entry: Entry) -> bool:
            svm = entry.task == "linear" and entry.place == "embedding" and is_svm(entry.family)
            knn = entry.task == "knn" and entry.family == PAPER_KNN
            return (svm or knn) and entry.metric == "top-1" and entry.network.kind == "ours"

        groups: dict[tuple[str, str], list[Entry]] = {}
        for entry in self.entries:
            if fits(entry):
                facts = entry.network.facts
                scale = json.dumps([entry.network.arch, *(facts.get(name) for name in SCALE)])
                groups.setdefault((entry.data, scale), []).append(entry)
        grids: list[Grid] = []
        for (data, _), found in groups.items():
            arch = found[0].network.arch
            is_papers = data == "CIFAR-10" and arch == "resnet18"
            rows = {row_of_table1(entry.network.facts) for entry in found}
            if len(rows - {None}) < 2 and not is_papers:
                continue  # one objective is no comparison: other tables have it
            self.placed.update(map(id, found))
            title = "Table 1: objectives, CIFAR-10" if is_papers else f"Objectives, {data}"
            grid = objectives_grid(found, f"table1-{len(grids) + 1}", title, data, is_papers)
            grid.notes.insert(0, describe_scale(arch, found[0].network.facts))
            grids.append(grid)
        if not any(grid.title.startswith("Table 1") for grid in grids):
            title = "Table 1: objectives, CIFAR-10"
            grids.insert(0, objectives_grid([], "table1", title, "CIFAR-10", True))
        return grids

    def readouts(
        self, slug: str, title: str, data: str, published: Sequence[Published]
    ) -> list[Grid]:
        """Tables 2 and 3: one grid for each kind of linear SVM; kNN is in the first."""
        fits = self._take(lambda e: e.data == data and is_readout(e) and is_standard(e))
        families = {e.family for e in fits if e.task == "linear"}
        grids: list[Grid] = []
        for family in sorted(families | {PAPER_SVM}, key=lambda f: (f != PAPER_SVM, f)):
            first = family == PAPER_SVM
            columns = paper.READOUTS if first else STAGES
            wanted = {(e.task, e.family) for e in fits} & {
                ("linear", family),
                *([("knn", PAPER_KNN)] if first else []),
            }
            chosen = [e for e in fits if (e.task, e.family) in wanted]
            networks = by_network(chosen, {f"{column} top-1": column for column in columns})
            rows = published if first else [row for row in published if row.kind != "other"]
            name = slug if first else f"{slug}-{len(grids) + 1}"
            grid = Grid(name, title, columns, data, published=paper.READOUT_PROTOCOL)
            grid.protocols = dict.fromkeys(STAGES, f"linear SVM, {family}")
            if first:
                grid.protocols["kNN"] = PAPER_KNN
            else:
                grid.title += f" ({family})"
            grid.lines = match_lines(rows, networks)
            grids.append(grid)
        return grids

    def ablation(
        self, number: str, varied: str, setting: str, published: Mapping[Any, float]
    ) -> list[Grid]:
        """Tables 4 and 5: kNN by one setting, all others equal."""
        slug, title = f"table{number}", f"Table {number}: {varied}"
        groups: dict[tuple[str, str], dict[Any, list[Entry]]] = {}
        for entry in self.entries:
            facts = dict(entry.network.facts)
            is_knn = entry.task == "knn" and entry.family == PAPER_KNN and entry.metric == "top-1"
            if not is_knn or setting not in facts or entry.network.kind == "random":
                continue
            value = facts.pop(setting)
            facts.pop("data_fingerprint", None)
            others = json.dumps([entry.network.arch, facts], sort_keys=True)
            groups.setdefault((entry.data, others), {}).setdefault(value, []).append(entry)
        column, protocol = "kNN", PAPER_KNN
        grids: list[Grid] = []
        for (data, _), found in groups.items():
            first = next(iter(found.values()))[0]
            arch = first.network.arch
            is_papers = (data, arch) == ("ImageNet", "resnet18") and is_standard(first, setting)
            if len(found) < 2 and not is_papers:
                continue
            for entries in found.values():
                self.placed.update(map(id, entries))
            shared = dict(first.network.facts)
            del shared[setting]
            grid = Grid(f"{slug}-{len(grids) + 1}", f"{title}, {data}, {arch}", (column,), data)
            grid.notes = [describe_scale(arch, shared)]
            known = published if is_papers else {}
            for value in sorted({*known, *found}):
                line = ablation_line(setting, value, known, slug, column)
                line.measured = [
                    Measurements.of(e.network, {column: e.measured}) for e in found.get(value, [])
                ]
                grid.lines.append(line)
            grids.append(grid)
        if not any(", ImageNet, resnet18" in grid.title for grid in grids):
            grid = Grid(slug, f"{title}, ImageNet, resnet18", (column,), "ImageNet")
            grid.lines = [ablation_line(setting, v, published, slug, column) for v in published]
            grids.insert(0, grid)
        for grid in grids:
            grid.side, grid.protocols = True, {column: protocol}
            grid.published = paper.ABLATION_PROTOCOL
        return grids

    def benchmarks(self) -> list[Grid]:
        """What others published under protocols of their own, and what was measured of it."""
        grids: list[Grid] = []
        for benchmark in BENCHMARKS:
            fitting = [entry for entry in self.entries if benchmark.fits(entry)]
            chosen = benchmark.choose(fitting)
            self.placed.update(map(id, chosen))
            grids += benchmark_grids(benchmark, chosen)
        return grids

    def semisupervised(self) -> list[Grid]:
        """What was measured elsewhere than on ImageNet; the paper's figure has no numbers."""
        found = self._take(lambda e: e.task == "semisup" and id(e) not in self.placed)
        grids = plain_grids("semisup", "Semi-supervised", found, is_demo=False)
        return grids

    def detection(self) -> list[Grid]:
        """Table 6, a grid for each detector; 2007 + 2012 has grids of its own."""
        found = self._take(lambda e: e.task == "detect" and id(e) not in self.placed)
        grids: list[Grid] = []
        columns = (paper.VOC07, "AP50, area", "AP", "AP75")
        same = {column: column for column in columns}
        for arch, recipe in PAPER_DETECTORS.items():
            published = [row for row in paper.TABLE6 if row.arch == arch]
            chosen = [
                entry
                for entry in found
                if entry.data == "VOC2007" and entry.family.startswith(f"{recipe}, {VOC07_SPLITS}")
            ]
            families = sorted({e.family for e in chosen}) or [""]
            for number, family in enumerate(families):
                networks = by_network((e for e in chosen if e.family == family), same)
                title = f"Table 6: VOC2007 detection, {DETECTOR_NAMES[arch]}"
                slug = f"table6-{arch}" + (f"-{number + 1}" if number else "")
                grid = Grid(slug, title, columns, "VOC2007", lines=match_lines(published, networks))
                grid.protocols = dict.fromkeys(columns, family) if family else {}
                grid.published = paper.TABLE6_PROTOCOL
                grids.append(grid)
            found = [e for e in found if e not in chosen]
        return [*grids, *plain_grids("detect", "Detection", found, is_demo=False)]

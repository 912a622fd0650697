"""Nearest images of validation images or of given files (paper, section 4.2, retrieval)."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from instdisc.features.extract import build_extractor, default_features, extract_features
from instdisc.images.sets import ImageSet, has_split
from instdisc.images.tree import read_files, read_tree
from instdisc.neighbors.shared import to_device
from instdisc.neighbors.vote import top_k
from instdisc.runs.folders import write_text
from instdisc.runs.log import LOGGER, progress
from instdisc.training import dist
from transfer.nearest.cases import BEST, WORST, choose_cases, make_case
from transfer.nearest.feature_map import FEWEST, FeatureMap, choose, make_map
from transfer.nearest.figure import save_figure
from transfer.nearest.gallery import Gallery, Section, to_printable
from transfer.nearest.knn import LabelledRows, build_store, load_rows
from transfer.nearest.page import render_page
from transfer.nearest.settings import RetrieveConfig
from transfer.task import Task, open_task


@dataclasses.dataclass(frozen=True)
class Neighbors:
    """For each query its nearest images: similarities `(Q, k)`, falling, and indices `(Q, k)`."""

    similarities: np.ndarray
    indices: np.ndarray
    seconds: float

    def of(self, query: int) -> tuple[list[int], list[float]]:
        """Indices and similarities for one query."""
        return self.indices[query].tolist(), self.similarities[query].tolist()


class Retrieval:
    """Retrieval with one network."""

    def __init__(self, config: RetrieveConfig, task: Task) -> None:
        self.config, self.task = config, task
        self.features = config.features or default_features(task.weights)
        self.extractor = build_extractor(task.weights, self.features)
        self.store = build_store(task, config.precision)

    def run(self) -> Gallery:
        """Searches, says what was found, and makes the gallery of it."""
        return self._run_files() if self.config.query else self._run_validation()

    def _search(self, queries: Tensor, bank: Tensor) -> Neighbors:
        """Searches for this process's share of the queries, and gathers the answers."""
        process = self.task.process
        k = min(self.config.num_neighbors, len(bank))
        if k < self.config.num_neighbors:
            LOGGER.info(f"{k} neighbours: there are no more images")
        bank = to_device(bank, process.device)
        started = time.monotonic()
        mine = torch.arange(process.rank, len(queries), process.world_size)
        found = top_k(queries[mine].to(bank.device), bank, num_neighbors=k)
        similarities, indices = (
            dist.gather_by_index(
                part.to(process.device), mine.to(process.device), len(queries)
            ).cpu()
            for part in found
        )
        seconds = time.monotonic() - started
        return Neighbors(similarities.numpy(), indices.numpy(), seconds)

    def _facts(self, bank: LabelledRows, *more: tuple[str, str]) -> list[tuple[str, str]]:
        weights = self.task.weights
        return [
            ("network", f"{weights.backbone.arch}, {weights.name}"),
            ("features", f"{self.features}, {bank.rows.shape[1]}-d, cosine similarity"),
            ("searched", f"{len(bank.rows):,} images of {to_printable(bank.images.dataset)}"),
            *more,
        ]

    def _gallery(
        self,
        title: str,
        sections: Sequence[Section],
        facts: list[tuple[str, str]],
        feature_map: FeatureMap | None = None,
    ) -> Gallery:
        demo = "Demo images: they say that the code works, and nothing about the method."
        warning = demo if self.task.location.is_demo else ""
        return Gallery(title, facts, [s for s in sections if s.cases], warning, feature_map)

    def _map(self, queries: LabelledRows) -> FeatureMap | None:
        """The map of the validation images, or of some of them; by the first process."""
        chosen = choose(len(queries.rows), self.config.num_mapped)
        if len(chosen) < FEWEST or not self.task.is_main:
            return None
        rows = queries.rows[torch.from_numpy(chosen)].float().numpy()
        pictures = [
            queries.images.open(int(index))
            for index in progress(chosen, title="thumbnails", total=len(chosen))
        ]
        started = time.monotonic()
        weights = self.task.weights
        found = make_map(
            f"{len(chosen):,} validation images of {to_printable(queries.images.dataset)}, "
            f"{self.features} of {weights.backbone.arch}, {weights.name}",
            rows,
            pictures,
            queries.labels.numpy()[chosen],
            [to_printable(name) for name in queries.images.classes],
        )
        LOGGER.info(f"map of {len(chosen):,} images in {time.monotonic() - started:.1f} s")
        return found

    def _search_validation(self) -> tuple[LabelledRows, LabelledRows, Neighbors, np.ndarray]:
        """All validation images as queries; whether each neighbour `(Q, k)` has their class."""
        train, val = self.task.load_train_and_val()
        queries = load_rows(self.task, self.store, self.features, val)
        bank = load_rows(self.task, self.store, self.features, train)
        found = self._search(queries.rows, bank.rows)
        agree = bank.labels.numpy()[found.indices] == queries.labels.numpy()[:, None]
        return queries, bank, found, agree

    def _write_precision(
        self, queries: LabelledRows, bank: LabelledRows, k: int, precision: float
    ) -> None:
        row = self.task.result(
            protocol=f"k={k} {self.features}",
            metric=f"precision_at_{k}",
            value=precision,
            images=[bank.images, queries.images],
            details={"num_train": len(bank.rows), "num_val": len(queries.rows)},
        )
        self.task.write_results([row])

    def measure_precision(self) -> float:
        """Percentage of the neighbours of validation images that have their class."""
        queries, bank, found, agree = self._search_validation()
        precision = 100 * float(agree.mean())
        self._write_precision(queries, bank, found.indices.shape[1], precision)
        return precision

    def _run_validation(self) -> Gallery:
        """All validation images as queries; the figure shows the best and the worst."""
        queries, bank, found, agree = self._search_validation()
        k, precision = found.indices.shape[1], 100 * float(agree.mean())
        untrained = self.task.open_untrained()
        beside = f" (untrained {_measure_untrained(untrained):.2f}%)" if untrained else ""
        LOGGER.info(
            f"{len(queries.rows):,} queries in {found.seconds:.2f} s; of their {k} neighbours "
            f"{precision:.2f}% are of the same class{beside}"
        )
        self._write_precision(queries, bank, k, precision)
        chosen = choose_cases(
            agree.sum(axis=1),
            found.similarities.mean(axis=1),
            queries.labels.numpy(),
            self.config.num_cases,
        )
        best, worst = (
            [
                make_case(queries.images, query, bank.images, *found.of(query), labelled=True)
                for query in part
            ]
            for part in chosen
        )
        sections = [Section("Best cases", BEST, best), Section("Worst cases", WORST, worst)]
        facts = self._facts(
            bank,
            ("queries", f"{len(queries.rows):,} validation images"),
            ("neighbours of the same class", f"{precision:.1f}%"),
        )
        title = f"Nearest training images: {to_printable(queries.images.dataset)}"
        return self._gallery(title, sections, facts, self._map(queries))

    def _open_index(self) -> ImageSet:
        """The training images of a data set; all images below any other folder."""
        location = self.task.location
        if location.kind != "folder" or has_split(location, "val"):
            return self.task.load_split("train")
        assert location.root is not None
        # Somebody's pictures: a broken one is no reason to stop.
        self.store = dataclasses.replace(self.store, skip_bad=True)
        return read_tree(location.root)

    def _run_files(self) -> Gallery:
        """Given files as queries; their neighbours' paths go to the terminal too."""
        files = read_files(self.config.query)
        for index in range(len(files)):
            files.open(index)  # before the folder is indexed, which may take long
        images = self._open_index()
        bank = load_rows(self.task, self.store, self.features, images)
        started = time.monotonic()
        queries = extract_features(
            self.extractor, files, self.task.weights.spec, self.task.process, title="queries"
        )
        extracting = time.monotonic() - started
        found = self._search(queries, bank.rows)
        if self.task.is_main:
            sys.stdout.write(format_neighbors(files, bank.images, found))
        count = "1 query" if len(files) == 1 else f"{len(files)} queries"
        LOGGER.info(
            f"{count}: features in {extracting:.2f} s, search in {1000 * found.seconds:.1f} ms"
        )
        cases = [
            make_case(files, query, bank.images, *found.of(query), labelled=False)
            for query in range(len(files))
        ]
        sections = [Section("Queries", "The nearest images, the most similar first.", cases)]
        title = f"Nearest images: {to_printable(bank.images.dataset)}"
        return self._gallery(title, sections, self._facts(bank))


def _measure_untrained(task: Task) -> float:
    assert isinstance(task.config, RetrieveConfig)
    return Retrieval(task.config, task).measure_precision()


def format_neighbors(files: ImageSet, images: ImageSet, found: Neighbors) -> str:
    """For each query: rank, similarity and path of its neighbours."""
    lines = []
    for query in range(len(files)):
        lines.append(f"\n{to_printable(files.name(query))}")
        itself = Path(files.name(query)).resolve()
        for rank, index in enumerate(found.indices[query], start=1):
            name = images.name(int(index))
            note = "  (the query itself)" if Path(name).resolve() == itself else ""
            similarity = found.similarities[query, rank - 1]
            lines.append(f"{rank:>4}  {similarity:.4f}  {to_printable(name)}{note}")
    return "\n".join(lines) + "\n\n"


def run_retrieve(config: RetrieveConfig) -> Gallery:
    """The command: searches, then writes the page and the figure."""
    with open_task("retrieve", config) as task:
        gallery = Retrieval(config, task).run()
        if task.is_main:
            # A look at some files leaves the paper's figure alone.
            name = "query" if config.query else "retrieval"
            page, figure = task.output / f"{name}.html", task.output / f"{name}.png"
            write_text(page, render_page(gallery))
            save_figure(figure, gallery)
            if gallery.feature_map is not None:
                gallery.feature_map.save(task.output)
            LOGGER.info(f"page: {page}\nfigure: {figure}")
        return gallery

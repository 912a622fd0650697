"""kNN accuracy of a network's features, several kinds side by side (paper, sections 3.4, 4.2)."""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from instdisc.errors import UserError
from instdisc.features.extract import build_extractor, default_features
from instdisc.features.store import FeatureStore, StoredFeatures, unreadable
from instdisc.images.sets import ImageSet, load_images, random_subset
from instdisc.names import Precision
from instdisc.neighbors.shared import classify_shared
from instdisc.neighbors.vote import top_k_accuracy
from instdisc.runs.checkpoint import load_checkpoint, weights_hash
from instdisc.runs.log import LOGGER
from instdisc.runs.results import Result
from instdisc.runs.row_files import load_all_rows
from transfer.nearest.settings import PAPER_NUM_NEIGHBORS, KnnConfig
from transfer.task import Task, open_task

RANKS = (1, 5)  # top-1 and top-5


@dataclasses.dataclass(frozen=True)
class LabelledRows:
    """Features with their classes: rows `(N, D)`, labels `(N,)`, and the images they are of."""

    rows: Tensor
    labels: Tensor
    images: ImageSet


def build_store(task: Task, precision: Precision) -> FeatureStore:
    """The stored features of a task's network."""
    config = task.config
    return FeatureStore(
        task.weights_hash,
        task.weights.spec,
        task.process,
        batch_size=config.batch_size,
        workers=config.workers,
        precision=precision,
        skip_bad=config.skip_bad_images,
    )


def load_rows(task: Task, store: FeatureStore, name: str, images: ImageSet) -> LabelledRows:
    """Features of that name of all readable images, computed if they are not stored yet."""
    stored = store.load(build_extractor(task.weights, name), images)
    LOGGER.info(f"{name} of {images.split}: {stored.origin}")
    return drop_bad(stored, images)


def drop_bad(stored: StoredFeatures, images: ImageSet) -> LabelledRows:
    """Features and labels of the readable images; all of them, without a copy, as a rule."""
    labels = torch.from_numpy(images.labels)
    if not len(stored.bad):
        return LabelledRows(stored.rows, labels, images)
    LOGGER.warning(f"left out: {unreadable(images, stored.bad)}")
    kept = np.delete(np.arange(len(images)), stored.bad)
    if not len(kept):
        raise UserError(f"no image of {images.root} can be read: name another folder")
    return LabelledRows(stored.rows[kept], labels[kept], images.subset(kept))


@dataclasses.dataclass(frozen=True)
class Score:
    """Accuracy with one kind of features and one k.

    Attributes:
        features: their name.
        dim: their width.
        num_neighbors: k.
        top: percentages by rank, `{1: ..., 5: ...}`.
        per_class: the same for each class that has validation images.
        bank: what was searched.
        queries: what was classified.
        seconds: time of the search over all queries and every k.
    """

    features: str
    dim: int
    num_neighbors: int
    top: dict[int, float]
    per_class: dict[int, dict[str, float]]
    bank: LabelledRows
    queries: LabelledRows
    seconds: float


class KnnReadout:
    """The readout of one network on one data set."""

    def __init__(self, config: KnnConfig, task: Task) -> None:
        self.config, self.task = config, task
        self.train, self.val = task.load_train_and_val()
        self.store = build_store(task, config.precision)

    def run(self) -> list[Score]:
        """Scores of all features, in the order that was asked for."""
        config, weights = self.config, self.task.weights
        names = config.features or (default_features(weights),)
        if config.features is None and names != ("embedding",):
            LOGGER.info(f"{weights.name} has no projection: using its backbone's features")
        # What cannot be is said before hours of extraction.
        bank = self._load_bank() if "bank" in names else None
        for name in names:
            if name != "bank":
                build_extractor(weights, name)
            choose_ks(config, len(self.train if name != "bank" or bank is None else bank.rows))
        scores = []
        for name in names:
            stage = "embedding" if name == "bank" else name
            queries = load_rows(self.task, self.store, stage, self.val)
            if name == "bank" and bank is not None:
                scores += self._score(name, queries, bank)
            else:
                rows = load_rows(self.task, self.store, stage, self.train)
                scores += self._score(name, queries, rows)
        return scores

    def _load_bank(self) -> LabelledRows:
        """The memory bank at the end of training, if it is of these weights and these images."""
        weights, train = self.task.weights, self.train
        if weights.embedding is None or weights.file is None:
            raise UserError(f"{weights.name} has no memory bank: leave bank out of --features")
        path = weights.file.parent / "last.pt"
        if not path.exists():
            raise UserError(f"{path} does not exist, so there is no bank: leave it out")
        state = load_checkpoint(path, "train")
        if weights_hash(state["model"]) != self.task.weights_hash:
            raise UserError(
                f"{path} and {weights.file.name} are of different steps: let the run go on, then "
                "try again"
            )
        trained = state["config"]
        if trained["skip_bad_images"] != self.config.skip_bad_images:
            skip_bad = trained["skip_bad_images"]
            train = load_images(self.task.location, "train", skip_bad=skip_bad)
        train = random_subset(train, trained["train_fraction"], trained["seed"])
        if state["data_fingerprint"] != train.fingerprint:
            raise UserError(
                f"a row of the bank is an image that {weights.name} was trained on, and the "
                f"training images of {self.task.location.root or 'the demo set'} are others: name "
                "the same images with --data, or leave bank out of --features"
            )
        bank = load_all_rows(state["bank"], path).float()
        return LabelledRows(bank, torch.from_numpy(train.labels), train)

    def _score(self, name: str, queries: LabelledRows, bank: LabelledRows) -> list[Score]:
        ks = choose_ks(self.config, len(bank.rows))
        if self.config.num_neighbors is None and ks != (PAPER_NUM_NEIGHBORS,):
            LOGGER.info(f"k is {ks[0]}: there are no {PAPER_NUM_NEIGHBORS} training images")
        started = time.monotonic()
        predicted = classify_shared(
            queries.rows,
            bank.rows,
            bank.labels,
            self.task.process,
            num_classes=len(self.train.classes),
            num_neighbors=ks,
            temperature=self.config.temperature,
        )
        seconds = time.monotonic() - started
        return [
            Score(
                features=name,
                dim=bank.rows.shape[1],
                num_neighbors=k,
                top={rank: top_k_accuracy(predicted[k], queries.labels, rank) for rank in RANKS},
                per_class={rank: per_class_accuracy(predicted[k], queries, rank) for rank in RANKS},
                bank=bank,
                queries=queries,
                seconds=seconds,
            )
            for k in ks
        ]

    def results(self, scores: Sequence[Score]) -> list[Result]:
        """A row for each number."""
        return [
            self.task.result(
                protocol=f"k={s.num_neighbors} tau={self.config.temperature:g} {s.features}",
                metric=f"top{rank}",
                value=s.top[rank],
                images=[s.bank.images, s.queries.images],
                details={
                    "num_train": len(s.bank.rows),
                    "num_val": len(s.queries.rows),
                    "num_classes": len(self.train.classes),
                    "dim": s.dim,
                    "precision": "float32" if s.features == "bank" else self.config.precision,
                    "search_seconds": round(s.seconds, 3),
                    "per_class": s.per_class[rank],
                },
            )
            for s in scores
            for rank in RANKS
        ]


def choose_ks(config: KnnConfig, num_rows: int) -> tuple[int, ...]:
    """What was asked for; else the paper's k, or all rows where there are fewer."""
    wanted = config.num_neighbors
    if wanted is None:
        return (min(PAPER_NUM_NEIGHBORS, num_rows),)
    if max(wanted) > num_rows:
        raise UserError(
            f"--k {max(wanted)} is more than the {num_rows} training images: "
            f"ask for at most {num_rows}"
        )
    return wanted


def per_class_accuracy(predictions: Tensor, queries: LabelledRows, rank: int) -> dict[str, float]:
    """Percentage for each class that has images, by its name."""
    hits = (predictions[:, :rank] == queries.labels[:, None]).any(dim=1).double()
    num_classes = len(queries.images.classes)
    totals = torch.bincount(queries.labels, minlength=num_classes)
    correct = torch.bincount(queries.labels, hits, minlength=num_classes)
    return {
        name: round(100 * float(correct[label] / totals[label]), 4)
        for label, name in enumerate(queries.images.classes)
        if totals[label]
    }


def format_table(scores: Sequence[Score]) -> str:
    """A line for each k, the kinds of features side by side."""
    columns = {s.features: s.dim for s in scores}
    cells = {(s.features, s.num_neighbors): s.top for s in scores}
    width = 18
    lines = [
        " " * 6 + "".join(f"{f'{name}, {dim}-d':>{width}}" for name, dim in columns.items()),
        f"{'k':>6}" + "".join(f"{'top-1':>{width - 8}}{'top-5':>8}" for _ in columns),
    ]
    for k in dict.fromkeys(s.num_neighbors for s in scores):
        line = f"{k:>6}"
        for name in columns:
            top = cells.get((name, k))
            shown = ("-", "-") if top is None else tuple(f"{top[rank]:.2f}" for rank in RANKS)
            line += f"{shown[0]:>{width - 8}}{shown[1]:>8}"
        lines.append(line)
    return "\n".join(lines)


def run_knn(config: KnnConfig) -> list[Score]:
    """The command: measures, prints the table, writes the rows."""
    with open_task("knn", config) as task:
        readout = KnnReadout(config, task)
        train, val = readout.train, readout.val
        LOGGER.info(
            f"{len(train):,} training and {len(val):,} validation images of {train.dataset}, "
            f"{len(train.classes):,} classes"
        )
        scores = readout.run()
        LOGGER.info(
            f"\nkNN accuracy in percent, tau {config.temperature:g}, {train.dataset}\n"
            f"{format_table(scores)}\n"
        )
        task.write_results(readout.results(scores))
        untrained = task.open_untrained()
        if untrained is not None:
            _measure_untrained(untrained)
        return scores


def _measure_untrained(task: Task) -> None:
    """The same for the network before training, which has no bank."""
    assert isinstance(task.config, KnnConfig)
    features = tuple(name for name in task.config.features or () if name != "bank") or None
    config = dataclasses.replace(task.config, features=features)
    readout = KnnReadout(config, task)
    scores = readout.run()
    LOGGER.info(f"the same network untrained:\n{format_table(scores)}\n")
    task.write_results(readout.results(scores))

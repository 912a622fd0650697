"""run_voc_svm(config): VOC07 classification by linear SVMs (Goyal et al. 2019), full and low-shot.

A target is 1 (the image has the class), 0 (it has not) or -1 (all its objects of the class are
difficult: ignored). For each class an SVM with class weights 2:1 on rows of length one; C is the
one with the best average precision over three folds of trainval. mAP on test is that of the
envelope: the best precision at a recall or any higher one, summed over all recalls.

Low-shot: k images that have a class and 19 k that have not (one less than there are classes), five
draws. Published numbers take, for each k, the C with the best mean over the draws on the *test*
images, and so does this: it is comparable with them, and optimistic.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instdisc.errors import Interrupted, UserError, some_of
from instdisc.features.store import unreadable
from instdisc.images.locations import DataLocation
from instdisc.images.sets import UNLABELLED, ImageSet
from instdisc.networks.weights import Weights
from instdisc.runs.folders import write_json
from instdisc.runs.log import LOGGER, progress
from instdisc.runs.results import Measured, Result, config_hash
from instdisc.runs.signals import StopSignal
from instdisc.training import dist
from instdisc.training.seed import generator
from transfer.detection.average_precision import Curve, average_precision
from transfer.detection.voc import VocSplit, locate_voc, read_targets
from transfer.nearest.knn import build_store
from transfer.probing.kernel_svm import fit, unit_products
from transfer.probing.pooled import StageFeatures, pooled_extractor
from transfer.probing.settings import VOC_COSTS, VOC_SHOTS, VocSvmConfig
from transfer.task import Task, joint_fingerprint, open_task

METRIC = "ap_envelope"
YEAR, TRAIN, TEST = 2007, "trainval", "test"
IGNORED = -1
NUM_FOLDS = 3
WEIGHT_OF_POSITIVES = 2.0


@dataclasses.dataclass(frozen=True)
class LabelledImages:
    """Images of a list, and their targets `(N, C)`: 1, 0, or -1 for ignored."""

    images: ImageSet
    targets: np.ndarray


def load_images(split: VocSplit, targets: np.ndarray, dataset: str) -> LabelledImages:
    """The images of a list in its order."""
    paths = list(split.image_paths.values())
    images = ImageSet(
        dataset=dataset,
        split=split.split,
        classes=UNLABELLED,
        names=np.array([path.name.encode() for path in paths]),
        labels=np.zeros(len(paths), dtype=np.int64),
        sizes=np.array([path.stat().st_size for path in paths]),
        root=split.folder / "JPEGImages",
    )
    return LabelledImages(images, targets)


def envelope_ap(scores: np.ndarray, targets: np.ndarray) -> float:
    """AP of one class over scores and targets `(N,)`: interpolated, all recalls; else NaN."""
    scores, found = _ranked(scores, targets)
    count = int(found[-1])
    precision = found / np.arange(1, len(found) + 1)
    return average_precision(Curve(found / max(count, 1), precision, scores, count), "area")


def stepwise_ap(scores: np.ndarray, targets: np.ndarray) -> float:
    """The same without interpolation, by which C is chosen: scikit-learn's, at a tenth of its time.

    Equal scores are one step.
    """
    scores, found = _ranked(scores, targets)
    last = np.flatnonzero(np.append(np.diff(scores) != 0, True))  # of each group of equal ones
    gained = np.diff(found[last], prepend=0)
    return float(gained @ (found[last] / (last + 1)) / found[-1])


def _ranked(scores: np.ndarray, targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scores in falling order, and how many positives are among the first; without the ignored."""
    used = targets != IGNORED
    order = np.argsort(-scores[used], kind="stable")
    return scores[used][order], np.cumsum(targets[used][order] == 1)


def assign_folds(targets: np.ndarray) -> np.ndarray:
    """The fold of each image for each class, `(N, C)`; -1 for ignored images.

    Stratified, in the order of the images, as scikit-learn's cross_val_score takes them.
    """
    from sklearn.model_selection import StratifiedKFold

    folds = np.full(targets.shape, IGNORED, dtype=np.int8)
    for column in range(targets.shape[1]):
        used = np.flatnonzero(targets[:, column] != IGNORED)
        parts = StratifiedKFold(NUM_FOLDS).split(used, targets[used, column])
        for number, (_, held) in enumerate(parts):
            folds[used[held], column] = number
    return folds


def draw_few(targets: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """Targets `(N, C)` of a low-shot set: k positives and (C - 1) k negatives a class, else -1."""
    chosen = np.full_like(targets, IGNORED)
    num_classes = targets.shape[1]
    for column in range(num_classes):
        for target, count in ((1, shots), (0, shots * (num_classes - 1))):
            places = np.flatnonzero(targets[:, column] == target)
            rng = generator(seed, "low-shot", shots, column, target)
            order = torch.randperm(len(places), generator=rng)[:count]
            assert len(order) == count, "check with most_shots before"
            chosen[places[order.numpy()], column] = target
    return chosen


def most_shots(targets: np.ndarray) -> int:
    """The largest k for which every class has k positives and (C - 1) k negatives."""
    positives, negatives = ((targets == t).sum(axis=0).min() for t in (1, 0))
    return int(min(positives, negatives // max(targets.shape[1] - 1, 1)))


@dataclasses.dataclass(frozen=True)
class StageScore:
    """What was measured on one stage, as percentages; kept on disk until all stages are done.

    Attributes:
        stage: conv1..conv5, ...
        dim: of its features.
        ap: AP by class.
        cost: the chosen C by class.
        folds: the mean AP of the folds for that C, by class.
        low_shot: by k: the chosen C (`cost`), the mAP of each draw (`draws`) with it, and the mean
            over the draws for every C (`by_cost`).
        seconds: that the SVMs took.
    """

    stage: str
    dim: int
    ap: dict[str, float]
    cost: dict[str, float]
    folds: dict[str, float]
    low_shot: dict[str, dict[str, Any]]
    seconds: float

    @property
    def mean_ap(self) -> float:
        """Over the classes."""
        return float(np.mean(list(self.ap.values())))


class SvmReadout:
    """All SVMs on one stage of a network: what the images of one stage say about each other.

    Attributes:
        products: of the training images with each other, `(N, N)`.
        test_products: of the test images with them, `(M, N)`.
    """

    def __init__(self, train_rows: Tensor, test_rows: Tensor, costs: Sequence[float]) -> None:
        self.products = unit_products(train_rows, train_rows)
        self.test_products = unit_products(test_rows, train_rows)
        self.costs = costs

    def cross_validate(self, targets: np.ndarray, check: "Check") -> np.ndarray:
        """Mean AP of the folds by class and C, `(C, costs)`."""
        folds = assign_folds(targets)
        num_classes = targets.shape[1]
        columns = [(label, fold) for label in range(num_classes) for fold in range(NUM_FOLDS)]
        # A problem learns from the two folds that it is not tested on.
        learnt = np.stack(
            [
                np.where(folds[:, label] == fold, IGNORED, targets[:, label])
                for label, fold in columns
            ],
            axis=1,
        )
        signs, weights = _problem(learnt)
        table = np.zeros((num_classes, len(self.costs)))
        found, before = None, 1.0
        # From the smallest C on, each solution is a good guess for the next.
        for number in check.each(np.argsort(self.costs).tolist(), "C by cross-validation"):
            cost = self.costs[number]
            start = None if found is None else found * (cost / before)
            found, before = fit(self.products, signs, cost * weights, start), cost
            scores = (self.products @ found).numpy()
            for column, (label, fold) in enumerate(columns):
                held = np.where(folds[:, label] == fold, targets[:, label], IGNORED)
                table[label, number] += stepwise_ap(scores[:, column], held) / NUM_FOLDS
        return table

    def test(self, targets: np.ndarray, costs: Sequence[float]) -> np.ndarray:
        """Scores of the test images `(M, C)` by SVMs on all training images, a C for each class."""
        signs, weights = _problem(targets)
        found = fit(self.products, signs, torch.tensor(costs, dtype=torch.float64) * weights)
        return (self.test_products @ found).numpy()

    def test_few(self, targets: np.ndarray, label: int) -> np.ndarray:
        """Scores of the test images `(M, costs)` for one class, learnt from few images."""
        used = torch.from_numpy(np.flatnonzero(targets[:, label] != IGNORED))
        signs, weights = _problem(targets[used.numpy(), label][:, None])
        costs = torch.tensor(self.costs, dtype=torch.float64)
        products = self.products[used][:, used]
        found = fit(products, signs.expand(-1, len(costs)), weights * costs)
        return (self.test_products[:, used] @ found).numpy()


def _problem(targets: np.ndarray) -> tuple[Tensor, Tensor]:
    """Signs and weights (for C = 1) of targets `(N, P)`."""
    found = torch.from_numpy(targets)
    signs = torch.where(found == 1, 1.0, -1.0).double()
    weights = torch.where(found == 1, WEIGHT_OF_POSITIVES, 1.0).double()
    return signs, torch.where(found == IGNORED, 0.0, weights)


class Check:
    """Progress over a loop, and its end between two turns when a signal asks for it."""

    def __init__(self, stop: StopSignal, stage: str) -> None:
        self.stop, self.stage = stop, stage

    def each(self, items: Sequence[Any], title: str) -> Any:
        """The items, one by one.

        Raises:
            Interrupted: a signal came.
        """
        for item in progress(items, title=f"{self.stage}: {title}"):
            if self.stop.raised:
                raise Interrupted(
                    f"stopped in {self.stage}, features and finished stages are kept: run again"
                )
            yield item


class VocSvm:
    """The readout of one network on one data set."""

    def __init__(self, task: Task, config: VocSvmConfig) -> None:
        self.task, self.config = task, config
        self.classes, self.train, self.test = dist.from_first(self._load)
        self.shots = self._choose_shots() if config.low_shot else ()
        stages = config.stage or task.weights.backbone.stage_names or ("backbone",)
        self.features = StageFeatures(task.weights, stages)

    def _load(self) -> tuple[tuple[str, ...], LabelledImages, LabelledImages]:
        root = self.task.location.root
        assert root is not None
        splits = [VocSplit(root, YEAR, name) for name in (TRAIN, TEST)]
        classes, targets = read_targets(splits)
        dataset = "demo" if self.task.location.is_demo else splits[0].folder.resolve().name
        pairs = zip(splits, targets, strict=True)
        train, test = (load_images(split, table, dataset) for split, table in pairs)
        return self._drop_rare(classes, train, test)

    def _drop_rare(
        self, classes: tuple[str, ...], train: LabelledImages, test: LabelledImages
    ) -> tuple[tuple[str, ...], LabelledImages, LabelledImages]:
        """Without the classes that cannot be learnt or tested; all of VOC2007 can."""
        enough = np.ones(len(classes), dtype=bool)
        for images, count in ((train, NUM_FOLDS), (test, 1)):
            for target in (0, 1):
                enough &= (images.targets == target).sum(axis=0) >= count
        if not enough.any():
            raise UserError(
                f"no class of {train.images.root} has {NUM_FOLDS} images in {TRAIN} and one in "
                f"{TEST} with it, and as many without: name more images"
            )
        if not enough.all():
            rare = [name for name, kept in zip(classes, enough, strict=True) if not kept]
            LOGGER.warning(
                f"{len(rare)} of {len(classes)} classes have too few images and are left out of "
                f"the mean: {some_of(rare)}"
            )
        kept = tuple(name for name, kept in zip(classes, enough, strict=True) if kept)
        parts = [dataclasses.replace(p, targets=p.targets[:, enough]) for p in (train, test)]
        return kept, parts[0], parts[1]

    def _choose_shots(self) -> tuple[int, ...]:
        """What was asked for; else the published ones that the images allow."""
        most = most_shots(self.train.targets)
        wanted = self.config.shots or VOC_SHOTS
        if most < (min(wanted) if self.config.shots is None else max(wanted)):
            raise UserError(
                f"--low-shot with {max(self.config.shots or (1,))} positive and "
                f"{len(self.classes) - 1} times as many negative images of every class: the "
                f"{TRAIN} images allow {most} at most: lower --shots, or name more images"
            )
        if most < max(wanted):
            LOGGER.warning(f"low-shot up to k = {most}: the {TRAIN} images allow no more")
        return tuple(k for k in wanted if k <= most)

    def run(self) -> list[Result]:
        """Measures every stage, and writes the rows."""
        before = self.task.weights_hash
        self.train, train_rows = self.extract(self.train)
        self.test, test_rows = self.extract(self.test)
        train, test = (self.features.split(rows) for rows in (train_rows, test_rows))
        with StopSignal() as stop:
            scores = [
                self._measure(stage, train[stage], test[stage], Check(stop, stage))
                for stage in self.features.stages
            ]
        self.features.prove_unchanged(before)
        rows = [row for score in scores for row in self._rows(score)]
        self.task.write_results(rows)
        if self.task.is_main:
            for stage in self.features.stages:
                self._kept(stage).unlink(missing_ok=True)
            LOGGER.info("\n" + format_table(scores, self.shots))
        return rows

    def extract(self, part: LabelledImages) -> tuple[LabelledImages, Tensor]:
        """Readable images, and all stages of each side by side, `(N, sum of D)`."""
        store = build_store(self.task, self.config.precision)
        extractor = pooled_extractor(self.features, self.config.precision)
        stored = store.load(extractor, part.images)
        LOGGER.info(f"pooled features of {part.images.split}: {stored.origin}")
        if not len(stored.bad):
            return part, stored.rows
        LOGGER.warning(f"left out: {unreadable(part.images, stored.bad)}")
        kept = np.delete(np.arange(len(part.images)), stored.bad)
        readable = LabelledImages(part.images.subset(kept), part.targets[kept])
        return readable, stored.rows[torch.from_numpy(kept)]

    @property
    def _fingerprint(self) -> str:
        """Of the images and of what is said about them."""
        parts = (self.train, self.test)
        digest = hashlib.sha256(joint_fingerprint([part.images for part in parts]).encode())
        digest.update(repr(self.classes).encode())
        for part in parts:
            digest.update(part.targets.tobytes())
        return digest.hexdigest()

    def _kept(self, stage: str) -> Path:
        """Where the numbers of a finished stage are kept until all are."""
        config = self.config
        decisive = (config.cost, config.difficult, config.precision, self.shots, config.samples)
        what = (self.task.weights_hash, self._fingerprint, decisive, config.seed)
        return self.task.output / f"{stage}-{config_hash({'what': repr(what)})[:12]}.json"

    def _measure(self, stage: str, train: Tensor, test: Tensor, check: Check) -> StageScore:
        return dist.from_first(lambda: self._measure_or_read(stage, train, test, check))

    def _measure_or_read(self, stage: str, train: Tensor, test: Tensor, check: Check) -> StageScore:
        file = self._kept(stage)
        if file.exists():
            LOGGER.info(f"{stage}: finished before")
            return StageScore(**json.loads(file.read_text("utf-8")))
        started, costs = time.monotonic(), self.config.cost
        targets = self.train.targets
        if self.config.difficult == "negative":
            targets = np.where(targets == IGNORED, 0, targets).astype(targets.dtype)
        readout = SvmReadout(train, test, costs)
        folds = readout.cross_validate(targets, check)
        best = folds.argmax(axis=1)
        chosen = [costs[number] for number in best]
        found = readout.test(targets, chosen)
        low_shot = {str(k): self._low_shot(readout, k, check) for k in self.shots}
        labels = range(len(self.classes))
        score = StageScore(
            stage=stage,
            dim=train.shape[1],
            ap=self._by_class(envelope_ap(found[:, c], self.test.targets[:, c]) for c in labels),
            cost=dict(zip(self.classes, chosen, strict=True)),
            folds=self._by_class(folds[c, best[c]] for c in labels),
            low_shot=low_shot,
            seconds=round(time.monotonic() - started, 1),
        )
        write_json(file, dataclasses.asdict(score))
        LOGGER.info(f"{stage}: mAP {score.mean_ap:.2f}, {score.seconds:.1f} s")
        return score

    def _by_class(self, values: Any) -> dict[str, float]:
        return {name: 100 * float(value) for name, value in zip(self.classes, values, strict=True)}

    def _low_shot(self, readout: SvmReadout, shots: int, check: Check) -> dict[str, Any]:
        """MAP of every draw for the C with the best mean over the draws."""
        table = np.zeros((self.config.samples, len(self.config.cost)))
        for draw in check.each(range(self.config.samples), f"k = {shots}"):
            targets = draw_few(self.train.targets, shots, self.config.seed + draw)
            for label in range(len(self.classes)):
                found = readout.test_few(targets, label)
                wanted = self.test.targets[:, label]
                table[draw] += [envelope_ap(column, wanted) for column in found.T]
        table *= 100 / len(self.classes)
        means = table.mean(axis=0)
        best = int(means.argmax())
        by_cost = {f"{c:g}": m for c, m in zip(self.config.cost, means.tolist(), strict=True)}
        return {
            "cost": self.config.cost[best],
            "draws": table[:, best].tolist(),
            "by_cost": by_cost,
        }

    def _rows(self, score: StageScore) -> list[Result]:
        """A row for the whole of trainval; for each k one for each draw."""
        details = {
            "stage": score.stage,
            "dim": score.dim,
            "num_train": len(self.train.images),
            "num_test": len(self.test.images),
            "num_classes": len(self.classes),
            "seconds": score.seconds,
        }
        full = {**details, "per_class": score.ap, "cost": score.cost, "folds": score.folds}
        rows = [self._row(score.stage, None, score.mean_ap, self.config.seed, full)]
        for shots, found in score.low_shot.items():
            few = {"shots": int(shots), "cost": found["cost"], "by_cost": found["by_cost"]}
            few["cost_chosen_on"] = TEST
            rows += [
                self._row(score.stage, shots, value, self.config.seed + draw, {**details, **few})
                for draw, value in enumerate(found["draws"])
            ]
        return rows

    def _row(
        self, stage: str, shots: str | None, value: float, seed: int, details: Mapping[str, Any]
    ) -> Result:
        row = self.task.result(
            protocol=self._protocol(stage, shots),
            metric=METRIC,
            value=value,
            images=[self.train.images, self.test.images],
            details=details,
        )
        return dataclasses.replace(row, seed=seed, data_fingerprint=self._fingerprint)

    def _protocol(self, stage: str, shots: str | None) -> str:
        words = [f"stage={stage}"]
        if shots is not None:
            words.append(f"k={shots}")
        elif self.config.difficult != "ignore":
            words.append(f"difficult={self.config.difficult}")
        if self.config.cost != VOC_COSTS:
            words.append("cost=" + ",".join(f"{cost:g}" for cost in self.config.cost))
        return " ".join(words)


def format_table(scores: Sequence[StageScore], shots: Sequence[int]) -> str:
    """A line for each stage, then the best one."""
    head = f"{'stage':<12}{'dim':>7}{'mAP %':>9}" + "".join(f"{f'k={k}':>15}" for k in shots)
    lines = [head]
    for score in scores:
        line = f"{score.stage:<12}{score.dim:>7}{score.mean_ap:>9.2f}"
        for k in shots:
            found = Measured.of(score.low_shot[str(k)]["draws"])
            spread = f" ± {found.std:.2f}" if found.std is not None else ""
            line += f"{found.mean:>{15 - len(spread)}.2f}{spread}"
        lines.append(line)
    best = max(scores, key=lambda score: score.mean_ap)
    lines.append(f"best stage: {best.stage}, mAP {best.mean_ap:.2f}")
    return "\n".join(lines)


def find_voc(named: str | None, weights: Weights) -> DataLocation:
    """The VOC data that was named, or the embedded ones."""
    source = locate_voc(named)
    return DataLocation("demo" if source.is_demo else "folder", source.root)


def run_voc_svm(config: VocSvmConfig) -> list[Result]:
    """The command, also for use from Python: a row for each stage, and for each low-shot draw."""
    with open_task("voc_svm", config, find_voc) as task:
        readout = VocSvm(task, config)
        LOGGER.info(
            f"{len(readout.train.images):,} training and {len(readout.test.images):,} test images "
            f"of {readout.train.images.dataset}, {len(readout.classes)} classes"
        )
        rows = readout.run()
        untrained = task.open_untrained()
        if untrained is not None:
            LOGGER.info("the same network untrained:")
            with untrained.claim():
                VocSvm(untrained, config).run()
        return rows

"""run_fewshot(config): accuracy over few-shot episodes, each classified by the nearest class mean.

An episode is drawn by its key alone: seed, shots, number. Distances are Euclidean, as those of
prototypical networks, which this is with a frozen network.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instdisc.errors import UserError
from instdisc.features.embed import embed_sets
from instdisc.images.sets import ImageSet, Split, has_split
from instdisc.runs.log import LOGGER, progress
from instdisc.runs.results import Result
from instdisc.training.seed import generator
from transfer.nearest.knn import build_store
from transfer.nearest.settings import SHOTS, FewshotConfig
from transfer.task import Task, open_task

NORMAL_95 = 1.96  # of a normal distribution 95% lie within so many deviations of its mean


@dataclasses.dataclass(frozen=True)
class Episode:
    """Rows of a feature table, class by class: support `(ways, shots)`, queries `(ways, n)`."""

    support: Tensor
    queries: Tensor


def draw_episode(
    members: Sequence[Tensor], *, ways: int, shots: int, queries: int, seed: int, number: int
) -> Episode:
    """Episode `number`: classes without repetition, and images of each without repetition.

    Args:
        members: for each class the rows of its images, as many as are drawn at least.
        ways: classes of an episode.
        shots: images of a class to learn from.
        queries: images of a class to classify.
        seed: of the run.
        number: of the episode.
    """
    rng = generator(seed, "episode", shots, number)
    drawn = []
    for label in torch.randperm(len(members), generator=rng)[:ways].tolist():
        order = torch.randperm(len(members[label]), generator=rng)[: shots + queries]
        drawn.append(members[label][order])
    support, asked = torch.stack(drawn).split([shots, queries], dim=1)
    return Episode(support, asked)


def episode_accuracy(features: Tensor, episode: Episode) -> float:
    """Part of the queries that are nearest to the mean of their own class."""
    means = features[episode.support].double().mean(dim=1)
    asked = features[episode.queries].double()
    # Differences, not products: the means of an untrained network nearly coincide.
    mode = "donot_use_mm_for_euclid_dist"
    nearest = torch.cdist(asked.flatten(0, 1), means, compute_mode=mode).argmin(dim=1)
    own = torch.arange(len(means)).repeat_interleave(asked.shape[1])
    return float((nearest == own).double().mean())


@dataclasses.dataclass(frozen=True)
class Score:
    """Percentages over the episodes with so many shots: mean, deviation, 95% interval (±)."""

    shots: int
    num_classes: int
    mean: float
    std: float
    interval: float


class FewshotReadout:
    """The episodes of one network on one data set."""

    def __init__(self, task: Task, config: FewshotConfig) -> None:
        self.task, self.config = task, config
        self.split, self.sets = self._choose_split()
        self.shots = self._choose_shots()

    def _choose_split(self) -> tuple[str, list[ImageSet]]:
        """What was asked for; else val, or all images where the classes of val are too small."""
        names: tuple[Split, ...] = ("train", "val")
        found = [split for split in names if has_split(self.task.location, split)]
        wanted = self.config.split
        if wanted == "train" or wanted == "val":
            return wanted, [self.task.load_labelled(wanted)]
        if wanted is None and "val" in found:
            val = [self.task.load_labelled("val")]
            if self._most_shots(val) >= max(self.config.shots or (1,)):
                return "val", val
        return "all", [self.task.load_labelled(split) for split in found]

    def _most_shots(self, sets: Sequence[ImageSet]) -> int:
        """What as many classes as an episode has can give, beside the queries; at least 0."""
        ways, sizes = self.config.ways, sorted(class_sizes(sets).values(), reverse=True)
        return max(0, sizes[ways - 1] - self.config.queries) if len(sizes) >= ways else 0

    def _choose_shots(self) -> tuple[int, ...]:
        """What was asked for; else those of 1, 5 and 20 for which there are images."""
        config = self.config
        most = self._most_shots(self.sets)
        wanted = config.shots or SHOTS
        if most < (min(wanted) if config.shots is None else max(wanted)):
            need = config.queries + (1 if config.shots is None else max(wanted))
            sizes = class_sizes(self.sets).values()
            raise UserError(
                f"an episode needs {config.ways} classes with {need} images each, and "
                f"{sum(size >= need for size in sizes)} of the {len(sizes)} classes of "
                f"{self.task.location.root or self.sets[0].dataset} have them: lower --ways, "
                "--shots or --queries, or take --split all"
            )
        if most < max(wanted):
            LOGGER.warning(f"up to {most} shots: the classes have no images for more")
        return tuple(shots for shots in wanted if shots <= most)

    def run(self) -> list[Score]:
        """Scores by shots."""
        config = self.config
        found = embed_sets(
            self.task.weights,
            self.sets,
            build_store(self.task, config.precision),
            features=config.features,
            normalize=config.normalize,
        )
        features = torch.from_numpy(np.asarray(found.features))
        _, labels = np.unique(found.classes, return_inverse=True)
        members = [torch.from_numpy(np.flatnonzero(labels == c)) for c in range(labels.max() + 1)]
        return [self._score(features, members, shots) for shots in self.shots]

    def _score(self, features: Tensor, members: Sequence[Tensor], shots: int) -> Score:
        config = self.config
        sizes = {"ways": config.ways, "shots": shots, "queries": config.queries}
        large = [rows for rows in members if len(rows) >= shots + config.queries]
        if len(large) < config.ways:  # unreadable images were left out
            raise UserError(
                f"{len(large)} classes have {shots + config.queries} readable images, and an "
                f"episode needs {config.ways}: lower --ways, --shots or --queries"
            )
        values = []
        for n in progress(range(config.episodes), title=f"{shots}-shot", enabled=self.task.is_main):
            episode = draw_episode(large, **sizes, seed=config.seed, number=n)
            values.append(100 * episode_accuracy(features, episode))
        std = statistics.pstdev(values)
        interval = NORMAL_95 * std / len(values) ** 0.5
        return Score(shots, len(large), statistics.fmean(values), std, interval)

    def results(self, scores: Sequence[Score]) -> list[Result]:
        """A row for each number of shots."""
        config = self.config
        features = f"{config.features} normalized" if config.normalize else config.features
        rows = []
        for score in scores:
            details: dict[str, Any] = {
                "shots": score.shots,
                "interval95": round(score.interval, 4),
                "std": round(score.std, 4),
                "num_episodes": config.episodes,
                "num_classes": score.num_classes,
                "num_images": sum(map(len, self.sets)),
            }
            protocol = (
                f"{config.ways}-way {score.shots}-shot queries={config.queries} "
                f"episodes={config.episodes} split={self.split} {features}"
            )
            rows.append(
                self.task.result(
                    protocol=protocol,
                    metric="top1",
                    value=score.mean,
                    images=self.sets,
                    details=details,
                )
            )
        return rows


def class_sizes(sets: Sequence[ImageSet]) -> dict[str, int]:
    """How many images each class has."""
    counts: dict[str, int] = {}
    for images in sets:
        for label, count in enumerate(np.bincount(images.labels, minlength=len(images.classes))):
            name = images.classes[label]
            counts[name] = counts.get(name, 0) + int(count)
    return counts


def format_table(scores: Sequence[Score]) -> str:
    """A line for each number of shots."""
    lines = [f"{'shots':>6}{'accuracy %':>14}{'95% interval':>16}"]
    lines += [f"{s.shots:>6}{s.mean:>14.2f}{f'± {s.interval:.2f}':>16}" for s in scores]
    return "\n".join(lines)


def run_fewshot(config: FewshotConfig) -> list[Result]:
    """The command: a row for each number of shots."""
    with open_task("fewshot", config) as task:
        rows = _measure(task, config, "")
        untrained = task.open_untrained()
        if untrained is not None:
            _measure(untrained, config, "the same network untrained:")
        return rows


def _measure(task: Task, config: FewshotConfig, title: str) -> list[Result]:
    readout = FewshotReadout(task, config)
    scores = readout.run()
    count, dataset = sum(map(len, readout.sets)), readout.sets[0].dataset
    LOGGER.info(
        f"{title}\n{config.ways}-way, {config.queries} queries, {config.episodes} episodes, "
        f"{count:,} images ({readout.split}) of {dataset}\n{format_table(scores)}\n"
    )
    rows = readout.results(scores)
    task.write_results(rows)
    return rows

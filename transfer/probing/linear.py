"""run_linear(config): linear probes of a frozen network, all stages at once (section 4.2)."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instdisc.errors import UserError
from instdisc.images.sets import ImageSet
from instdisc.images.subsets import hold_out
from instdisc.runs.checkpoint import remove_checkpoints
from instdisc.runs.log import LOGGER
from instdisc.runs.results import Result, config_hash
from instdisc.training.seed import generator
from transfer.finetuning.predictions import accuracy, predict
from transfer.finetuning.supervised import LoopSettings, Problem, SupervisedTrainer
from transfer.probing.pooled import StageFeatures
from transfer.probing.settings import LinearConfig
from transfer.probing.sources import build_source
from transfer.probing.svm import LOSSES, Probes, Standardizer, fit_liblinear
from transfer.task import Task, open_task

NUM_FOR_STATISTICS = (128, 1024)  # at least and at most; an eighth of the images between
MOST_HELD_OUT = 10_000
BYTES_IN_LIBLINEAR = 28  # a value as float32, as float64, and in liblinear's own format
# What a protocol names if it is not the default.
NAMED = ("loss", "cost", "held_out", "epochs", "batch_size", "lr", "augment")
Costs = Mapping[str, Sequence[float]]


def default_epochs(num_images: int) -> int:
    """12 passes over 2,000 images, fewer over more, one over ImageNet.

    What counts is the number of steps, which grows with the square root of the number of images.
    """
    return max(1, round(12 * (2000 / num_images) ** 0.5))


@dataclasses.dataclass(frozen=True)
class Choice:
    """C by stage, and what it was chosen by.

    Attributes:
        costs: the chosen C.
        numbers: its place among the costs that were tried.
        scores: top-1 on held-out images in percent, by stage and cost.
        num_held_out: how many images that were.
        model: probes for all costs, trained without those images; None if there was no choice.
    """

    costs: dict[str, float]
    numbers: dict[str, int]
    scores: dict[str, dict[str, float]]
    num_held_out: int
    model: nn.Module | None


class LinearProbing:
    """The probes of one network on one data set."""

    def __init__(self, task: Task, config: LinearConfig) -> None:
        self.task, self.config, self.process = task, config, task.process
        if config.solver == "liblinear" and task.process.world_size > 1:
            raise UserError("liblinear is one process: use --solver sgd, or start without torchrun")
        self.hash_before = task.weights_hash
        self.features = StageFeatures(task.weights, config.stage)
        self.train, self.val = task.load_train_and_val()
        num_images = len(self.train) + len(self.val)
        self.source = build_source(task, config, self.features, num_images)
        self.checkpoints: list[SupervisedTrainer] = []
        self.seconds: dict[str, float] = {}  # by part of the work

    def run(self) -> list[Result]:
        """Chooses C on held-out training images, trains, and only then looks at val."""
        with self._timed("features"):
            train = self.source.readable(self.train)
        with self._timed("probes"):
            self.standardizers = self._standardize(train)
            choice = self._choose(train)
            numbers, model = choice.numbers, choice.model
            # Streamed, a second pass for the sake of a few more images would double the cost.
            if model is None or self.source.is_stored:
                model = self._fit(train, {stage: (cost,) for stage, cost in choice.costs.items()})
                numbers = dict.fromkeys(choice.costs, 0)
        with self._timed("val"):
            val = self.source.readable(self.val)
            ranked = self._predict(model, val)
        self.features.prove_unchanged(self.hash_before)
        LOGGER.info(", ".join(f"{part} {value:.1f} s" for part, value in self.seconds.items()))
        rows = []
        for stage, number in numbers.items():
            rows += self._rows(stage, ranked[f"{stage}/{number}"], train, val, choice)
        self.task.write_results(rows)
        if self.task.is_main:
            for trainer in self.checkpoints:
                remove_checkpoints(trainer.last_checkpoint)
        return rows

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[part] = time.monotonic() - started

    def _standardize(self, images: ImageSet) -> dict[str, Standardizer]:
        """From a random sample of the training images."""
        least, most = NUM_FOR_STATISTICS
        count = min(most, max(least, len(images) // 8))
        order = torch.randperm(len(images), generator=generator(self.config.seed, "statistics"))
        sample = images.subset(np.sort(order[:count].numpy()))
        parts = self.features.split(self.source.rows(sample))
        return {stage: Standardizer.fit(part) for stage, part in parts.items()}

    def _choose(self, train: ImageSet) -> Choice:
        """The C that does best on held-out images, for each stage; ties go to the first."""
        config = self.config
        stages: tuple[str, ...] = config.stage
        costs = config.cost
        if len(costs) == 1:
            return Choice(dict.fromkeys(stages, costs[0]), dict.fromkeys(stages, 0), {}, 0, None)
        fraction = min(config.held_out, MOST_HELD_OUT / len(train))
        kept, held = hold_out(train.labels, fraction, config.seed)
        if not len(held):
            raise UserError("no class has two training images to choose C on: give one --cost")
        model = self._fit(train.subset(kept), dict.fromkeys(stages, costs))
        images = train.subset(held)
        labels = torch.from_numpy(images.labels)
        ranked = self._predict(model, images)
        scores = {name: accuracy(best, labels, 1) for name, best in ranked.items()}
        found = {stage: [scores[f"{stage}/{i}"] for i in range(len(costs))] for stage in stages}
        numbers = {stage: int(np.argmax(found[stage])) for stage in stages}
        return Choice(
            costs={stage: costs[number] for stage, number in numbers.items()},
            numbers=numbers,
            scores={
                stage: {f"{cost:g}": value for cost, value in zip(costs, values, strict=True)}
                for stage, values in found.items()
            },
            num_held_out=len(images),
            model=model,
        )

    def _fit(self, images: ImageSet, costs: Costs) -> nn.Module:
        """Trains a probe for every stage and cost."""
        config, n = self.config, len(images)
        num_costs = len(next(iter(costs.values())))
        probes = Probes(self.standardizers, len(images.classes), num_costs)
        model = self.source.build_model(probes)
        if config.solver == "liblinear":
            self._fit_in_memory(probes, images, costs)
            return model.to(self.process.device)
        epochs = config.epochs or default_epochs(n)
        settings = LoopSettings(
            epochs=epochs,
            batch_size=config.batch_size,
            lr=config.lr,
            lr_milestones=(0.6 * epochs, 0.85 * epochs),
            nesterov=True,
            skip_bad=config.skip_bad_images,
            seed=config.seed,
            # A stored row is there at once; only images are worth a worker.
            workers=0 if self.source.is_stored else config.workers,
            save_minutes=config.save_minutes,
        )
        parts = (config.loss, config.augment, sorted(costs.items()), self.source.is_stored)
        sets = (images.fingerprint, self.hash_before, self.task.weights.spec)
        key = config_hash({**settings.decisive, "parts": repr(parts), "sets": repr(sets)})
        batch = min(config.batch_size, n)
        problem = Problem(
            model=model,
            groups=probes.groups(
                self.standardizers, costs, num_images=n, batch_size=batch, loss=config.loss
            ),
            loss=LOSSES[config.loss],
            samples=self.source.samples(images, training=True),
            labels=torch.from_numpy(images.labels),
            key=key,
        )
        folder = self.task.output / f"sgd-{key[:8]}"
        trainer = SupervisedTrainer(problem, settings, self.process, folder)
        LOGGER.info(f"{len(costs) * num_costs} probes on {n:,} images, {trainer.num_steps} steps")
        trainer.restore()
        trainer.train()
        self.checkpoints.append(trainer)
        return model

    def _fit_in_memory(self, probes: Probes, images: ImageSet, costs: Costs) -> None:
        """scikit-learn's solver, stage by stage."""
        for stage, width in self.features.widths.items():
            need = len(images) * width * BYTES_IN_LIBLINEAR / 1e9
            if need > self.config.memory_gb:
                raise UserError(
                    f"liblinear needs {need:.1f} GB for {stage} of {len(images):,} images: use "
                    "--solver sgd, or raise --memory-gb"
                )
        for stage, part in self.features.split(self.source.rows(images)).items():
            inputs = self.standardizers[stage](part).numpy()
            for number, cost in enumerate(costs[stage]):
                weight, bias = fit_liblinear(inputs, images.labels, cost, self.config.seed)
                with torch.no_grad():
                    probes.weights[f"{stage}/{number}"].copy_(torch.from_numpy(weight))
                    probes.biases[f"{stage}/{number}"].copy_(torch.from_numpy(bias))
                LOGGER.info(f"liblinear: {stage}, C {cost:g}, {len(images):,} images")

    def _predict(self, model: nn.Module, images: ImageSet) -> dict[str, Tensor]:
        return predict(
            model,
            self.source.samples(images, training=False),
            len(images),
            self.process,
            batch_size=self.config.batch_size,
            workers=0 if self.source.is_stored else self.config.workers,
            skip_bad=self.config.skip_bad_images,
        )

    def _rows(
        self, stage: str, ranked: Tensor, train: ImageSet, val: ImageSet, choice: Choice
    ) -> list[Result]:
        """Top-1 and top-5 of a stage."""
        labels = torch.from_numpy(val.labels)
        readable = labels[ranked[:, 0] >= 0]
        per_class = {
            val.classes[label]: accuracy(ranked[labels == label], labels[labels == label], 1)
            for label in readable.unique().tolist()
        }
        details: dict[str, Any] = {
            "stage": stage,
            "dim": self.features.widths[stage],
            "cost": choice.costs[stage],
            "held_out": choice.scores.get(stage, {}),
            "num_held_out": choice.num_held_out,
            "trained_on_held_out": self.source.is_stored,
            "num_train": len(train),
            "seconds": dict(self.seconds),
            "per_class": per_class,
        }
        return [
            self.task.result(
                protocol=self._protocol(stage),
                metric=f"top{k}",
                value=accuracy(ranked, labels, k),
                images=[train, val],
                details=details,
            )
            for k in (1, 5)
        ]

    def _protocol(self, stage: str) -> str:
        config = self.config
        defaults = {f.name: f.default for f in dataclasses.fields(LinearConfig)}
        words = [f"stage={stage}", f"solver={config.solver}"]
        if not self.source.is_stored:
            words.append("streamed")
        for name in NAMED:
            value = getattr(config, name)
            if value != defaults[name]:
                shown = ",".join(f"{v:g}" for v in value) if isinstance(value, tuple) else value
                words.append(f"{name}={shown}")
        return " ".join(words)


def print_table(rows: Sequence[Result]) -> None:
    """Top-1 and top-5 of every stage."""
    LOGGER.info(f"{'stage':<12}{'dim':>7}{'C':>8}{'top-1 %':>10}{'top-5 %':>10}")
    for top1, top5 in zip(rows[::2], rows[1::2], strict=True):
        stage, dim, cost = (top1.details[name] for name in ("stage", "dim", "cost"))
        LOGGER.info(f"{stage:<12}{dim:>7}{cost:>8g}{top1.value:>10.2f}{top5.value:>10.2f}")


def run_linear(config: LinearConfig) -> list[Result]:
    """The whole task, also for use from Python; returns two rows per stage."""
    task = open_task("linear", config)
    try:
        rows = LinearProbing(task, config).run()
        print_table(rows)
        untrained = task.open_untrained()
        if untrained is not None:
            LOGGER.info("the same network untrained:")
            with contextlib.closing(untrained.claim()):
                print_table(LinearProbing(untrained, config).run())
        return rows
    finally:
        task.close()

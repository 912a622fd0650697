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
from transfer.probing.heads import LinearHeads
from transfer.probing.pooled import StageFeatures
from transfer.probing.settings import RECIPES, Candidate, LinearConfig
from transfer.probing.sources import build_source
from transfer.probing.svm import LOSSES, Probes, Standardizer, fit_liblinear
from transfer.task import Task, open_task

NUM_FOR_STATISTICS = (128, 1024)  # at least and at most; an eighth of the images between
MOST_HELD_OUT = 10_000
BYTES_IN_LIBLINEAR = 28  # a value as float32, as float64, and in liblinear's own format
# What a protocol names if it is not the recipe's.
NAMED = (
    *("pooling", "loss", "cost", "weight_decay", "batch_norm", "head_init", "held_out", "epochs"),
    *("batch_size", "lr", "lr_milestones", "momentum", "nesterov", "augment"),
)
Candidates = Mapping[str, Sequence[Candidate]]


@dataclasses.dataclass(frozen=True)
class Choice:
    """C and learning rate by stage, and what they were chosen by.

    Attributes:
        chosen: the candidate that is used.
        numbers: its place among those that were tried.
        scores: top-1 on held-out images in percent, by stage and candidate.
        num_held_out: how many images that were.
        model: probes for all candidates, trained without those images; None if there was no choice.
    """

    chosen: dict[str, Candidate]
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
        stages = config.stage or task.weights.backbone.stage_names or ("backbone",)
        self.features = StageFeatures(task.weights, stages, config.pooling)
        self.train, self.val = task.load_train_and_val()
        num_images = len(self.train) + len(self.val)
        self.source = build_source(task, config, self.features, num_images)
        self.checkpoints: list[SupervisedTrainer] = []
        self.seconds: dict[str, float] = {}  # by part of the work

    def run(self) -> list[Result]:
        """Chooses C and rate on held-out training images, trains, and only then looks at val."""
        with self._timed("features"):
            train = self.source.readable(self.train)
        with self._timed("probes"):
            self.standardizers = self._standardize(train) if self.config.cost else {}
            choice = self._choose(train)
            numbers, model = choice.numbers, choice.model
            # Streamed, a second pass for the sake of a few more images would double the cost.
            if model is None or self.source.is_stored:
                model = self._fit(train, {stage: (one,) for stage, one in choice.chosen.items()})
                numbers = dict.fromkeys(choice.chosen, 0)
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
        """What does best on held-out images, for each stage; ties go to the first."""
        config = self.config
        stages, tried = self.features.stages, config.candidates
        if len(tried) == 1:
            return Choice(dict.fromkeys(stages, tried[0]), dict.fromkeys(stages, 0), {}, 0, None)
        fraction = min(config.held_out, MOST_HELD_OUT / len(train))
        kept, held = hold_out(train.labels, fraction, config.seed)
        if not len(held):
            raise UserError(
                "no class has two training images to choose on: give one --lr, and one --cost"
            )
        model = self._fit(train.subset(kept), dict.fromkeys(stages, tried))
        images = train.subset(held)
        labels = torch.from_numpy(images.labels)
        ranked = self._predict(model, images)
        scores = {name: accuracy(best, labels, 1) for name, best in ranked.items()}
        found = {stage: [scores[f"{stage}/{i}"] for i in range(len(tried))] for stage in stages}
        numbers = {stage: int(np.argmax(found[stage])) for stage in stages}
        labels_of = [describe_candidate(config, one) for one in tried]
        return Choice(
            chosen={stage: tried[number] for stage, number in numbers.items()},
            numbers=numbers,
            scores={
                stage: dict(zip(labels_of, values, strict=True)) for stage, values in found.items()
            },
            num_held_out=len(images),
            model=model,
        )

    def _fit(self, images: ImageSet, candidates: Candidates) -> nn.Module:
        """Trains a probe for every stage and candidate."""
        config, n = self.config, len(images)
        if config.solver == "liblinear":
            return self._fit_in_memory(images, candidates)
        probes, groups = self._build_probes(images, candidates)
        model = self.source.build_model(probes)
        settings = LoopSettings(
            epochs=config.epochs,
            batch_size=config.batch_size,
            lr=1.0,  # times each group's own
            lr_milestones=config.milestones,
            momentum=config.momentum,
            nesterov=config.nesterov,
            skip_bad=config.skip_bad_images,
            seed=config.seed,
            # A stored row is there at once; only images are worth a worker.
            workers=0 if self.source.is_stored else config.workers,
            save_minutes=config.save_minutes,
        )
        heads = (config.weight_decay, config.batch_norm, config.head_init, config.pooling)
        parts = (config.loss, config.augment, self.source.is_stored, *heads)
        tried = [(stage, *map(tuple, those)) for stage, those in sorted(candidates.items())]
        sets = (images.fingerprint, self.hash_before, self.task.weights.spec)
        what = {"parts": repr(parts), "candidates": repr(tried), "sets": repr(sets)}
        key = config_hash({**settings.decisive, **what})
        problem = Problem(
            model=model,
            groups=groups,
            loss=LOSSES[config.loss],
            samples=self.source.samples(images, training=True),
            labels=torch.from_numpy(images.labels),
            key=key,
        )
        folder = self.task.output / f"sgd-{key[:8]}"
        trainer = SupervisedTrainer(problem, settings, self.process, folder)
        count = sum(map(len, candidates.values()))
        LOGGER.info(
            f"{config.recipe}: {count} probe{'s' * (count > 1)} on {n:,} images, "
            f"{config.epochs} epochs, {trainer.num_steps} steps"
        )
        trainer.restore()
        trainer.train()
        self.checkpoints.append(trainer)
        return model

    def _build_probes(
        self, images: ImageSet, candidates: Candidates
    ) -> tuple[nn.Module, list[dict[str, Any]]]:
        """Untrained probes, and their parameters for the optimiser."""
        config, num_classes = self.config, len(images.classes)
        tried = next(iter(candidates.values()))
        if config.weight_decay is None:
            svms = Probes(self.standardizers, num_classes, len(tried))
            return svms, svms.groups(
                self.standardizers,
                candidates,
                num_images=len(images),
                batch_size=min(config.batch_size, len(images)),
                loss=config.loss,
            )
        heads = LinearHeads(
            self.features.widths,
            self.features.channels,
            num_classes,
            num_heads=len(tried),
            batch_norm=config.batch_norm,
            init=config.head_init,
            seed=config.seed,
        )
        rates = {stage: [one.lr for one in those] for stage, those in candidates.items()}
        return heads, heads.groups(rates, config.weight_decay)

    def _fit_in_memory(self, images: ImageSet, candidates: Candidates) -> nn.Module:
        """scikit-learn's solver, stage by stage."""
        tried = next(iter(candidates.values()))
        probes = Probes(self.standardizers, len(images.classes), len(tried))
        for stage, width in self.features.widths.items():
            need = len(images) * width * BYTES_IN_LIBLINEAR / 1e9
            if need > self.config.memory_gb:
                raise UserError(
                    f"liblinear needs {need:.1f} GB for {stage} of {len(images):,} images: use "
                    "--solver sgd, or raise --memory-gb"
                )
        for stage, part in self.features.split(self.source.rows(images)).items():
            inputs = self.standardizers[stage](part).numpy()
            for number, (cost, _) in enumerate(candidates[stage]):
                assert cost is not None, "an SVM has a C"
                weight, bias = fit_liblinear(inputs, images.labels, cost, self.config.seed)
                with torch.no_grad():
                    probes.weights[f"{stage}/{number}"].copy_(torch.from_numpy(weight))
                    probes.biases[f"{stage}/{number}"].copy_(torch.from_numpy(bias))
                LOGGER.info(f"liblinear: {stage}, C {cost:g}, {len(images):,} images")
        return self.source.build_model(probes).to(self.process.device)

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
            "recipe": self.config.recipe,
            **choice.chosen[stage]._asdict(),
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
        expected = {**defaults, **RECIPES[config.recipe]}
        is_paper = config.recipe == "paper"
        words = [f"stage={stage}"]
        words.append(f"solver={config.solver}" if is_paper else f"recipe={config.recipe}")
        if not self.source.is_stored and config.augment == "off":
            words.append("streamed")
        for name in NAMED:
            value = getattr(config, name)
            if value != expected[name]:
                shown = ",".join(f"{v:g}" for v in value) if isinstance(value, tuple) else value
                words.append(f"{name}={shown}")
        return " ".join(words)


def describe_candidate(config: LinearConfig, candidate: Candidate) -> str:
    """What tells it from the others of a command: its C, its learning rate, or both."""
    words = [f"{candidate.cost:g}"] if candidate.cost is not None else []
    if len(config.lr) > 1 or candidate.cost is None:
        words.append(f"lr={candidate.lr:g}")
    return " ".join(words)


def print_table(rows: Sequence[Result]) -> None:
    """Top-1 and top-5 of every stage."""
    has_cost = rows[0].details["cost"] is not None
    has_lr = not has_cost or any("lr=" in tried for tried in rows[0].details["held_out"])
    head = f"{'C':>8}" * has_cost + f"{'lr':>8}" * has_lr
    LOGGER.info(f"{'stage':<12}{'dim':>7}{head}{'top-1 %':>10}{'top-5 %':>10}")
    for top1, top5 in zip(rows[::2], rows[1::2], strict=True):
        stage, dim, cost, lr = (top1.details[name] for name in ("stage", "dim", "cost", "lr"))
        chosen = (f"{cost:>8g}" if has_cost else "") + f"{lr:>8g}" * has_lr
        LOGGER.info(f"{stage:<12}{dim:>7}{chosen}{top1.value:>10.2f}{top5.value:>10.2f}")


def run_linear(config: LinearConfig) -> list[Result]:
    """The whole task, also for use from Python; returns two rows per stage."""
    with open_task("linear", config) as task:
        rows = LinearProbing(task, config).run()
        print_table(rows)
        untrained = task.open_untrained()
        if untrained is not None:
            LOGGER.info("the same network untrained:")
            with untrained.claim():
                print_table(LinearProbing(untrained, config).run())
        return rows

"""run_semisup(config): all fractions, initialisations, trials of a command, and their results."""

import dataclasses
from pathlib import Path
from typing import Any

from instdisc.errors import UserError
from instdisc.images.subsets import LabeledSubset, choose_labeled, hold_out, read_list
from instdisc.runs.log import LOGGER
from instdisc.runs.results import Result, check_results, summarize
from transfer.finetuning.curve import draw_curve
from transfer.finetuning.settings import RECIPES, SemisupConfig
from transfer.finetuning.trials import Trial, open_start, run_trial
from transfer.task import Task, open_task

# What a recipe may set about training; a protocol names those that differ from the recipe.
TRAINED_BY = (
    "epochs",
    "batch_size",
    "lr",
    "head_lr_scale",
    "lr_milestones",
    "lr_factor",
    "momentum",
    "nesterov",
    "head_init",
    "weight_decay",
    "amp",
)
SWEPT = ("lr", "head_lr_scale")


def describe_protocol(config: SemisupConfig, mode: str) -> str:
    """The protocol without fraction and initialisation: what the points of a curve share."""
    recipe = config.recipe or "paper"
    defaults = {field.name: field.default for field in dataclasses.fields(SemisupConfig)}
    expected = {**defaults, **RECIPES[recipe]}
    words = [f"subset={mode}", f"recipe={recipe}"]
    if config.sweep:
        words.append("sweep")
    for name in TRAINED_BY:
        value = getattr(config, name)
        if value != expected[name] and not (config.sweep and name in SWEPT):
            shown = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words.append(f"{name}={shown}")
    return " ".join(words)


class SemiSupervised:
    """All trials of one command."""

    def __init__(self, task: Task, config: SemisupConfig) -> None:
        self.task, self.config = task, config
        # Lists only: no validation image is opened before a network has been trained.
        self.train, self.val = task.load_train_and_val()
        self.starts = [open_start(how, task.weights) for how in config.init]
        # All of them now: a fraction that cannot be drawn must not be found out after hours.
        choices: list[float | str] = [*config.labeled, *config.label_lists]
        self.subsets = [self._draw(choice) for choice in choices]
        if config.recipe == "demo" and config.subset == "balanced":
            LOGGER.info(
                "demo recipe: the same number of labels for each class, not the paper's draw"
            )

    def _draw(self, choice: float | str) -> list[LabeledSubset]:
        """The labelled images of every trial."""
        config = self.config
        if isinstance(choice, str):
            return [read_list(self.train, Path(choice))] * config.trials
        return [
            choose_labeled(self.train, choice, mode=config.subset, seed=config.seed + trial)
            for trial in range(config.trials)
        ]

    def run(self) -> list[Result]:
        """Runs what has not been measured yet; returns the rows of all trials."""
        config = self.config
        rows: list[Result] = []
        for start in self.starts:
            for subsets in self.subsets:
                first = Trial(start, subsets[0], config.seed, config.lr, config.head_lr_scale)
                tried: list[dict[str, float]] = []
                if config.sweep:
                    first, tried = self._sweep(first)
                for number, subset in enumerate(subsets):
                    seed = config.seed + number
                    trial = dataclasses.replace(first, subset=subset, seed=seed)
                    rows += self._measure(trial, tried)
        return rows

    def _sweep(self, trial: Trial) -> tuple[Trial, list[dict[str, float]]]:
        """The settings that do best on held-out labelled images; ties go to the first."""
        config, labeled = self.config, trial.subset.images
        kept, held = hold_out(labeled.labels, config.held_out, trial.seed)
        if len(held) == 0:
            raise UserError("--sweep holds labelled images out: it needs two of some class")
        tried: list[dict[str, float]] = []
        for lr in config.sweep_lr:
            for scale in config.sweep_head_lr_scale:
                done = run_trial(
                    dataclasses.replace(trial, lr=lr, head_lr_scale=scale),
                    config,
                    self.task.process,
                    self.task.output,
                    train=labeled.subset(kept),
                    test=labeled.subset(held),
                    prefix=f"sweep-lr{lr:g}-head{scale:g}-",
                )
                found = {"top1": done["top1"], "top5": done["top5"]}
                tried.append({"lr": lr, "head_lr_scale": scale, **found})
        best = max(tried, key=lambda each: (each["top1"], each["top5"]))
        LOGGER.info(
            f"sweep over {len(tried)} settings, {len(held)} labelled images held out: "
            f"lr {best['lr']:g}, head x{best['head_lr_scale']:g} ({best['top1']:.2f}% top-1)"
        )
        lr, scale = best["lr"], best["head_lr_scale"]
        return dataclasses.replace(trial, lr=lr, head_lr_scale=scale), tried

    def _measure(self, trial: Trial, tried: list[dict[str, float]]) -> list[Result]:
        """The rows of one trial; they are appended unless the results have them."""
        config, task, subset = self.config, self.task, trial.subset
        done = run_trial(
            trial, config, task.process, task.output, train=subset.images, test=self.val
        )
        LOGGER.info(f"{done['folder']}: top-1 {done['top1']:.2f}%  top-5 {done['top5']:.2f}%")
        curve = describe_protocol(config, subset.mode)
        details: dict[str, Any] = {
            "key": done["key"],
            "labels_file": str(task.output / done["folder"] / "labels.txt"),
            "labels_sha256": subset.hash,
            "fraction": subset.fraction,
            "num_labeled": len(subset),
            "num_classes": len(self.train.classes),
            "init": trial.start.how,
            "curve": curve,
            "lr": trial.lr,
            "head_lr_scale": trial.head_lr_scale,
            "sweep": tried,
        }
        rows = []
        for metric in ("top1", "top5"):
            row = task.result(
                protocol=f"labeled={subset.fraction:.4g} {curve}",
                metric=metric,
                value=done[metric],
                images=[self.train, self.val],
                details=details,
            )
            row = dataclasses.replace(
                row,
                weights=trial.start.weights,
                weights_hash=trial.start.hash or done["initial_hash"],
                seed=trial.seed,
            )
            rows.append(row)
        earlier = [] if config.overwrite else check_results()[0]
        known = {(row.details.get("key"), row.metric) for row in earlier}
        task.write_results([row for row in rows if (done["key"], row.metric) not in known])
        return rows


def print_table(rows: list[Result]) -> None:
    """Top-1 and top-5 of every fraction and initialisation, mean and deviation over trials."""
    cells: dict[tuple[str, float, int], dict[str, str]] = {}
    for first, measured in summarize(rows):
        place = (first.weights, first.details["fraction"], first.details["num_labeled"])
        cells.setdefault(place, {})[first.metric] = str(measured)
    LOGGER.info(f"{'labelled':>16}  {'network':<24}{'top-1 %':<22}top-5 %")
    for (weights, fraction, count), found in cells.items():
        part = f"{100 * fraction:.4g}% ({count:,})"
        LOGGER.info(f"{part:>16}  {weights:<24}{found['top1']:<22}{found['top5']}")


def run_semisup(config: SemisupConfig) -> list[Result]:
    """The whole task, also for use from Python; returns the rows of all trials."""
    with open_task("semisup", config) as task:
        rows = SemiSupervised(task, config).run()
        print_table(rows)
        if task.is_main:
            files = draw_curve([*check_results()[0], *rows], rows[0], task.output)
            LOGGER.info(f"figure: {' and '.join(str(file) for file in files)}")
        return rows

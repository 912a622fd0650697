"""The report's figures. Imports no torch.

A figure whose data is absent, or a single point, becomes a sentence that says so, and how to make
it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instdisc.runs.results import Result
from transfer.finetuning.curve import curve_points, draw_lines
from transfer.reporting.drawing import Draw, Drawing, render, shorten
from transfer.reporting.runs import (
    FolderFile,
    TrainingRun,
    find_files,
    find_finetuning,
    find_pretraining,
    proximal_groups,
)

MOST_LINES = 6  # more cannot be told apart


def _draw_loss_and_knn(lines: Sequence[tuple[str, TrainingRun]]) -> Draw:
    def draw(figure: Any, colours: Sequence[str]) -> None:
        has_knn = any(run.points("knn_recomputed") for _, run in lines)
        axes = figure.subplots(1 + has_knn, 1, sharex=True, squeeze=False)[:, 0]
        for number, (label, run) in enumerate(lines):
            style = {"color": colours[number % len(colours)], "label": shorten(label)}
            axes[0].plot(*zip(*run.points("epoch_loss"), strict=True), **style)
            points = run.points("knn_recomputed")
            if points:
                axes[1].plot(*zip(*points, strict=True), marker="o", markersize=4, **style)
        axes[0].set_ylabel("training loss")
        axes[0].legend()
        axes[-1].set_xlabel("epoch")
        axes[-1].xaxis.get_major_locator().set_params(integer=True)
        if has_knn:
            axes[1].set_ylabel("kNN top-1 (%)")

    return draw


def consistency(runs: Sequence[TrainingRun], *, is_demo: bool) -> Drawing:
    """Loss against kNN accuracy over epochs (paper, section 4.2)."""
    series = ("epoch_loss", "knn_recomputed")
    fitting = [run for run in runs if all(len(run.points(name)) > 1 for name in series)]
    title = "Training loss and kNN accuracy over epochs"
    slug = "consistency" + "-demo" * is_demo
    if not fitting:
        caption = "Not drawn: no pretraining has kNN accuracies of two epochs (--monitor-every)."
        return Drawing(slug, title, caption, is_demo=is_demo)
    chosen = sorted(fitting, key=lambda r: -len(r.points("knn_recomputed")))[:MOST_LINES]
    images = render(_draw_loss_and_knn([(run.name, run) for run in chosen]), (5.8, 4.6))
    caption = "kNN on recomputed features, with the settings of each run's monitor."
    if len(chosen) < len(fitting):
        caption += f" {len(chosen)} of {len(fitting)} runs, those with most points."
    return Drawing(slug, title, caption, images, is_demo)


def proximal(runs: Sequence[TrainingRun], *, is_demo: bool) -> list[Drawing]:
    """The loss with and without the proximal term (paper, section 3.3)."""
    title = "Proximal term on and off"
    slug = "proximal" + "-demo" * is_demo
    drawings = []
    for number, group in enumerate(proximal_groups(runs), start=1):
        lines = [(f"weight {run.config.get('proximal_weight', 0.0):g}", run) for run in group]
        config = group[0].config
        caption = (
            f"{config.get('arch')}, {config.get('objective')}, seed {config.get('seed')}: "
            f"{', '.join(run.name for run in group)}. The loss includes the term itself."
        )
        images = render(_draw_loss_and_knn(lines[:MOST_LINES]), (5.8, 4.6))
        drawings.append(Drawing(f"{slug}-{number}", title, caption, images, is_demo))
    if drawings:
        return drawings
    caption = "Not drawn: no two pretrainings differ in --proximal-weight only."
    return [Drawing(slug, title, caption, is_demo=is_demo)]


def training_curves(runs: Sequence[TrainingRun], what: str, *, is_demo: bool) -> Drawing:
    """The loss of single steps."""
    title, slug = f"Training curves: {what}", what + "-demo" * is_demo
    fitting = [run for run in runs if len(run.points("loss")) > 1]
    if not fitting:
        caption = f"Not drawn: there is no {what} in this runs folder."
        return Drawing(slug, title, caption, is_demo=is_demo)
    chosen = sorted(fitting, key=lambda r: -len(r.points("loss")))[:MOST_LINES]

    def draw(figure: Any, colours: Sequence[str]) -> None:
        axes = figure.subplots()
        for number, run in enumerate(chosen):
            points = zip(*run.points("loss"), strict=True)
            axes.plot(*points, color=colours[number], label=shorten(run.name), linewidth=1)
        axes.set_xlabel("epoch")
        axes.set_ylabel("loss of a step")
        axes.legend()

    caption = "The loss as it was logged."
    if len(chosen) < len(fitting):
        caption += f" {len(chosen)} of {len(fitting)} runs, the longest."
    return Drawing(slug, title, caption, render(draw, (5.8, 3.4)), is_demo)


def semisupervised(rows: Sequence[Result], *, is_demo: bool) -> list[Drawing]:
    """Top-5 by the fraction of labels, a figure for each network, data set and recipe."""
    title, slug = "Semi-supervised: top-5 by the part of labels", "semisup" + "-demo" * is_demo
    likes: dict[tuple[str, ...], Result] = {}
    for row in rows:
        if row.task == "semisup" and row.metric == "top5" and "curve" in row.details:
            key = (row.arch, row.dataset, row.data_fingerprint, row.details["curve"])
            likes[key] = row
    drawings = []
    for number, like in enumerate(likes.values(), start=1):
        lines = curve_points(rows, like, "top5")
        if max(map(len, lines.values()), default=0) < 2:
            continue

        def draw(figure: Any, colours: Sequence[str], lines: Any = lines) -> None:
            axes = figure.subplots()
            draw_lines(axes, dict(sorted(lines.items())), colours, shorten)
            axes.set_ylabel("top-5 (%)")
            axes.legend()

        caption = f"{like.arch} on {like.dataset}, {like.details['curve']}."
        images = render(draw, (5.8, 3.4))
        drawings.append(Drawing(f"{slug}-{number}", title, caption, images, is_demo))
    if drawings:
        return drawings
    caption = "Not drawn: needs two fractions (python transfer/semisup.py --labeled 0.01 0.1)."
    return [Drawing(slug, title, caption, is_demo=is_demo)]


def retrieval(files: Sequence[FolderFile], *, is_demo: bool) -> Drawing:
    """The newest retrieval figure."""
    title, slug = "Nearest training images", "retrieval" + "-demo" * is_demo
    if not files:
        caption = "Not drawn: nothing was searched (python transfer/retrieve.py)."
        return Drawing(slug, title, caption, is_demo=is_demo)
    newest = max(files, key=lambda file: file.path.stat().st_mtime)
    image = newest.path.read_bytes()
    caption = f"{newest.name}: best and worst cases."
    return Drawing(slug, title, caption, {"light": image, "dark": image}, is_demo, is_wide=True)


def _read_curves(path: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Recall and precision by class; nothing where the file is not what detect.py writes."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return {
            str(name): ([float(x) for x in curve["recall"]], [float(y) for y in curve["precision"]])
            for name, curve in stored.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def precision_recall(files: Sequence[FolderFile], *, is_demo: bool) -> list[Drawing]:
    """A small plot for each class, detectors of one set of classes together."""
    title, slug = "Detection: precision and recall", "precision-recall" + "-demo" * is_demo
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for file in sorted(files, key=lambda f: f.name):
        curves = _read_curves(file.path)
        if any(len(recall) > 1 for recall, _ in curves.values()):
            groups.setdefault(tuple(sorted(curves)), {})[file.name.removeprefix("detect/")] = curves
    drawings = []
    for number, (classes, runs) in enumerate(groups.items(), start=1):
        chosen = dict(list(runs.items())[:MOST_LINES])

        def draw(
            figure: Any, colours: Sequence[str], classes: Any = classes, chosen: Any = chosen
        ) -> None:
            grid = figure.subplots(
                -(-len(classes) // 5), 5, sharex=True, sharey=True, squeeze=False
            )
            for axes, name in zip(grid.flat, classes, strict=False):
                axes.set_title(shorten(name, 16), fontsize=9)
                axes.set(xlim=(0, 1), ylim=(0, 1.02))
                for index, (run, curves) in enumerate(chosen.items()):
                    axes.plot(*curves[name], color=colours[index], label=shorten(run))
            for axes in grid.flat[len(classes) :]:
                axes.set_axis_off()
            figure.supxlabel("recall", fontsize=10)
            figure.supylabel("precision", fontsize=10)
            handles, labels = grid[0, 0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside upper center", ncols=2)

        size = (8.4, 0.8 + 1.6 * -(-len(classes) // 5))
        caption = f"IoU 0.5; {', '.join(chosen)}."
        images = render(draw, size)
        drawing = Drawing(f"{slug}-{number}", title, caption, images, is_demo, is_wide=True)
        drawings.append(drawing)
    if drawings:
        return drawings
    caption = "Not drawn: no detector was evaluated (python transfer/detect.py)."
    return [Drawing(slug, title, caption, is_demo=is_demo)]


def draw_figures(root: Path, rows: Sequence[Result], *, is_demo: bool) -> list[Drawing]:
    """All figures of real data, or all of the embedded images; they never share one."""
    runs = [run for run in find_pretraining(root) if run.is_demo == is_demo]
    mine = [row for row in rows if row.is_demo == is_demo]
    grids, curves = (
        [file for file in find_files(root, name, rows) if file.is_demo == is_demo]
        for name in ("retrieval.png", "precision_recall.json")
    )
    tuned = [run for run in find_finetuning(root, rows) if run.is_demo == is_demo]
    return [
        consistency(runs, is_demo=is_demo),
        *proximal(runs, is_demo=is_demo),
        *semisupervised(mine, is_demo=is_demo),
        retrieval(grids, is_demo=is_demo),
        *precision_recall(curves, is_demo=is_demo),
        training_curves(runs, "pretraining", is_demo=is_demo),
        training_curves(tuned, "fine-tuning", is_demo=is_demo),
    ]

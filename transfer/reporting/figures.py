"""The report's figures. Imports no torch.

A figure whose data is absent, or a single point, becomes a sentence that says so, and how to make
it.
"""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from instdisc.runs.log import progress
from instdisc.runs.results import Result
from transfer.finetuning.curve import curve_points, draw_lines
from transfer.nearest.feature_map import FILE as MAP_FILE
from transfer.nearest.feature_map import FeatureMap, load_map
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
MOST_PICTURES = 6
TILE_WIDTH, TILE_GAP = 620, 16


def _draw_loss_and_knn(
    lines: Sequence[tuple[str, TrainingRun]], loss: str = "epoch_loss", *, is_log: bool = False
) -> Draw:
    def draw(figure: Any, colours: Sequence[str]) -> None:
        has_knn = any(run.points("knn_recomputed") for _, run in lines)
        axes = figure.subplots(1 + has_knn, 1, sharex=True, squeeze=False)[:, 0]
        has_long = max(len(label) for label, _ in lines) > 12
        width = 0.8 if loss == "loss" else 1.5  # single steps are many points
        for number, (label, run) in enumerate(lines):
            style = {"color": colours[number % len(colours)], "label": shorten(label)}
            axes[0].plot(*zip(*run.points(loss), strict=True), linewidth=width, **style)
            points = run.points("knn_recomputed")
            if points:
                axes[1].plot(*zip(*points, strict=True), marker="o", markersize=4, **style)
        axes[0].set_ylabel("training loss")
        if is_log:
            axes[0].set_yscale("log")
            axes[0].yaxis.get_major_locator().set_params(subs=(1, 2, 5))
            axes[0].yaxis.set_major_formatter("{x:g}")
            axes[0].yaxis.set_minor_formatter("")
        axes[0].legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=2 if has_long else 4)
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
        # Of single steps, which the term shall smooth; it is part of the loss, hence the log scale.
        draw = _draw_loss_and_knn(lines[:MOST_LINES], "loss", is_log=True)
        images = render(draw, (5.8, 4.6))
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


def feature_map(files: Sequence[FolderFile], *, is_demo: bool) -> Drawing:
    """The newest map of features."""
    title, slug = "Map of features", "map" + "-demo" * is_demo
    for file in sorted(files, key=lambda file: -file.path.stat().st_mtime):
        found = load_map(file.path)
        if found is not None:
            images = render(_draw_map(found), (7.2, 5.0))
            return Drawing(
                slug, title, f"{found.title}. t-SNE.", images, is_demo, feature_map=found
            )
    caption = "Not drawn: no features were mapped (python transfer/retrieve.py)."
    return Drawing(slug, title, caption, is_demo=is_demo)


def _draw_map(found: FeatureMap) -> Draw:
    def draw(figure: Any, colours: Sequence[str]) -> None:
        axes = figure.subplots()
        for group in found.groups:
            x, y, _ = zip(*group.points, strict=True)
            place = len(colours) if group.colour is None else group.colour
            style: dict[str, Any] = {"color": "#8b949e"}
            if place < len(colours):
                style = {"color": colours[place], "label": shorten(group.name, 20)}
            axes.scatter(x, y, s=7, linewidths=0, **style)
        axes.set_axis_off()
        axes.invert_yaxis()  # as on the page
        figure.legend(loc="outside right upper", markerscale=2)

    return draw


def detections(files: Sequence[FolderFile], *, is_demo: bool) -> Drawing:
    """Test images of the newest pretrained detector: ground truth at the left of each."""
    title, slug = "Detections beside ground truth", "detections" + "-demo" * is_demo
    newest = sorted(files, key=lambda f: ("scratch" in f.name, -f.path.stat().st_mtime))
    for file in newest:
        pictures = sorted((file.path.parent / "pictures").glob("*.png"))[:MOST_PICTURES]
        sheet = _draw_sheet(pictures)
        if sheet:
            name = file.name.removeprefix("detect/")
            caption = (
                f"{name}: ground truth at the left, detections of score 0.3 and more at the right."
            )
            images = {"light": sheet, "dark": sheet}
            return Drawing(slug, title, caption, images, is_demo, is_wide=True)
    caption = "Not drawn: no detector left pictures (python transfer/detect.py)."
    return Drawing(slug, title, caption, is_demo=is_demo)


def _draw_sheet(pictures: Sequence[Path]) -> bytes:
    """Pictures in two columns of equal width, as a JPEG; nothing where none can be read."""
    tiles = []
    for path in pictures:
        try:
            with Image.open(path) as image:
                height = round(image.height * TILE_WIDTH / image.width)
                tiles.append(image.convert("RGB").resize((TILE_WIDTH, max(1, height))))
        except (OSError, ValueError):
            continue
    if not tiles:
        return b""
    rows = [tiles[i : i + 2] for i in range(0, len(tiles), 2)]
    heights = [max(tile.height for tile in row) for row in rows]
    width = TILE_WIDTH * len(rows[0]) + TILE_GAP * (len(rows[0]) - 1)
    sheet = Image.new("RGB", (width, sum(heights) + TILE_GAP * (len(rows) - 1)), "white")
    y = 0
    for row, height in zip(rows, heights, strict=True):
        for column, tile in enumerate(row):
            sheet.paste(tile, (column * (TILE_WIDTH + TILE_GAP), y))
        y += height + TILE_GAP
    file = io.BytesIO()
    sheet.save(file, "JPEG", quality=85)
    return file.getvalue()


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


def _has_curve(recall: Sequence[float], precision: Sequence[float]) -> bool:
    """Whether something was found, and not at a single point."""
    return len(recall) > 1 and max(recall) > 0 and max(precision) > 0


def precision_recall(files: Sequence[FolderFile], *, is_demo: bool) -> list[Drawing]:
    """A small plot for each class with something to show, detectors of one set together."""
    title, slug = "Detection: precision and recall", "precision-recall" + "-demo" * is_demo
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for file in sorted(files, key=lambda f: f.name):
        curves = _read_curves(file.path)
        if any(_has_curve(*curve) for curve in curves.values()):
            groups.setdefault(tuple(sorted(curves)), {})[file.name.removeprefix("detect/")] = curves
    drawings = []
    for number, (classes, runs) in enumerate(groups.items(), start=1):
        chosen = dict(list(runs.items())[:MOST_LINES])
        every = len(classes)
        classes = tuple(
            name for name in classes if any(_has_curve(*curves[name]) for curves in chosen.values())
        )

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
        if len(classes) < every:
            caption += f" {len(classes)} of {every} classes: of the others nothing was found."
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
    grids, maps, curves = (
        [file for file in find_files(root, name, rows) if file.is_demo == is_demo]
        for name in ("retrieval.png", MAP_FILE, "precision_recall.json")
    )
    tuned = [run for run in find_finetuning(root, rows) if run.is_demo == is_demo]
    makers: list[Callable[[], Drawing | list[Drawing]]] = [
        lambda: consistency(runs, is_demo=is_demo),
        lambda: proximal(runs, is_demo=is_demo),
        lambda: semisupervised(mine, is_demo=is_demo),
        lambda: retrieval(grids, is_demo=is_demo),
        lambda: feature_map(maps, is_demo=is_demo),
        lambda: detections(curves, is_demo=is_demo),
        lambda: precision_recall(curves, is_demo=is_demo),
        lambda: training_curves(runs, "pretraining", is_demo=is_demo),
        lambda: training_curves(tuned, "fine-tuning", is_demo=is_demo),
    ]
    drawings: list[Drawing] = []
    for make in progress(makers, title="figures", unit="figures"):
        made = make()
        drawings += [made] if isinstance(made, Drawing) else made
    return drawings

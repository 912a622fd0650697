"""The semi-supervised figure: fraction of labels against top-5, one line per network."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from instdisc.runs.folders import atomic_file
from instdisc.runs.results import Measured, Result, summarize

# Readable in print and by colour-blind readers (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
MARKERS = ("o", "s", "^", "D", "v", "P")


def curve_points(
    rows: Sequence[Result], like: Result, metric: str
) -> dict[str, list[tuple[float, Measured]]]:
    """The points of each network's line, by fraction.

    Args:
        rows: results of any task.
        like: a row that says which data, architecture and protocol the figure is about.
        metric: top1 or top5.

    Returns:
        Network -> (fraction, mean and deviation over trials), smallest fraction first.
    """
    wanted = ("task", "arch", "dataset", "data_fingerprint")
    chosen = [
        row
        for row in rows
        if row.metric == metric
        and all(getattr(row, name) == getattr(like, name) for name in wanted)
        and row.details.get("curve") == like.details["curve"]
    ]
    # A network that was trained anew under its old name starts a new line.
    newest = {row.weights: row.weights_hash for row in chosen}
    chosen = [r for r in chosen if r.weights == "scratch" or r.weights_hash == newest[r.weights]]
    lines: dict[str, list[tuple[float, Measured]]] = {}
    for first, measured in summarize(chosen):
        point = (float(first.details["fraction"]), measured)
        lines.setdefault(first.weights, []).append(point)
    return {name: sorted(points, key=lambda p: p[0]) for name, points in lines.items()}


def draw_lines(
    axes: Any,
    lines: Mapping[str, list[tuple[float, Measured]]],
    colours: Sequence[str],
    label: Callable[[str], str] = str,
) -> None:
    """Draws lines of `curve_points` with error bars, over fractions on a logarithmic axis.

    Args:
        axes: of matplotlib.
        lines: in the order of their colours and markers.
        colours: begun anew when there are more lines.
        label: what the legend calls a network.
    """
    for number, (name, points) in enumerate(lines.items()):
        axes.errorbar(
            [100 * fraction for fraction, _ in points],
            [measured.mean for _, measured in points],
            yerr=[measured.std or 0.0 for _, measured in points],
            label=label(name),
            color=colours[number % len(colours)],
            marker=MARKERS[number % len(MARKERS)],
            linestyle="--" if name == "scratch" else "-",
            capsize=3,
        )
    percents = sorted({100 * fraction for points in lines.values() for fraction, _ in points})
    axes.set_xscale("log")
    axes.set_xticks(percents, [f"{percent:.3g}%" for percent in percents])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("labelled part of the training images")


def draw_curve(
    rows: Sequence[Result], like: Result, folder: Path, *, metric: str = "top5"
) -> list[Path]:
    """Draws curve.png and curve.svg from all rows that belong to one figure; returns the files."""
    # Heavy to import, and not needed by anything else.
    import matplotlib
    from matplotlib.figure import Figure

    lines = curve_points(rows, like, metric)
    figure = Figure(figsize=(5.6, 4.0), layout="constrained")
    axes = figure.add_subplot()
    # The baseline last, so that the other lines keep their colours with and without it.
    order = sorted(lines, key=lambda n: (n == "scratch", n))
    colours = [
        "#555555" if name == "scratch" else COLOURS[number % len(COLOURS)]
        for number, name in enumerate(order)
    ]
    draw_lines(axes, {name: lines[name] for name in order}, colours)
    axes.set_ylabel(f"top-{metric.removeprefix('top')} accuracy (%)")
    trials = max(measured.count for points in lines.values() for _, measured in points)
    spread = f", bars: std over {trials} trials" if trials > 1 else ""
    demo = "DEMO DATA, " if like.is_demo else ""
    axes.set_title(f"{demo}{like.arch} on {like.dataset}{spread}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    files = []
    for ending in ("png", "svg"):
        files.append(folder / f"curve.{ending}")
        # Text as text, so that the drawing can be searched and edited.
        with atomic_file(files[-1]) as file, matplotlib.rc_context({"svg.fonttype": "none"}):
            figure.savefig(file, format=ending, dpi=200)
    return files

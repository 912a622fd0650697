"""Parts of the report's tables: which measurement goes where. Imports no torch."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from instdisc.names import STAGES
from instdisc.runs.results import Measured
from transfer.reporting import paper_numbers as paper
from transfer.reporting.benchmarks import Benchmark
from transfer.reporting.grids import Grid, Line, Measurements, by_network, match_lines
from transfer.reporting.networks import Network
from transfer.reporting.paper_numbers import Published
from transfer.reporting.rows import Entry

PAPER_KNN = "k=200 tau=0.07 embedding"
PAPER_SVM = "solver=sgd"
# Of a pretraining, what makes runs comparable in the table of objectives.
SCALE = (
    *("dataset", "train_fraction", "epochs", "epoch", "image_size", "stem", "batch_size"),
    *("embedding_dim", "temperature"),
)
STANDARD = {"embedding_dim": 128, "train_fraction": 1.0}  # what Tables 4 and 5 vary


def is_svm(family: str) -> bool:
    """Whether a linear protocol is the paper's kind: an SVM on one crop."""
    return not any(word in family for word in ("recipe=", "loss=", "augment"))


def is_readout(entry: Entry) -> bool:
    """Whether an entry belongs into a table of conv1..conv5 and kNN."""
    if entry.metric != "top-1":
        return False
    if entry.task == "knn":
        return entry.family == PAPER_KNN
    return entry.task == "linear" and entry.place in STAGES and is_svm(entry.family)


def is_standard(entry: Entry, but: str = "") -> bool:
    """Whether a pretraining is none of the paper's ablations, but for the one that is named."""
    facts = entry.network.facts
    return all(facts.get(name, usual) == usual for name, usual in STANDARD.items() if name != but)


def row_of_table1(facts: Mapping[str, Any]) -> str | None:
    """Which row of Table 1 a pretraining is."""
    for name, (objective, count) in paper.TABLE1_SETTINGS.items():
        if facts.get("objective") == objective and count in (None, facts.get("num_negatives")):
            return name
    return None


def describe_scale(arch: str, facts: Mapping[str, Any]) -> str:
    """What all rows of a grid share, in a sentence."""
    words = [arch]
    for name in SCALE:
        if name in facts and name != "epoch":
            words.append(f"{name.replace('_', ' ')} {facts[name]}")
    return f"Measured with: {', '.join(words)}."


def objectives_grid(
    found: Sequence[Entry], slug: str, title: str, data: str, is_papers: bool
) -> Grid:
    """Table 1 at one scale."""
    families = sorted({e.family for e in found if e.task == "linear"}) or [PAPER_SVM]
    names = dict.fromkeys(families[:1], "linear SVM")
    names |= {family: f"linear SVM ({family})" for family in families[1:]}
    columns = (*names.values(), "kNN")
    grid = Grid(slug, title, columns, data, side=True, published=paper.TABLE1_PROTOCOL)
    grid.protocols = {name: f"on the embedding, {family}" for family, name in names.items()}
    grid.protocols["kNN"] = PAPER_KNN
    cells: dict[str, dict[Network, dict[str, Measured]]] = {}
    for entry in found:
        network = entry.network
        row = row_of_table1(network.facts) or network.short
        column = "kNN" if entry.task == "knn" else names[entry.family]
        values = cells.setdefault(row, {}).setdefault(network, {})
        assert column not in values, f"two measurements in one cell: {entry}"
        values[column] = entry.measured
    for published in paper.TABLE1:
        values_of = {c: published.values["kNN" if c == "kNN" else "linear SVM"] for c in columns}
        known = values_of if is_papers else {}
        own = cells.pop(published.method, {})
        measured = [Measurements.of(network, values) for network, values in own.items()]
        grid.lines.append(Line(published.method, known, published.citation, measured, True))
    for row, own in cells.items():
        measured = [Measurements.of(network, values) for network, values in own.items()]
        grid.lines.append(Line(row, measured=measured))
    return grid


def ablation_line(
    setting: str, value: Any, published: Mapping[Any, float], slug: str, column: str
) -> Line:
    """One value of the setting that a table varies."""
    label = f"{100 * value:g}%" if setting == "train_fraction" else str(value)
    known = {column: published[value]} if value in published else {}
    return Line(label, known, f"{paper.PAPER}, {slug.replace('table', 'Table ')}", [], True)


def anchors(slug: str, title: str, data: str, rows: Sequence[Published]) -> Grid:
    """Numbers of others, each protocol in a column of its own; nothing is compared with them."""
    columns = tuple(dict.fromkeys(column for row in rows for column in row.values))
    lines = [Line(f"{row.method}, {row.arch}", row.values, row.citation) for row in rows]
    return Grid(slug, title, columns, data, published=paper.ANCHORS_PROTOCOL, lines=lines)


def benchmark_grids(benchmark: Benchmark, found: Sequence[Entry]) -> list[Grid]:
    """A grid for each protocol that was measured; the published numbers alone if none was.

    What was measured with another protocol than the published numbers stands below them, without
    a difference.
    """
    grids: list[Grid] = []
    published = benchmark.published
    apart = [dataclasses.replace(row, kind="other") for row in published]
    families = {entry.family: benchmark.is_same(entry.family) for entry in found} or {"": False}
    for family, same in sorted(families.items(), key=lambda item: (not item[1], item[0])):
        chosen = [entry for entry in found if entry.family == family]
        names = {entry.column: str(benchmark.place(entry)) for entry in chosen}
        more = sorted({*names.values()} - {*benchmark.columns}, key=column_order)
        slug = benchmark.slug + (f"-{len(grids) + 1}" if grids else "")
        columns = (*benchmark.columns, *more)
        grid = Grid(slug, benchmark.title, columns, benchmark.data, published=benchmark.protocol)
        grid.lines = match_lines(published if same else apart, by_network(chosen, names))
        grid.notes += [benchmark.note] if benchmark.note else []
        if chosen:
            grid.protocols = dict.fromkeys(columns, f"{benchmark.task}, {family}")
        if benchmark.choose is not list:
            best = {entry.network: entry.place.partition(" ")[0] for entry in chosen}
            shown = (f"{network.short}: {stage}" for network, stage in best.items())
            grid.notes += [f"The best stage of each network. {', '.join(shown)}."] if best else []
        if chosen and not same:
            grid.notes.append("Measured with another protocol: no differences are shown.")
        grids.append(grid)
    return grids


def plain_grids(slug: str, title: str, entries: Iterable[Entry], *, is_demo: bool) -> list[Grid]:
    """Measurements without published ones beside them: a grid for each task, protocol and data."""
    groups: dict[tuple[str, str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.task, entry.family, entry.data), []).append(entry)
    grids: list[Grid] = []
    for number, ((task, family, data), found) in enumerate(sorted(groups.items()), start=1):
        columns = tuple(sorted({entry.column for entry in found}, key=column_order))
        name = re.sub(r"[^\w-]", "-", f"{slug}-{task}-{number}")  # it becomes a file's
        grid = Grid(name, f"{title}: {task}, {data}", columns, data, is_demo=is_demo)
        grid.protocols = dict.fromkeys(columns, f"{task}, {family}")
        networks = by_network(found, {column: column for column in columns})
        grid.lines = match_lines([], networks)
        grids.append(grid)
    return grids


def column_order(column: str) -> tuple[int, float, str]:
    """Percentages by size, all else by name."""
    part = column.partition("%")[0]
    is_number = part.replace(".", "", 1).isdigit()
    return (0, float(part), column) if is_number else (1, 0.0, column)

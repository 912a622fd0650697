"""A table of the report: published numbers, what was measured beside them, and the difference.

Imports no torch. A column has one protocol, which the grid names; what was measured with another
protocol goes to another grid.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from transfer.reporting.paper_numbers import Published
from transfer.reporting.rows import Entry, Measured, Network

DASH = "–"
RowKind = Literal["published", "measured", "absent", "difference", "both"]


@dataclasses.dataclass
class Line:
    """A published row and the measurements that belong to it; either may be absent.

    Attributes:
        label: what it is.
        published: column -> number.
        citation: where that stands.
        measured: of each network: its label, and column -> measurement.
        expects: whether a dash shall say that nothing was measured.
    """

    label: str
    published: Mapping[str, float] = dataclasses.field(default_factory=dict)
    citation: str = ""
    measured: list[tuple[str, dict[str, Measured]]] = dataclasses.field(default_factory=list)
    expects: bool = False


@dataclasses.dataclass
class Grid:
    """One table.

    Attributes:
        slug: name of its file and anchor.
        title: its heading.
        columns: their headings, without paper and difference.
        protocols: how the measurements of each column were made.
        lines: its rows.
        notes: sentences below the heading.
        side: published, measured and difference side by side, rather than one below the other.
        is_demo: whether it is of the embedded images.
    """

    slug: str
    title: str
    columns: tuple[str, ...]
    protocols: dict[str, str] = dataclasses.field(default_factory=dict)
    lines: list[Line] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    side: bool = False
    is_demo: bool = False

    @property
    def has_measurements(self) -> bool:
        """Whether anything in it was measured."""
        return any(values for line in self.lines for _, values in line.measured)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row as it is shown."""

    kind: RowKind
    label: str
    note: str
    cells: tuple[str, ...]


def show_published(value: float | None) -> str:
    """As it was printed: one decimal, or two where the source has two."""
    if value is None:
        return DASH
    return f"{value:.1f}" if round(value, 1) == value else f"{value:.2f}"


def show_measured(value: Measured | None) -> str:
    """Mean ± deviation (n), or a dash."""
    return DASH if value is None else str(value)


def difference(measured: Measured | None, published: float | None) -> float | None:
    """Measured minus published, where there are both."""
    return None if measured is None or published is None else measured.mean - published


def show_difference(value: float | None) -> str:
    """With its sign, or a dash."""
    return DASH if value is None else f"{value:+.1f}"


def headings(grid: Grid) -> list[str]:
    """Headings of all columns that are shown, the first one's left out."""
    if not grid.side:
        return list(grid.columns)
    parts = ("paper", "measured", "difference")
    return [f"{column}: {part}" for column in grid.columns for part in parts]


def show_rows(grid: Grid) -> list[Row]:
    """All rows as they are shown."""
    return [row for line in grid.lines for row in (_beside if grid.side else _below)(grid, line)]


def _below(grid: Grid, line: Line) -> Iterable[Row]:
    columns = grid.columns
    if line.published:
        cells = tuple(show_published(line.published.get(column)) for column in columns)
        yield Row("published", line.label, line.citation, cells)
    nothing: list[tuple[str, dict[str, Measured]]] = [("not measured", {})] if line.expects else []
    for label, values in line.measured or nothing:
        cells = tuple(show_measured(values.get(column)) for column in columns)
        kind: RowKind = "measured" if values else "absent"
        yield Row(kind, label if line.published else line.label, "", cells)
        if line.published and values:
            found = [difference(values.get(c), line.published.get(c)) for c in columns]
            yield Row("difference", "difference", "", tuple(map(show_difference, found)))


def _beside(grid: Grid, line: Line) -> Iterable[Row]:
    several = len(line.measured) > 1
    nothing: list[tuple[str, dict[str, Measured]]] = [("", {})]
    for label, values in line.measured or nothing:
        cells: list[str] = []
        for column in grid.columns:
            published, measured = line.published.get(column), values.get(column)
            cells += (
                show_published(published),
                show_measured(measured),
                show_difference(difference(measured, published)),
            )
        yield Row("both", line.label, label if several else "", tuple(cells))


def by_network(
    entries: Iterable[Entry], columns: Mapping[str, str]
) -> dict[Network, dict[str, Measured]]:
    """Measurements of each network by column; `columns` translates an entry's column."""
    found: dict[Network, dict[str, Measured]] = {}
    for entry in entries:
        if entry.column in columns:
            values = found.setdefault(entry.network, {})
            column = columns[entry.column]
            assert column not in values, f"two measurements in one cell: {entry}"
            values[column] = entry.measured
    return found


def match_lines(
    published: Sequence[Published], networks: Mapping[Network, dict[str, Measured]]
) -> list[Line]:
    """A line per published row with the networks that it can be compared with, then the others."""
    lines, used = [], set()
    for row in published:
        fitting = [n for n in networks if n.kind == row.kind != "other" and n.arch == row.arch]
        used.update(fitting)
        measured = [(network.label, networks[network]) for network in fitting]
        label = f"{row.method}, {row.arch}"
        lines.append(Line(label, row.values, row.citation, measured, row.kind != "other"))
    for network, values in networks.items():
        if network not in used:
            label = f"{network.label}, {network.arch}"
            if network.arch in network.label:
                label = network.label
            lines.append(Line(label, measured=[(network.label, values)]))
    return lines

"""A table of the report: published numbers, what was measured beside them, and the difference.

Imports no torch. A column has one protocol, which the grid names; what was measured with another
protocol goes to another grid.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from instdisc.runs.results import Measured
from transfer.reporting.networks import Network
from transfer.reporting.paper_numbers import Published
from transfer.reporting.rows import Entry

DASH = "–"
RowKind = Literal["published", "measured", "absent", "difference", "both"]


@dataclasses.dataclass(frozen=True)
class Measurements:
    """What was measured of one network.

    Attributes:
        label: its short name; may be empty where the line says what it is.
        values: column -> measurement.
        settings: all that is known of the network.
        source: what --weights called it, of all repetitions.
    """

    label: str
    values: Mapping[str, Measured]
    settings: str = ""
    source: str = ""

    @classmethod
    def of(cls, network: Network, values: Mapping[str, Measured]) -> "Measurements":
        """Of a network of the rows."""
        return cls(network.short, values, network.settings, ", ".join(network.names))


NOTHING = Measurements("", {})


@dataclasses.dataclass
class Line:
    """A published row and the measurements that belong to it; either may be absent.

    Attributes:
        label: what it is.
        published: column -> number.
        citation: where that stands.
        measured: of each network.
        expects: whether a dash shall say that nothing was measured.
        remark: what the source says of the published row.
    """

    label: str
    published: Mapping[str, float] = dataclasses.field(default_factory=dict)
    citation: str = ""
    measured: list[Measurements] = dataclasses.field(default_factory=list)
    expects: bool = False
    remark: str = ""


@dataclasses.dataclass
class Grid:
    """One table.

    Attributes:
        slug: name of its file and anchor.
        title: its heading.
        columns: their headings, without paper and difference.
        data: the images, of what was published and of what was measured.
        protocols: how the measurements of each column were made.
        published: how the published numbers were measured.
        lines: its rows.
        notes: sentences below the heading.
        side: published, measured and difference side by side, rather than one below the other.
        is_demo: whether it is of the embedded images.
    """

    slug: str
    title: str
    columns: tuple[str, ...]
    data: str
    protocols: dict[str, str] = dataclasses.field(default_factory=dict)
    published: str = ""
    lines: list[Line] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    side: bool = False
    is_demo: bool = False

    @property
    def has_measurements(self) -> bool:
        """Whether anything in it was measured."""
        return any(found.values for line in self.lines for found in line.measured)

    def digits(self, citation: str) -> int:
        """Decimals of what a source published here: one, or two where any of its numbers has."""
        lines = [line for line in self.lines if line.citation == citation]
        values = [value for line in lines for value in line.published.values()]
        return 1 if all(round(value, 1) == value for value in values) else 2

    @property
    def has_published(self) -> bool:
        """Whether anything in it was published."""
        return any(line.published for line in self.lines)

    @property
    def measurements(self) -> list[Measured]:
        """All that was measured in it."""
        return [
            measured
            for line in self.lines
            for found in line.measured
            for measured in found.values.values()
        ]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row as it is shown.

    Attributes:
        kind: whose numbers they are.
        label: its heading.
        note: where published numbers stand, or of which network measured ones are.
        cells: its numbers.
        settings: all that is known of a measured network.
        remark: what the source says of a published row.
    """

    kind: RowKind
    label: str
    note: str
    cells: tuple[str, ...]
    settings: str = ""
    remark: str = ""


def show_published(value: float | None, digits: int) -> str:
    """With as many decimals as its source prints."""
    return DASH if value is None else f"{value:.{digits}f}"


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


def show_lines(grid: Grid) -> list[list[Row]]:
    """Of each line the rows that are shown: what was published, what was measured of it."""
    return [list((_beside if grid.side else _below)(grid, line)) for line in grid.lines]


def show_rows(grid: Grid) -> list[Row]:
    """All rows as they are shown."""
    return [row for rows in show_lines(grid) for row in rows]


def _below(grid: Grid, line: Line) -> Iterable[Row]:
    columns = grid.columns
    if line.published:
        digits = grid.digits(line.citation)
        cells = tuple(show_published(line.published.get(column), digits) for column in columns)
        yield Row("published", line.label, line.citation, cells, remark=line.remark)
    absent = [dataclasses.replace(NOTHING, label="not measured")] if line.expects else []
    for found in line.measured or absent:
        cells = tuple(show_measured(found.values.get(column)) for column in columns)
        kind: RowKind = "measured" if found.values else "absent"
        label = found.label if line.published else line.label
        yield Row(kind, label, found.source, cells, found.settings)
        if line.published and found.values:
            gaps = [difference(found.values.get(c), line.published.get(c)) for c in columns]
            yield Row("difference", "difference", "", tuple(map(show_difference, gaps)))


def _beside(grid: Grid, line: Line) -> Iterable[Row]:
    for found in line.measured or [NOTHING]:
        cells: list[str] = []
        for column in grid.columns:
            published, measured = line.published.get(column), found.values.get(column)
            cells += (
                show_published(published, grid.digits(line.citation)),
                show_measured(measured),
                show_difference(difference(measured, published)),
            )
        yield Row("both", line.label, found.source, tuple(cells), found.settings)


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
        measured = [Measurements.of(network, networks[network]) for network in fitting]
        label = f"{row.method}, {row.arch}"
        expects = row.kind != "other"
        lines.append(Line(label, row.values, row.citation, measured, expects, row.remark))
    for network, values in networks.items():
        if network not in used:
            lines.append(Line(network.short, measured=[Measurements.of(network, values)]))
    return lines

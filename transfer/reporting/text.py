"""The report as Markdown and as CSV. Imports no torch."""

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence

from transfer.reporting.drawing import Drawing
from transfer.reporting.grids import Grid, Line, difference, headings, show_rows

CSV_HEAD = (
    *("table", "row", "column", "published", "source", "network", "mean", "std", "n"),
    *("difference", "protocol"),
)


def shared_citation(grid: Grid) -> str | None:
    """The one source of all published rows; None where there are several, or none."""
    found = {line.citation for line in grid.lines if line.published}
    return found.pop() if len(found) == 1 else None


def describe_sources(grid: Grid) -> str:
    """Where the published numbers stand, and how the measured ones were made."""
    columns: dict[str, list[str]] = {}
    for column, protocol in grid.protocols.items():
        columns.setdefault(protocol, []).append(column)
    parts = [
        protocol if len(columns) == 1 else f"{', '.join(names)}: {protocol}"
        for protocol, names in columns.items()
    ]
    source = shared_citation(grid)
    words = [f"Published: {source}."] if source else []
    words += [f"Protocol of the measurements: {'; '.join(parts)}."] if parts else []
    return " ".join(words)


def _escape(text: str) -> str:
    """A name as text: it neither ends a cell nor becomes markup or HTML."""
    text = re.sub(r"\s+", " ", text)
    return re.sub(r"([\\`*_{}\[\]<>|#&])", r"\\\1", text)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(map(_escape, head))} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def grid_to_markdown(grid: Grid) -> str:
    """A heading, notes, and the table."""
    source = shared_citation(grid)
    rows = []
    for row in show_rows(grid):
        note = row.note if row.kind == "both" or row.note != source else ""
        label = _escape(row.label) + (f" ({_escape(note)})" if note else "")
        cells = [_escape(cell) for cell in row.cells]
        if row.kind == "measured":
            label, cells = f"**{label}**", [f"**{cell}**" for cell in cells]
        rows.append([label, *cells])
    parts = [f"### {_escape(grid.title)}", *map(_escape, grid.notes)]
    parts.append(_table(["", *headings(grid)], rows))
    small = describe_sources(grid)
    if small:
        parts.append(_escape(small))
    return "\n\n".join(parts)


def to_markdown(
    title: str,
    facts: Sequence[tuple[str, str]],
    warning: str,
    sections: Mapping[str, tuple[Sequence[Grid], Sequence[Drawing]]],
) -> str:
    """The whole report; pictures are files in figures/."""
    parts = [f"# {_escape(title)}"]
    if warning:
        parts.append(f"**{_escape(warning)}**")
    parts.append("\n".join(f"- {_escape(name)}: {_escape(value)}" for name, value in facts))
    for heading, (grids, drawings) in sections.items():
        parts.append(f"## {_escape(heading)}")
        parts += map(grid_to_markdown, grids)
        for drawing in drawings:
            parts.append(f"### {_escape(drawing.title)}")
            if drawing.images:
                parts.append(f"![{_escape(drawing.title)}](figures/{drawing.slug}.png)")
            parts.append(_escape(drawing.caption))
    return "\n\n".join(parts) + "\n"


def _records(grid: Grid, line: Line) -> Iterable[list[object]]:
    for column in grid.columns:
        published = line.published.get(column)
        base = [grid.slug, line.label, column, published, line.citation if published else None]
        protocol = grid.protocols.get(column)
        measured = [(label, values[column]) for label, values in line.measured if column in values]
        for label, value in measured:
            gap = difference(value, published)
            yield [*base, label, value.mean, value.std, value.count, gap, protocol]
        if not measured and published is not None:
            yield [*base, None, None, None, None, None, None]


def to_csv(grid: Grid) -> str:
    """A line for each published or measured number; what is unknown is empty."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(CSV_HEAD)
    for line in grid.lines:
        writer.writerows(_records(grid, line))
    return file.getvalue()

"""The report as Markdown, as CSV, and its scorecards as plain text. Imports no torch."""

import csv
import io
import re
from collections.abc import Iterable, Sequence

from transfer.nearest.gallery import to_printable
from transfer.reporting.grids import (
    DASH,
    Grid,
    Line,
    difference,
    headings,
    show_difference,
    show_rows,
)
from transfer.reporting.scorecard import Cell, Scorecard
from transfer.reporting.sections import Section

CSV_HEAD = (
    *("table", "row", "column", "published", "source", "network"),
    *("weights", "mean", "std", "n"),
    *("difference", "protocol"),
)
CARD_HEAD = (
    *("network", "settings", "data", "column", "mean", "std", "n", "untrained", "difference"),
    "protocol",
)


REPETITIONS = "Published n: not stated unless a row or the protocol says it."


def shared_citation(grid: Grid) -> str | None:
    """The one source of all published rows; None where there are several, or none."""
    found = {line.citation for line in grid.lines if line.published}
    return found.pop() if len(found) == 1 else None


def describe_protocols(grid: Grid) -> str:
    """How the numbers of a table were measured, how often, and on what."""
    columns: dict[str, list[str]] = {}
    for column, protocol in grid.protocols.items():
        columns.setdefault(protocol, []).append(column)
    parts = [
        protocol if len(columns) == 1 else f"{', '.join(names)}: {protocol}"
        for protocol, names in columns.items()
    ]
    words = []
    if grid.has_published:
        words += [f"Protocol of what was published: {grid.published}. {REPETITIONS}"]
    if grid.has_measurements:
        words += [f"Protocol of the measurements: {'; '.join(parts)}."]
    return " ".join([*words, f"Data: {grid.data}."])


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
        notes = ", ".join(filter(None, (row.remark, note)))
        label = _escape(row.label) + (f" ({_escape(notes)})" if notes else "")
        cells = [_escape(cell) for cell in row.cells]
        if row.kind == "measured":
            label, cells = f"**{label}**", [f"**{cell}**" for cell in cells]
        rows.append([label, *cells])
    parts = [f"### {_escape(grid.title)}", *map(_escape, grid.notes)]
    parts.append(_table(["", *headings(grid)], rows))
    words = [f"Published: {source}."] if source else []
    parts.append(_escape(" ".join([*words, describe_protocols(grid)])))
    return "\n\n".join(parts)


def _show_cell(cell: Cell | None) -> str:
    """The number and, in brackets, the points above the untrained network."""
    if cell is None:
        return DASH
    return str(cell) if cell.gain is None else f"{cell} [{show_difference(cell.gain)}]"


def card_to_markdown(card: Scorecard) -> str:
    """A heading, the table, and the settings of each network."""
    rows = []
    for row in card.rows:
        cells = []
        for cell in row.cells:
            text = _escape(_show_cell(cell))
            cells.append(f"**{text}**" if cell is not None and cell.is_best else text)
        rows.append([_escape(row.label), *cells])
    head = [f"{column.head}, {column.data}" for column in card.columns]
    notes = [(row.label, row.settings) for row in card.rows]
    notes += [(column.head, column.protocol) for column in card.columns]
    small = "\n".join(f"- {_escape(name)}: {_escape(text)}" for name, text in notes)
    return "\n\n".join([f"### {_escape(card.title)}", _table(["", *head], rows), small])


def to_markdown(
    title: str, facts: Sequence[tuple[str, str]], warning: str, sections: Sequence[Section]
) -> str:
    """The whole report; pictures are files in figures/."""
    parts = [f"# {_escape(title)}"]
    if warning:
        parts.append(f"**{_escape(warning)}**")
    parts.append("\n".join(f"- {_escape(name)}: {_escape(value)}" for name, value in facts))
    for section in sections:
        parts.append(f"## {_escape(section.heading)}")
        parts += [_escape(section.note)] if section.note else []
        parts += map(card_to_markdown, section.cards)
        for drawing in section.drawings:
            parts.append(f"### {_escape(drawing.title)}")
            if drawing.images:
                parts.append(f"![{_escape(drawing.title)}](figures/{drawing.file_name})")
            parts.append(_escape(drawing.caption))
        parts += map(grid_to_markdown, section.grids)
    return "\n\n".join(parts) + "\n"


def _text_column(head: Sequence[str], cells: Sequence[Cell | None]) -> list[str]:
    """Lines of one width: the heading, and mean ± deviation, gain, and a star for the best."""
    means, gains = [], []
    for cell in cells:
        std = None if cell is None else cell.measured.std
        means.append(
            "" if cell is None else cell.number + (f" ± {std:.1f}" if std is not None else "")
        )
        gains.append("" if cell is None or cell.gain is None else show_difference(cell.gain))
    wide, more = (max(map(len, texts)) for texts in (means, gains))
    lines = [
        f"{mean:>{wide}} {gain:>{more}}{'*' if cell and cell.is_best else ' '}"
        for mean, gain, cell in zip(means, gains, cells, strict=True)
    ]
    lines = [*(f"{to_printable(text)} " for text in head), *lines]
    return [f"{line:>{max(map(len, lines))}}" for line in lines]


def card_to_text(card: Scorecard, width: int) -> str:
    """The scorecard for a terminal; columns that would make it too wide go on below."""
    labels = ["", "", *(to_printable(row.label) for row in card.rows)]
    left = [f"{label:<{max(map(len, labels))}}" for label in labels]
    blocks: list[list[list[str]]] = []
    for number, column in enumerate(card.columns):
        head = (column.data, column.head)
        lines = _text_column(head, [row.cells[number] for row in card.rows])
        if not blocks or sum(len(part[0]) + 1 for part in blocks[-1]) + len(lines[0]) > width:
            blocks.append([left])
        blocks[-1].append(lines)
    legend = "mean ± std, points above the untrained network, * best of its column"
    parts = [f"{card.title} ({legend})"]
    for block in blocks:
        rows = [" ".join(line).rstrip() for line in zip(*block, strict=True)]
        full = [row for row, label in zip(rows, labels, strict=True) if row != label]
        parts.append("\n".join(full))
    return "\n\n".join(parts) + "\n"


def card_to_csv(card: Scorecard) -> str:
    """A line for each number."""
    records = [
        [
            *(row.label, row.settings, column.data, column.head),
            *(cell.measured.mean, cell.measured.std, cell.measured.count),
            *(cell.untrained and cell.untrained.mean, cell.gain, column.protocol),
        ]
        for row in card.rows
        for column, cell in zip(card.columns, row.cells, strict=True)
        if cell is not None
    ]
    return _to_csv(CARD_HEAD, records)


def _records(grid: Grid, line: Line) -> Iterable[list[object]]:
    for column in grid.columns:
        published = line.published.get(column)
        base = [grid.slug, line.label, column, published, line.citation if published else None]
        protocol = grid.protocols.get(column)
        measured = [found for found in line.measured if column in found.values]
        for found in measured:
            value = found.values[column]
            numbers = (value.mean, value.std, value.count, difference(value, published))
            yield [*base, found.label, found.source, *numbers, protocol]
        if not measured and published is not None:
            yield [*base, None, None, None, None, None, None, None]


def to_csv(grid: Grid) -> str:
    """A line for each published or measured number; what is unknown is empty."""
    return _to_csv(CSV_HEAD, (record for line in grid.lines for record in _records(grid, line)))


def _to_csv(head: Sequence[str], records: Iterable[Sequence[object]]) -> str:
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(records)
    return file.getvalue()

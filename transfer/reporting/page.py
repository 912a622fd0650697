"""The report as one HTML file that needs nothing else: no network, scripts or fonts."""

import base64
from collections.abc import Mapping, Sequence
from html import escape

from transfer.reporting.drawing import Drawing
from transfer.reporting.grids import DASH, Grid, Row, show_rows
from transfer.reporting.text import describe_sources, shared_citation

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --text: #1c2128; --muted: #59636e; --line: #d8dee4; --card: #f6f8fa;
  --ours: #e8f3ff; --accent: #0b5cad; --warn: #fff1e5; --warn-text: #953800;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1318; --text: #e6edf3; --muted: #9aa4af; --line: #2d333b; --card: #171c23;
    --ours: #12263f; --accent: #79b8ff; --warn: #3a2412; --warn-text: #ffb77c;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1120px; padding: 28px 20px 56px;
  background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 12px; }
h2 { font-size: 1.3rem; margin: 44px 0 4px; padding-bottom: 6px;
  border-bottom: 1px solid var(--line); }
h3 { font-size: 1.02rem; margin: 30px 0 4px; overflow-wrap: anywhere; }
p { margin: 0 0 10px; max-width: 110ch; color: var(--muted); overflow-wrap: anywhere; }
a { color: var(--accent); }
.warning {
  background: var(--warn); color: var(--warn-text); font-weight: 600;
  border-radius: 8px; padding: 10px 14px; max-width: none;
}
dl { display: flex; flex-wrap: wrap; gap: 8px 28px; margin: 0 0 16px; }
dl div { min-width: 0; }
dt { color: var(--muted); font-size: .78rem; }
dd { margin: 0; overflow-wrap: anywhere; }
nav { margin: 0 0 8px; }
nav ul { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0; padding: 0; list-style: none; }
.scroll {
  overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; margin: 8px 0;
}
table { border-collapse: collapse; width: 100%; font-size: .88rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: 6px 12px; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
thead th { background: var(--card); font-weight: 600; }
thead th.group { text-align: center; border-left: 1px solid var(--line); }
tbody th { text-align: left; font-weight: 400; position: sticky; left: 0; background: var(--page);
  white-space: normal; min-width: 132px; max-width: 340px; overflow-wrap: anywhere; }
thead th:first-child { position: sticky; left: 0; }
tbody tr:last-child > * { border-bottom: 0; }
tr.measured > *, td.measured { background: var(--ours); font-weight: 600; }
tr.difference > *, tr.absent > * { color: var(--muted); font-style: italic; }
tr.measured th, tr.difference th, tr.absent th { padding-left: 26px; }
tr.alone th { padding-left: 12px; }
td.difference { color: var(--muted); font-style: italic; }
td.dash { color: var(--muted); font-weight: 400; }
tbody th small { display: block; color: var(--muted); font-size: .78rem; }
.small { font-size: .82rem; }
figure { margin: 8px 0 0; }
figure img { display: block; max-width: 100%; width: 660px; height: auto; border-radius: 8px; }
figure .scroll { border: 0; border-radius: 0; }
figure.wide img { min-width: 620px; width: 100%; max-width: 1080px; }
figcaption { color: var(--muted); font-size: .86rem; margin-top: 6px; overflow-wrap: anywhere; }
@media (max-width: 560px) {
  body { padding: 18px 12px 36px; }
  th, td { padding: 5px 9px; }
  tbody th { max-width: 42vw; }
}
@media print { section { break-inside: avoid; } }
"""
# Nothing may be loaded or run, whatever a name says.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
LEGEND = (
    "Published numbers stand as printed, with their source. Measured ones are "
    "mean ± standard deviation (n repetitions with other seeds); the difference is measured minus "
    f"published, in points. A {DASH} says that nothing was published or measured there. "
    "A column holds one protocol."
)
SIDE_PARTS = ("published", "measured", "difference")


def _render_cell(text: str, kind: str) -> str:
    classes = " ".join(filter(None, (kind, "dash" if text == DASH else "")))
    return f'<td class="{classes}">{escape(text)}</td>'


def _render_row(row: Row, source: str | None, *, alone: bool) -> str:
    if row.kind == "both":
        kinds = [part if part != "published" else "" for part in SIDE_PARTS]
        cells = [_render_cell(c, kinds[i % len(kinds)]) for i, c in enumerate(row.cells)]
    else:
        cells = [_render_cell(cell, "") for cell in row.cells]
    note = "" if row.note == source else row.note
    small = f"<small>{escape(note)}</small>" if note else ""
    classes = f"{row.kind} alone" if alone else row.kind
    label = f'<th scope="row">{escape(row.label)}{small}</th>'
    return f'<tr class="{classes}">{label}{"".join(cells)}</tr>'


def _render_head(grid: Grid) -> str:
    if not grid.side:
        cells = "".join(f'<th scope="col">{escape(column)}</th>' for column in grid.columns)
        return f"<tr><th></th>{cells}</tr>"
    groups = "".join(
        f'<th scope="colgroup" class="group" colspan="3">{escape(column)}</th>'
        for column in grid.columns
    )
    parts = '<th scope="col">paper</th><th scope="col">measured</th><th scope="col">difference</th>'
    return f'<tr><th rowspan="2"></th>{groups}</tr><tr>{parts * len(grid.columns)}</tr>'


def _render_grid(grid: Grid) -> str:
    source = shared_citation(grid)
    shown = show_rows(grid)
    has_published = any(row.kind == "published" for row in shown)
    rows = "\n".join(_render_row(row, source, alone=not has_published) for row in shown)
    notes = "".join(f"<p>{escape(note)}</p>" for note in grid.notes)
    small = describe_sources(grid)
    below = f'<p class="small">{escape(small)}</p>' if small else ""
    return (
        f'<section id="{escape(grid.slug)}"><h3>{escape(grid.title)}</h3>{notes}\n'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(grid.title)}">'
        f"<table><thead>{_render_head(grid)}</thead>\n"
        f"<tbody>{rows}</tbody></table></div>{below}</section>"
    )


def _to_uri(image: bytes) -> str:
    kind = "png" if image.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


def _render_drawing(drawing: Drawing) -> str:
    head = f'<section id="{escape(drawing.slug)}"><h3>{escape(drawing.title)}</h3>'
    if not drawing.images:
        return f"{head}<p>{escape(drawing.caption)}</p></section>"
    light, dark = (_to_uri(drawing.images[theme]) for theme in ("light", "dark"))
    darker = (
        f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">' if dark != light else ""
    )
    picture = f'<picture>{darker}<img alt="{escape(drawing.title)}" src="{light}"></picture>'
    if drawing.is_wide:
        picture = f'<div class="scroll" tabindex="0">{picture}</div>'
    wide = ' class="wide"' if drawing.is_wide else ""
    caption = f"<figcaption>{escape(drawing.caption)}</figcaption>"
    return f"{head}<figure{wide}>{picture}{caption}</figure></section>"


def render_report(
    title: str,
    facts: Sequence[tuple[str, str]],
    warning: str,
    sections: Mapping[str, tuple[Sequence[Grid], Sequence[Drawing]]],
) -> str:
    """The whole page; every name in it is escaped.

    Args:
        title: of the page.
        facts: what it was made from.
        warning: what a reader must know first; may be empty.
        sections: heading -> tables and figures below it.
    """
    anchors = {heading: f"section-{number}" for number, heading in enumerate(sections, start=1)}
    links = "".join(
        f'<li><a href="#{anchor}">{escape(heading)}</a></li>' for heading, anchor in anchors.items()
    )
    parts = []
    for heading, (grids, drawings) in sections.items():
        inner = "\n".join([*map(_render_grid, grids), *map(_render_drawing, drawings)])
        parts.append(f'<h2 id="{anchors[heading]}">{escape(heading)}</h2>\n{inner}')
    shown = "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts
    )
    said = f'<p class="warning">{escape(warning)}</p>' if warning else ""
    body = "\n".join(parts)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{said}
<dl>
{shown}
</dl>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<p class="small">{escape(LEGEND)}</p>
{body}
</body>
</html>
"""

"""The retrieval figure as one HTML file that needs nothing else: no network, scripts or fonts."""

import base64
import io
from html import escape

from PIL import Image

from transfer.nearest.gallery import Case, Gallery, Picture, Section

STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --text: #1c2128; --muted: #59636e; --line: #d8dee4; --card: #f6f8fa;
  --agree: #1a7f37; --differ: #cf222e; --query: #57606a; --warn: #fff1e5; --warn-text: #953800;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0f1318; --text: #e6edf3; --muted: #9aa4af; --line: #2d333b; --card: #171c23;
    --agree: #3fb950; --differ: #ff6a60; --query: #8b949e; --warn: #3a2412; --warn-text: #ffb77c;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1240px; padding: 24px 20px 48px;
  background: var(--page); color: var(--text);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
h1 { font-size: 1.5rem; line-height: 1.2; margin: 0 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 32px 0 2px; }
p { margin: 0 0 12px; max-width: 100ch; color: var(--muted); }
.warning {
  background: var(--warn); color: var(--warn-text); font-weight: 600;
  border-radius: 8px; padding: 10px 14px; max-width: none;
}
dl { display: flex; flex-wrap: wrap; gap: 8px 24px; margin: 0 0 14px; }
dl div { min-width: 0; }
dt { color: var(--muted); font-size: .78rem; }
dd { margin: 0; overflow-wrap: anywhere; }
.legend { display: flex; flex-wrap: wrap; gap: 6px 20px; font-size: .86rem; }
.legend span { display: inline-flex; align-items: center; gap: 7px; }
.legend i { width: 18px; height: 18px; border-radius: 4px; border: 3px solid var(--query); }
.legend i.agree { border-color: var(--agree); }
.legend i.differ { border: 3px dashed var(--differ); }
.case {
  display: grid; grid-template-columns: 122px minmax(0, 1fr); gap: 0 20px;
  padding: 14px 0; border-top: 1px solid var(--line);
}
.neighbors {
  display: grid; gap: 10px 8px; margin: 0; padding: 0; list-style: none; align-content: start;
  grid-template-columns: repeat(10, minmax(0, 1fr));
}
figure { margin: 0; min-width: 0; }
img {
  display: block; width: 100%; aspect-ratio: 1; object-fit: cover; background: var(--card);
  border: 3px solid var(--query); border-radius: 6px;
}
.neighbor img { border-color: var(--line); }
img.small { image-rendering: pixelated; }
.neighbor img.agree { border-color: var(--agree); }
.neighbor img.differ { border-color: var(--differ); border-style: dashed; }
figcaption { font-size: .74rem; line-height: 1.3; margin-top: 3px; }
figcaption b, figcaption span { display: block; overflow: hidden; text-overflow: ellipsis; }
figcaption b { font-weight: 500; white-space: nowrap; }
figcaption span { color: var(--muted); white-space: nowrap; font-variant-numeric: tabular-nums; }
.query figcaption { font-size: .84rem; }
.query figcaption b {
  font-weight: 650; white-space: normal; overflow-wrap: anywhere;
  display: -webkit-box; -webkit-box-orient: vertical; -webkit-line-clamp: 3;
}
@media (max-width: 940px) {
  .neighbors { grid-template-columns: repeat(5, minmax(0, 1fr)); }
}
@media (max-width: 560px) {
  body { padding: 16px 12px 32px; }
  .case { grid-template-columns: minmax(0, 1fr); gap: 12px 0; }
  .query { display: grid; grid-template-columns: 96px minmax(0, 1fr); gap: 12px; }
  .query figcaption { align-self: center; font-size: .95rem; }
  .neighbors { gap: 10px 6px; }
}
@media print { .case { break-inside: avoid; } }
"""
# Nothing may be loaded or run, whatever a file name says.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def to_data_uri(image: Image.Image) -> str:
    """The image inside the page; small ones keep every pixel."""
    file = io.BytesIO()
    if min(image.size) <= 64:
        image.save(file, "PNG")
        kind = "png"
    else:
        image.save(file, "JPEG", quality=82)
        kind = "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def _render_picture(picture: Picture, rank: int | None, extra: str = "") -> str:
    classes = ["small"] if min(picture.image.size) <= 64 else []
    words = ["query" if rank is None else f"neighbour {rank}", picture.caption]
    if picture.agrees is not None:
        classes.append("agree" if picture.agrees else "differ")
        words.append("same class" if picture.agrees else "other class")
    detail = ""
    if picture.similarity is not None:
        mark = {True: " ✓", False: " ✗", None: ""}[picture.agrees]
        detail = f"<span>{picture.similarity:.3f}{mark}</span>"
        words.append(f"similarity {picture.similarity:.3f}")
    kind = "query" if rank is None else "neighbor"
    return (
        f'<figure class="{kind}" title="{escape(picture.title)}">'
        f'<img class="{" ".join(classes)}" alt="{escape(", ".join(words))}" '
        f'src="{to_data_uri(picture.image)}">'
        f"<figcaption><b>{escape(picture.caption)}</b>{detail}{extra}</figcaption></figure>"
    )


def _render_case(case: Case) -> str:
    agreement = f"<span>{escape(case.agreement)}</span>" if case.agreement else ""
    neighbors = "\n".join(
        f"<li>{_render_picture(picture, rank)}</li>"
        for rank, picture in enumerate(case.neighbors, start=1)
    )
    return (
        f'<div class="case">{_render_picture(case.query, None, agreement)}\n'
        f'<ol class="neighbors">{neighbors}</ol></div>'
    )


def _render_section(section: Section) -> str:
    cases = "\n".join(map(_render_case, section.cases))
    return (
        f"<section><h2>{escape(section.heading)}</h2>\n"
        f"<p>{escape(section.note)}</p>\n{cases}</section>"
    )


LEGEND = """<p class="legend"><span><i></i>query</span>
<span><i class="agree"></i>same class ✓</span>
<span><i class="differ"></i>other class ✗</span></p>"""


def render_page(gallery: Gallery) -> str:
    """The whole page; every name in it is escaped."""
    title = escape(gallery.title)
    facts = "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in gallery.facts
    )
    warning = f'<p class="warning">{escape(gallery.warning)}</p>' if gallery.warning else ""
    sections = "\n".join(map(_render_section, gallery.sections))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{title}</h1>
{warning}
<dl>
{facts}
</dl>
{LEGEND if gallery.has_classes else ""}
{sections}
</body>
</html>
"""

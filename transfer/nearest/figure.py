"""The retrieval figure as a PNG: queries at left, neighbours in rows (paper, section 4.2)."""

from pathlib import Path

import matplotlib
from PIL import Image, ImageDraw, ImageFont

from instdisc.runs.folders import atomic_file
from transfer.nearest.gallery import Case, Gallery, Picture

TILE, BORDER, GAP, MARGIN = 112, 5, 10, 24
CAPTION = 36  # two lines below a tile
QUERY_GAP = 28  # between the query and its neighbours
HEADING = 44
COLORS = {True: "#1a7f37", False: "#cf222e", None: "#d8dee4"}
QUERY = "#57606a"
TEXT, MUTED = "#1c2128", "#59636e"


class _Painter:
    """Draws onto a white sheet."""

    def __init__(self, width: int, height: int) -> None:
        self.sheet = Image.new("RGB", (width, height), "white")
        self.draw = ImageDraw.Draw(self.sheet)
        self.fonts: dict[tuple[int, bool], ImageFont.FreeTypeFont] = {}

    def font(self, size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont:
        """Matplotlib's font: it has more scripts than Pillow's own."""
        if (size, bold) not in self.fonts:
            name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
            path = Path(matplotlib.get_data_path(), "fonts", "ttf", name)
            self.fonts[size, bold] = ImageFont.truetype(str(path), size)
        return self.fonts[size, bold]

    def text(
        self,
        x: int,
        y: int,
        text: str,
        *,
        size: int,
        width: int,
        bold: bool = False,
        color: str = TEXT,
    ) -> None:
        """One line, cut where it would be too wide."""
        font = self.font(size, bold=bold)
        shown = text
        while shown and font.getlength(shown) > width:
            shown = shown[:-2].rstrip("…") + "…" if len(shown) > 2 else ""
        self.draw.text((x, y), shown, font=font, fill=color)

    def picture(self, x: int, y: int, picture: Picture, detail: str) -> None:
        """A tile with its border, and two lines below it."""
        color = COLORS[picture.agrees] if picture.similarity is not None else QUERY
        self.draw.rectangle((x, y, x + TILE - 1, y + TILE - 1), fill=color)
        side = TILE - 2 * BORDER
        how = Image.Resampling.NEAREST if picture.is_small else Image.Resampling.LANCZOS
        self.sheet.paste(picture.image.resize((side, side), how), (x + BORDER, y + BORDER))
        bold = picture.similarity is None
        self.text(x, y + TILE + 3, picture.caption, size=12, width=TILE, bold=bold)
        self.text(x, y + TILE + 19, detail, size=11, width=TILE, color=MUTED)

    def case(self, y: int, case: Case) -> None:
        """A row."""
        self.picture(MARGIN, y, case.query, case.agreement)
        for number, picture in enumerate(case.neighbors):
            x = MARGIN + TILE + QUERY_GAP + number * (TILE + GAP)
            mark = {True: " ✓", False: " ✗", None: ""}[picture.agrees]
            self.picture(x, y, picture, f"{picture.similarity:.3f}{mark}")


def draw_figure(gallery: Gallery) -> Image.Image:
    """The figure as an image."""
    cases = [case for section in gallery.sections for case in section.cases]
    columns = max(len(case.neighbors) for case in cases)
    width = 2 * MARGIN + TILE + QUERY_GAP + columns * (TILE + GAP) - GAP
    row = TILE + CAPTION + GAP
    lines = 2 + bool(gallery.warning)
    height = 2 * MARGIN + 22 * lines + HEADING * len(gallery.sections) + row * len(cases)
    painter = _Painter(width, height)
    y, inner = MARGIN, width - 2 * MARGIN
    painter.text(MARGIN, y, gallery.title, size=18, width=inner, bold=True)
    y += 26
    facts = "   ".join(f"{name}: {value}" for name, value in gallery.facts)
    painter.text(MARGIN, y, facts, size=12, width=inner, color=MUTED)
    y += 18
    if gallery.warning:
        painter.text(MARGIN, y, gallery.warning, size=12, width=inner, bold=True, color="#953800")
        y += 22
    for section in gallery.sections:
        painter.text(MARGIN, y + 14, section.heading, size=15, width=inner, bold=True)
        y += HEADING
        for case in section.cases:
            painter.case(y, case)
            y += row
    return painter.sheet


def save_figure(path: Path, gallery: Gallery) -> None:
    """Writes the figure, whole or not at all."""
    with atomic_file(path) as file:
        draw_figure(gallery).save(file, "PNG")

"""The retrieval page and figure: escaping, self-containment, and what a browser makes of them."""

import html.parser
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from transfer.nearest.feature_map import FeatureMap
from transfer.nearest.figure import BORDER, MARGIN, QUERY_GAP, TILE, draw_figure
from transfer.nearest.gallery import Case, Gallery, Picture, Section, to_thumbnail
from transfer.nearest.page import render_page
from transfer.retrieve import main

NASTY = (
    "<img src=x onerror=alert(1)>",
    '"><script>alert(2)<',
    "' onload='alert(3)",
    "&lt;b&gt; & co",
    "{braces} %s `x` ${y}",
    "]]><!-- é 犬 \u202e -->",
)


class Outline(html.parser.HTMLParser):
    """Tags, attributes and text of a page, read as a browser would."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, list[str]] = {}
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def build_gallery(names: tuple[str, ...] = NASTY, side: int = 100) -> Gallery:
    """Two cases whose every text is one of the names in turn."""
    rng = np.random.default_rng(0)

    def picture(number: int, similarity: float | None, agrees: bool | None) -> Picture:
        pixels = rng.integers(0, 256, (side, side, 3), dtype=np.uint8)
        name = names[number % len(names)]
        return Picture(Image.fromarray(pixels), name, f"/{name}", similarity, agrees)

    cases = [
        Case(
            picture(row, None, None),
            [picture(row + i, 1 - i / 20, i % 3 != row) for i in range(10)],
        )
        for row in range(2)
    ]
    facts = [(names[0], names[1]), (names[2], names[3])]
    sections = [Section("Best cases", names[4], cases[:1]), Section(names[5], "", cases[1:])]
    points, labels = np.linspace(0, 1, 24).reshape(12, 2), np.arange(12) % len(names)
    feature_map = FeatureMap(names[2], points, labels, names, b"\xff\xd8\xff")
    return Gallery(names[1], facts, sections, names[0], feature_map)


def test_every_name_is_text_and_nothing_else() -> None:
    outline = Outline(render_page(build_gallery()))
    assert outline.tags == {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "span", "i", "dl"),
        *("div", "dt", "dd", "section", "figure", "img", "figcaption", "b", "ol", "li"),
        *("header", "main", "script", "svg", "g", "circle", "ul"),
    }
    assert set(outline.attributes) == {
        *("lang", "charset", "http-equiv", "content", "name", "class", "title", "alt", "src"),
        *("id", "hidden", "role", "aria-label", "viewbox", "cx", "cy", "r"),
        *("data-tile", "data-columns", "data-name", "data-i"),
    }
    assert set(outline.attributes["data-name"]) == set(NASTY)
    for name in NASTY:
        assert name in "".join(outline.text)
        assert f"/{name}" in outline.attributes["title"]


def test_page_needs_nothing_from_elsewhere() -> None:
    page = render_page(build_gallery())
    assert all(source.startswith("data:image/") for source in Outline(page).attributes["src"])
    assert not re.search(r"https?:|url\(|@import|<script|<link", page.partition("<body>")[0])
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert not re.search(r"https?:|import|fetch|XMLHttp|innerHTML|eval", script)
    assert "default-src 'none'" in page


def test_names_from_disk_reach_the_page_escaped(
    tiny_network: Path, image_tree: Path, tmp_path: Path
) -> None:
    root = tmp_path / "data"
    for split in ("train", "val"):
        for label, name in enumerate(("<b>bold", "a&b\"'")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(3):
                source = image_tree / "train" / f"class{label}" / f"{number}.png"
                shutil.copy(source, folder / f"<i>{number}.png")
    assert main(["--data", str(root), "-j", "0", "--device", "cpu", "--output", str(tmp_path)]) == 0
    outline = Outline((tmp_path / "retrieval.html").read_text("utf-8"))
    text = "".join(outline.text)
    assert "<b>bold" in text
    assert "a&b\"'" in text
    assert str(root / "train" / "<b>bold" / "<i>0.png") in outline.attributes["title"]


def test_figure_has_borders_by_agreement() -> None:
    gallery = build_gallery()
    figure = draw_figure(gallery).convert("RGB")
    case = gallery.sections[0].cases[0]
    found = {}
    # The top of the first row: the first line whose pixels are the border of the query.
    x = MARGIN + TILE // 2
    column = [figure.getpixel((x, y)) for y in range(figure.height)]
    top = column.index((0x57, 0x60, 0x6A))
    for number, picture in enumerate(case.neighbors):
        x = MARGIN + TILE + QUERY_GAP + number * (TILE + 10) + TILE // 2
        found[number] = figure.getpixel((x, top + BORDER // 2))
        colors = {True: (0x1A, 0x7F, 0x37), False: (0xCF, 0x22, 0x2E)}
        assert found[number] == colors[bool(picture.agrees)]
    assert len(set(found.values())) == 2


def test_thumbnails_are_square_and_never_enlarged() -> None:
    assert to_thumbnail(Image.new("L", (640, 480))).size == (160, 160)
    assert to_thumbnail(Image.new("RGB", (32, 32))).size == (32, 32)
    assert to_thumbnail(Image.new("RGB", (3000, 40))).size == (40, 40)


# Runs inside the page, which lies in a frame: a browser's own window has a least width.
CHECK = """<script>addEventListener("load", () => {
  const pictures = [...document.images].map(i => [i.complete, i.naturalWidth, i.clientWidth]);
  parent.postMessage({pictures, width: document.documentElement.scrollWidth}, "*");
});</script></body>"""
FRAME = """<!DOCTYPE html><script>addEventListener("message", event =>
  document.documentElement.setAttribute("data-check", JSON.stringify(event.data)));
</script><iframe src="checked.html" width="{width}" height="900" style="border: 0"></iframe>"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("side", [32, 100])
def test_browser_shows_every_image_without_complaint(
    width: int, side: int, tmp_path: Path, dump: Callable[[Path], tuple[str, str]]
) -> None:
    page = render_page(build_gallery(side=side))
    shown = tmp_path / "page.html"
    shown.write_text(page, "utf-8")
    document, log = dump(shown)
    assert "CONSOLE" not in log
    assert document.count("<img ") == 22 + 1  # the map has one picture of all thumbnails
    # The page forbids scripts but its own; the copy that is examined does not.
    checked, changed = re.subn(r"<meta http-equiv[^>]*>", "", page.replace("</body>", CHECK))
    assert changed == 1
    (tmp_path / "checked.html").write_text(checked, "utf-8")
    shown.write_text(FRAME.format(width=width), "utf-8")
    document, log = dump(shown)
    assert "CONSOLE" not in log
    check = json.loads(Outline(document).attributes["data-check"][0])
    *pictures, thumbnails = check["pictures"]
    assert len(pictures) == 22
    assert all(complete and natural == side for complete, natural, _ in pictures)
    assert min(shown for _, _, shown in pictures) > 50
    assert thumbnails[0]
    assert check["width"] == width


@pytest.mark.slow
def test_browser_that_complains_would_be_heard(
    tmp_path: Path, dump: Callable[[Path], tuple[str, str]]
) -> None:
    """The check above is no check unless a bad page fails it."""
    page = render_page(build_gallery()).replace("</body>", "<script>1</script></body>")
    (tmp_path / "page.html").write_text(page, "utf-8")
    assert "CONSOLE" in dump(tmp_path / "page.html")[1]

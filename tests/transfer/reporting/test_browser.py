"""The report in a real browser: widths, light and dark, sorting and filtering, accessibility."""

import html
import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instdisc.runs.results import append_results
from transfer.report import main

pytestmark = pytest.mark.slow
DATA: dict[str, Any] = runpy.run_path(str(Path(__file__).with_name("report_data.py")))
# .ci/run puts it there: npm install --prefix build/npm axe-core
AXE = Path(__file__).parents[3] / "build/npm/node_modules/axe-core/axe.min.js"
FRAME = """<!DOCTYPE html><script>const found = {{}}; addEventListener("message", event => {{
  found[event.data[0]] = event.data[1];
  document.documentElement.setAttribute("data-check", JSON.stringify(found)); }});
</script>{frames}"""
IFRAME = '<iframe src="checked.html" width="{width}" height="900" style="border: 0"></iframe>'
CHECK = """<script>addEventListener("load", async () => {
  const look = async () => { SCRIPT };
  parent.postMessage([innerWidth, await look()], "*"); });</script></body>"""
LOOK = """
  const pictures = [...document.images].filter(i => i.alt).map(i => [i.complete, i.naturalWidth]);
  const first = document.querySelector("table, pre").getBoundingClientRect();
  const boxes = [...document.querySelectorAll("table")].map(t => t.parentElement.clientWidth);
  const cell = document.querySelector(".card tbody td");
  return {pictures, boxes, top: first.top, bottom: first.bottom, rows: document.querySelectorAll(
    ".card tbody tr").length, width: document.documentElement.scrollWidth, dark: getComputedStyle(
    document.body).backgroundColor, loaded: performance.now()};
"""
USE = """
  const order = () => [...document.querySelectorAll(".card tbody tr")].filter(r => !r.hidden).map(
    r => r.cells[1].textContent.trim());
  const found = {before: order()};
  const head = document.querySelector(".card th[data-column='1']");
  const sort = head.querySelector("button");
  sort.click(); found.falling = order(); found.said = head.getAttribute("aria-sort");
  sort.click(); found.rising = order();
  sort.click(); found.again = order();
  const chip = document.querySelector("button[data-kind='supervised']");
  chip.click(); found.supervised = order(); chip.click();
  const input = document.querySelector(".controls input");
  input.value = "tau 0.1"; input.dispatchEvent(new Event("input")); found.words = order();
  found.shown = document.querySelector(".controls output").textContent;
  const set = document.querySelector("button[data-set='2']");
  set.click(); found.hidden = document.querySelector(".card tbody td").hidden;
  const plane = document.querySelector(".plane");
  plane.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
  found.tip = [plane.querySelector(".tip").hidden, plane.querySelector(".name").textContent];
  document.querySelectorAll("details").forEach(d => d.open = false);
  location.hash = "#table6-vgg16"; await new Promise(done => setTimeout(done, 200));
  found.opened = document.querySelector("details.folded").open;
  return found;
"""


@pytest.fixture
def look(tmp_path: Path, dump: Callable[..., tuple[str, str]]) -> Callable[..., Any]:
    """Opens the report at some widths, runs a script in each, and returns what the scripts do."""
    page = tmp_path / "runs" / "report" / "report.html"

    def run(script: str, *widths: int, dark: bool = False, library: str = "") -> list[Any]:
        # The page forbids scripts but its own; the copy that is examined does not.
        text, changed = re.subn(r"<meta http-equiv[^>]*>", "", page.read_text("utf-8"))
        assert changed == 1
        check = f"<script>{library}</script>" + CHECK.replace("SCRIPT", script)
        (tmp_path / "checked.html").write_text(text.replace("</body>", check), "utf-8")
        frame = tmp_path / "frame.html"
        frames = "".join(IFRAME.format(width=width) for width in widths)
        frame.write_text(FRAME.format(frames=frames))
        document, log = dump(frame, dark=dark)
        assert "CONSOLE" not in log, log
        found = re.search(r'data-check="([^"]*)"', document)
        assert found is not None, document[:500]
        said = json.loads(html.unescape(found.group(1)))
        return [said[str(width)] for width in widths]

    return run


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_everything_is_shown_at_every_width(
    tmp_path: Path, look: Callable[..., Any], dump: Callable[..., tuple[str, str]], dark: bool
) -> None:
    append_results(DATA["study_rows"]())
    DATA["write_runs"](tmp_path / "runs")
    assert main([]) == 0
    _, log = dump(tmp_path / "runs" / "report" / "report.html", dark=dark)
    assert "CONSOLE" not in log  # the page's own policy admits its style and script
    widths = (400, 800, 1280, 1600)
    for width, check in zip(widths, look(LOOK, *widths, dark=dark), strict=True):
        assert len(check["pictures"]) == 10
        assert all(complete and natural > 0 for complete, natural in check["pictures"])
        assert check["width"] == width  # wide tables scroll in their boxes
        assert max(check["boxes"]) <= width
        assert check["top"] < 400
        assert (check["dark"] == "rgb(255, 255, 255)") != dark


def test_the_demo_fills_the_first_screen(tmp_path: Path, look: Callable[..., Any]) -> None:
    append_results(DATA["demo_rows"]())
    assert main(["--no-figures"]) == 0
    narrow, wide = look(LOOK, 400, 1280)
    assert wide["bottom"] < 700
    assert narrow["top"] < 400


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_or_one_number_is_shown_at_once(
    tmp_path: Path, look: Callable[..., Any], count: int
) -> None:
    if count:
        append_results([DATA["make_row"]()])
    assert main([]) == 0
    for width, check in zip((400, 1280), look(LOOK, 400, 1280), strict=True):
        assert check["bottom"] < 700
        assert (check["rows"], check["width"]) == (count, width)


def test_two_hundred_networks_scroll_in_a_box(look: Callable[..., Any]) -> None:
    append_results(DATA["many_rows"]())
    assert main(["--no-figures"]) == 0
    (check,) = look(LOOK, 1280)
    assert (check["rows"], check["width"]) == (200, 1280)
    assert check["bottom"] > 5000  # all rows are there, and scroll in a box


def test_tables_are_sorted_and_filtered_by_clicking(
    tmp_path: Path, look: Callable[..., Any]
) -> None:
    make_row = DATA["make_row"]
    append_results(
        [
            make_row(weights="a", facts={"temperature": 0.05}, value=41.0),
            make_row(weights="b", facts={"temperature": 0.1}, value=43.5),
            make_row(weights="supervised:x.pth", value=70.0),
            make_row(weights="random:resnet18", value=9.0),
            make_row(weights="b", facts={"temperature": 0.1}, dataset="places205", value=30.0),
        ]
    )
    DATA["write_runs"](tmp_path / "runs")
    assert main([]) == 0
    (found,) = look(USE, 1280)
    numbers = {key: [text.split()[0] for text in value] for key, value in found.items()
               if isinstance(value, list) and key != "tip"}  # fmt: skip
    assert numbers["before"] == numbers["again"] == ["41.0", "43.5", "9.0", "70.0"]
    assert numbers["falling"] == ["70.0", "43.5", "41.0", "9.0"]
    assert numbers["rising"] == ["9.0", "41.0", "43.5", "70.0"]
    assert found["said"] == "descending"
    assert numbers["supervised"] == ["70.0"]
    assert numbers["words"] == ["43.5"]
    assert found["shown"] == "1 of 4 networks"
    assert found["hidden"] is True  # a column of another data set than the chosen one
    assert found["tip"] == [False, "kind 0"]
    assert found["opened"] is True


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_an_automatic_check_of_accessibility_finds_nothing(
    tmp_path: Path, look: Callable[..., Any], dark: bool
) -> None:
    if not AXE.exists():
        pytest.skip(f"no {AXE.name}: npm install --prefix build/npm axe-core@4.14.0")
    append_results(DATA["study_rows"]())
    DATA["write_runs"](tmp_path / "runs")
    assert main([]) == 0
    script = """document.querySelectorAll("details").forEach(d => d.open = true);
      document.querySelectorAll("section").forEach(s => s.style.contentVisibility = "visible");
      const found = await axe.run();
      return {passes: found.passes.length, violations: found.violations.map(
        v => [v.id, v.help, v.nodes.slice(0, 3).map(n => n.html + " " + n.failureSummary)])};"""
    library = AXE.read_text("utf-8")
    for found in look(script, 400, 1280, dark=dark, library=library):
        assert found["violations"] == []
        assert found["passes"] > 20

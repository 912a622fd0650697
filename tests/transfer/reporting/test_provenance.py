"""Every number on the page has its protocol, data set, n and source in its table, which is one
click away from the scorecard; what was published and what was measured never share a cell."""

import dataclasses
import html.parser
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from instdisc.runs.results import append_results
from transfer.report import main
from transfer.reporting import paper_numbers
from transfer.reporting.benchmarks import BENCHMARKS

DATA: dict[str, Any] = runpy.run_path(str(Path(__file__).with_name("report_data.py")))
VOID = {"meta", "input", "img", "source", "br"}
SHAPES = {
    "published": re.compile(r"\d+\.\d\d?"),
    "measured": re.compile(r"\d+\.\d\d( ± \d+\.\d\d)? \(n=\d+\)"),
    "difference": re.compile(r"[+-]\d+\.\d"),
    "absent": re.compile("(?!)"),  # has dashes only
}
DASH = "–"


@dataclasses.dataclass
class Node:
    """An element of the page."""

    tag: str
    attributes: dict[str, str]
    children: list["Node | str"] = dataclasses.field(default_factory=list)

    @property
    def text(self) -> str:
        """All text in it."""
        parts = (each if isinstance(each, str) else each.text for each in self.children)
        return " ".join("".join(parts).split())

    def find(self, *tags: str) -> Iterator["Node"]:
        """Elements below it, in the page's order."""
        for each in self.children:
            if isinstance(each, Node):
                if each.tag in tags:
                    yield each
                yield from each.find(*tags)


class Reader(html.parser.HTMLParser):
    """The page as a tree."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root = Node("page", {})
        self.open = [self.root]
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def cells_of(table: Node) -> Iterator[tuple[Node, int, str, str]]:
    """(row, column, whose number it is, text) of every cell but dashes."""
    for row in table.find("tr"):
        for number, cell in enumerate(row.find("td")):
            kind = row.attributes["class"].split()[0]
            if kind == "both":
                kind = cell.attributes["class"].split()[:1] or ["published"]
                kind = kind[0] if kind[0] in SHAPES else "published"
            if cell.text != DASH:
                yield row, number, kind, cell.text


def columns_of(table: Node) -> list[str]:
    """The column that each cell of a row belongs to."""
    groups = [th for th in table.find("th") if "group" in th.attributes.get("class", "")]
    if groups:
        return [th.text for th in groups for _ in range(int(th.attributes["colspan"]))]
    heads = [th for th in table.find("th") if "data-column" in th.attributes]
    return [th.text for th in heads[1:]]


def check_table(section: Node) -> list[str]:
    """What is wrong with the numbers of one table of details."""
    (table,) = section.find("table")
    columns = columns_of(table)
    words = " ".join(p.text for p in section.find("p"))
    addresses = set(paper_numbers.ADDRESSES.values())
    below = [p for p in section.find("p") if "small" in p.attributes.get("class", "")]
    shared = {a.attributes.get("href") for p in below for a in p.find("a")} & addresses
    wrong = []
    if not re.search(r"Data: \S", words):
        wrong.append("no data set")
    measured_with = words.partition("Protocol of the measurements: ")[2].partition(" Data: ")[0]
    for row, number, kind, text in cells_of(table):
        (head,) = row.find("th")
        small = list(head.find("small"))
        if not SHAPES[kind].fullmatch(text):
            wrong.append(f"{kind} cell {text!r}")
        if kind == "published":
            own = {a.attributes.get("href") for each in small for a in each.find("a")} & addresses
            if not (own or shared):
                wrong.append(f"no source of {text}")
            if not re.search(r"Protocol of what was published: \S.* Published n: ", words):
                wrong.append(f"no protocol of {text}")
        if kind == "measured":
            if not small or "title" not in head.attributes:
                wrong.append(f"no weights of {text}")
            several = "; " in measured_with
            named = re.search(rf"(^|; |, ){re.escape(columns[number])}(, [^:;]*)?: ", measured_with)
            if not measured_with or (several and not named):
                wrong.append(f"no protocol of {text} in {columns[number]}")
    return [f"{section.attributes['id']}: {each}" for each in wrong]


def check_card(section: Node, sections: dict[str, Node]) -> list[str]:
    """Which numbers of a scorecard are not in the table that their column leads to."""
    (table,) = section.find("table")
    links = [a.attributes["href"] for head in table.find("thead") for a in head.find("a")]
    wrong = []
    for row in [row for body in table.find("tbody") for row in body.find("tr")]:
        (head,) = row.find("th")
        for link, cell in zip(links, row.find("td"), strict=True):
            if cell.text == DASH:
                continue
            shown = cell.text.split()[0]
            target = next((a.attributes["href"] for a in cell.find("a")), link)
            details = sections.get(target.removeprefix("#"))
            if details is None:
                wrong.append(f"{target} leads nowhere")
                continue
            found = {
                f"{float(text.split()[0]):.1f}"
                for line, _, kind, text in cells_of(details)
                for name in line.find("th")
                if kind == "measured" and name.attributes["title"] in head.attributes["title"]
            }
            if shown not in found:
                wrong.append(f"{head.text}: {shown} is not in {target}")
            if "(n=" not in cell.attributes["title"]:
                wrong.append(f"{head.text}: {shown} has no n")
    return wrong


def check_page(page: str) -> tuple[list[str], int]:
    """What is wrong, and how many numbers were looked at."""
    root = Reader(page).root
    with_table = [s for s in root.find("section") if any(s.find("table"))]
    sections = {s.attributes["id"]: s for s in with_table}
    cards = [s for s in with_table if s.attributes["id"].startswith("scorecard")]
    grids = [s for s in with_table if s not in cards]
    wrong = [each for section in grids for each in check_table(section)]
    wrong += [each for card in cards for each in check_card(card, sections)]
    return wrong, sum(len(list(cells_of(section))) for section in grids)


@pytest.fixture
def page(tmp_path: Path) -> str:
    """A report with several tasks, networks and every published number."""
    append_results(DATA["study_rows"]())
    assert main(["--no-figures"]) == 0
    return (tmp_path / "runs" / "report" / "report.html").read_text("utf-8")


def test_every_number_has_its_protocol_data_count_and_source(page: str) -> None:
    wrong, count = check_page(page)
    assert wrong == []
    tables = (paper_numbers.TABLE1, paper_numbers.TABLE2, paper_numbers.TABLE3)
    later = [row for benchmark in BENCHMARKS for row in benchmark.published]
    rows = [*(row for table in tables for row in table), *paper_numbers.TABLE6, *later]
    assert count > sum(len(row.values) for row in rows)


@pytest.mark.parametrize(
    ("pattern", "replacement", "said"),
    [
        (r"Data: ImageNet\.", "", "no data set"),
        (r"Protocol of what was published: ", "", "no protocol of"),
        (r"Protocol of the measurements: ", "", "no protocol of"),
        (r'<a href="https://arxiv[^>]*>', "<a>", "no source of"),
        (r"<td class=\"\">46\.5</td>", "<td class=\"\">46.5 45.00 (n=1)</td>", "published cell"),
        (r'<td class="">35\.00 \(n=1\)</td>', '<td class="">35.00</td>', "measured cell"),
        (r'href="#table2"', 'href="#table3"', "is not in"),
        (r'href="#table2"', 'href="#table9"', "leads nowhere"),
    ],
)  # fmt: skip
def test_what_is_missing_is_found(page: str, pattern: str, replacement: str, said: str) -> None:
    changed, count = re.subn(pattern, replacement, page)
    assert count > 0
    wrong, _ = check_page(changed)
    assert any(said in each for each in wrong), wrong


def test_published_numbers_have_the_decimals_of_their_source(page: str) -> None:
    """Of VISSL two, of PyContrast one, in the same table."""
    sections = {s.attributes.get("id"): s for s in Reader(page).root.find("section")}
    shown = [text for _, _, _, text in cells_of(sections["table2-anchors"])]
    assert shown == ["46.8", "58.5", "54.99", "52.73", "56.68", "59.5", "58.3"]

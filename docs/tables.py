"""Writes the tables of the documents from docs/results/*.json, or checks that they are up to date.

    python docs/tables.py            rewrites the tables of README.md, docs/*.md, docs/results/*.md
    python docs/tables.py --check    changes nothing; exit code 1 and a line for each old document

A table stands between two comments, of which the first names a file of docs/results/ and one of its
`tables`. The file says which of its rows they show, and how:

    <!-- table: pretraining demo -->            docs/results/pretraining.json
    | `--arch` | kNN |                          {"demo": [{"arch": "resnet18", "knn": 43.5}],
    | --- | --- |                                "tables": {"demo": {"columns": {
    | resnet18 | 43.50 |                            "`--arch`": "{arch}",
    <!-- end -->                                    "kNN": "{knn:.2f}"}}}}

    columns    heading -> template of a row's fields, as in str.format; `{loss.1}` is field 1 of
               field loss. A list of numbers is shown as mean ± deviation (n=...)
    rows       which list of the file, by its name or path (`neighbors.rows`); else the table's name
    where      only rows with these values of these fields
    missing    what a cell shows whose template has a field that the row does not have; else nothing
    transpose  headings go down, rows across
"""

import argparse
import json
import re
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from instdisc.runs.results import Measured

REPO = Path(__file__).resolve().parents[1]
DOCUMENTS = ("README.md", "docs/*.md", "docs/results/*.md")
TABLE = re.compile(
    r"^(?P<begin><!-- table: (?P<file>[\w-]+) (?P<name>[\w-]+) -->\n).*?^(?P<end><!-- end -->)$",
    re.M | re.S,
)
MARKER = re.compile(r"^<!-- (?:table:.*|end) -->$", re.M)


class TableError(Exception):
    """A marker or a table's description is wrong."""


def look_up(values: Any, path: str) -> Any:
    """A field by its path; KeyError where there is none."""
    for name in path.split("."):
        values = values[name]
    if values is None:
        raise KeyError(path)
    return values


class RowFormatter(string.Formatter):
    """str.format with paths of fields; a list of numbers is shown by mean and deviation."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The value of a field, and the name that was used."""
        return look_up(kwargs, field_name), field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        """The text of a value."""
        return str(Measured.of(value)) if isinstance(value, list) else format(value, format_spec)


def make_table(stored: Mapping[str, Any], name: str) -> str:
    """The Markdown of one of a file's tables."""
    table = stored["tables"][name]
    where = table.get("where", {})
    missing = table.get("missing", "")

    def show(template: str, row: Mapping[str, Any]) -> str:
        try:
            return RowFormatter().vformat(template, (), row)
        except KeyError:
            return str(missing)

    columns = []
    for heading, template in table["columns"].items():
        cells = [
            show(template, row)
            for row in look_up(stored, table.get("rows", name))
            if all(row.get(field) == value for field, value in where.items())
        ]
        if all(cell == missing for cell in cells):
            raise TableError(f"no row has a value for {heading!r}: {template}")
        columns.append([heading, *cells])
    lines = (
        columns if table.get("transpose") else [list(line) for line in zip(*columns, strict=True)]
    )
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def update(text: str, results: Path) -> str:
    """A document with its tables made anew.

    Raises:
        TableError: a marker has no partner, or names what is not there.
    """

    def replace(match: re.Match[str]) -> str:
        try:
            stored = json.loads((results / f"{match['file']}.json").read_text("utf-8"))
            table = make_table(stored, match["name"])
        except (OSError, LookupError, TypeError, ValueError, TableError) as error:
            said = f"{type(error).__name__}: {error}"
            raise TableError(f"table: {match['file']} {match['name']}: {said}") from None
        return f"{match['begin']}\n{table}\n{match['end']}"

    found = TABLE.findall(text)
    if len(MARKER.findall(text)) != 2 * len(found):
        raise TableError("a `table:` or `end` comment has no partner")
    return TABLE.sub(replace, text)


def main(argv: Sequence[str] | None = None, repo: Path = REPO) -> int:
    """Rewrites or checks all documents; returns the exit code."""
    parser = argparse.ArgumentParser(prog="docs/tables.py", description="Tables of the documents.")
    parser.add_argument("--check", action="store_true", help="change nothing, tell what is old")
    check = parser.parse_args(argv).check
    exit_code = 0
    for path in sorted(path for pattern in DOCUMENTS for path in repo.glob(pattern)):
        name = path.relative_to(repo).as_posix()
        text = path.read_text("utf-8")
        try:
            new = update(text, repo / "docs" / "results")
        except TableError as error:
            print(f"{name}: {error}", file=sys.stderr)
            exit_code = 1
            continue
        if new == text:
            continue
        if check:
            print(f"{name}: tables differ from docs/results: run python docs/tables.py")
            exit_code = 1
        else:
            path.write_text(new, "utf-8")
            print(f"{name}: written")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())

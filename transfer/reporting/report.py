"""run_report(config): reads rows and run folders, writes the page, Markdown, CSV and figures."""

import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from instdisc.errors import UserError
from instdisc.runs.folders import atomic_file, git_revision, runs_root, write_text
from instdisc.runs.results import Result, check_results, repair_results, results_file
from transfer.reporting.page import render_report
from transfer.reporting.scorecard import Scorecard
from transfer.reporting.sections import build_sections
from transfer.reporting.settings import ReportConfig
from transfer.reporting.text import card_to_csv, card_to_text, to_csv, to_markdown

TITLE = "What the backbone is worth"
NOTHING = (
    "No result rows yet: there is only what was published. Measure with transfer/suite.py, "
    "or one task at a time."
)
DEMO_ONLY = (
    "All rows are of the demo images: they say that the code works, and nothing about the method."
)
LIST_OF_FILES = ".report-files"
OUR_FILES = re.compile(r"report\.(html|md)|tables/[\w.-]+\.csv|figures/[\w.-]+\.png")


def check_rows(path: Path) -> list[Result]:
    """The rows of a file that is sound.

    Raises:
        UserError: it is not, or is not there; all that is wrong is on stderr before.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist: run a task first, or name a file with --results")
    rows, problems = check_results(path)
    if problems:
        sys.stderr.writelines(f"{path}: {problem}\n" for problem in problems)
        raise UserError(
            f"{path}: {len(problems)} of {len(rows) + len(problems)} rows are damaged: "
            "--repair moves them to a file beside it"
        )
    return rows


def describe(rows: Sequence[Result], path: Path) -> list[tuple[str, str]]:
    """What the report was made from."""
    real = [row for row in rows if not row.is_demo]
    facts = [
        ("rows", f"{len(real):,} measured, {len(rows) - len(real):,} demo, of {path}"),
        ("networks", f"{len({row.weights_hash for row in rows}):,}"),
        ("written", time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())),
    ]
    revision = git_revision()
    if revision:
        facts.append(("code", revision[:12] + "+" * revision.endswith("+")))
    return facts


def write_report(config: ReportConfig) -> tuple[Path, list[Scorecard]]:
    """Writes all files; returns the page, and what it begins with."""
    path = config.results or results_file()
    rows = check_rows(path) if config.results or path.exists() else []
    root, folder = runs_root(), config.output or runs_root() / "report"
    sections = build_sections(rows, root, figures=config.figures)
    warning = NOTHING if not rows else DEMO_ONLY if all(row.is_demo for row in rows) else ""
    facts = describe(rows, path)
    files = {
        "report.html": render_report(TITLE, facts, warning, sections).encode(),
        "report.md": to_markdown(TITLE, facts, warning, sections).encode(),
    }
    for section in sections:
        for card in section.cards:
            files[f"tables/{card.slug}.csv"] = card_to_csv(card).encode()
        for grid in section.grids:
            files[f"tables/{grid.slug}.csv"] = to_csv(grid).encode()
        for drawing in section.drawings:
            if drawing.images:
                files[f"figures/{drawing.slug}.png"] = drawing.images["light"]
    replace_files(folder, files)
    return folder / "report.html", [card for section in sections for card in section.cards]


def replace_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes the files, and removes those that an earlier report wrote and this one has not.

    A table that is no more would be read as if it were. Files of others are left alone.
    """
    record = folder / LIST_OF_FILES
    earlier = record.read_text("utf-8").splitlines() if record.exists() else []
    write_text(record, "".join(f"{name}\n" for name in sorted({*earlier, *files})))
    for name, content in files.items():
        with atomic_file(folder / name) as file:
            file.write(content)
    for name in set(earlier) - set(files):
        if OUR_FILES.fullmatch(name):
            (folder / name).unlink(missing_ok=True)
    write_text(record, "".join(f"{name}\n" for name in sorted(files)))


def run_report(config: ReportConfig) -> int:
    """The command."""
    path = config.results or results_file()
    if config.repair:
        problems = repair_results(path)
        for problem in problems:
            sys.stdout.write(f"{path}: {problem}\n")
        where = path.with_name(path.name + ".damaged")
        moved = f"moved {len(problems)} to {where}" if problems else "nothing to repair"
        sys.stdout.write(f"{path}: {moved}\n")
    if config.check:
        sys.stdout.write(f"{path}: {len(check_rows(path)):,} rows, all sound\n")
    if not (config.check or config.repair):
        page, cards = write_report(config)
        width = shutil.get_terminal_size(fallback=(120, 24)).columns
        sys.stdout.writelines(f"\n{card_to_text(card, width)}" for card in cards)
        sys.stdout.write(f"\nreport: {page}\n" if cards else f"report: {page}\n")
    return 0

"""run_report(config): reads rows and run folders, writes the page, Markdown, CSV and figures."""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from instdisc.errors import UserError
from instdisc.runs.folders import atomic_file, git_revision, runs_root, write_text
from instdisc.runs.results import Result, check_results, repair_results, results_file
from transfer.reporting.drawing import Drawing
from transfer.reporting.figures import draw_figures
from transfer.reporting.grids import Grid
from transfer.reporting.page import render_report
from transfer.reporting.rows import collect
from transfer.reporting.settings import ReportConfig
from transfer.reporting.tables import Tables
from transfer.reporting.text import to_csv, to_markdown

TITLE = "What the backbone is worth"
NOTHING = (
    "No result rows yet: the tables show what was published. Measure with transfer/suite.py, "
    "or one task at a time."
)
DEMO_ONLY = (
    "All rows are of the demo images: they say that the code works, and nothing about the method. "
    "They stand in a section of their own, at the end."
)
DEMO_HEADING = "Demo: embedded images"
LIST_OF_FILES = ".report-files"
OUR_FILES = re.compile(r"report\.(html|md)|tables/[\w.-]+\.csv|figures/[\w.-]+\.png")
Sections = dict[str, tuple[list[Grid], list[Drawing]]]


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


def build_sections(rows: Sequence[Result], root: Path, *, figures: bool) -> Sections:
    """Headings, and the tables and figures below them; empty ones are left out."""
    grids = Tables(collect(rows)).build()
    drawings = {
        demo: draw_figures(root, rows, is_demo=demo) if figures else [] for demo in (False, True)
    }
    other = [g for g in grids if not g.is_demo and g.slug.startswith("other-")]
    sections: Sections = {
        "The paper's tables": ([g for g in grids if not g.is_demo and g not in other], []),
        "Also measured": (other, []),
        "Figures": ([], drawings[False]),
    }
    demo_grids = [grid for grid in grids if grid.is_demo]
    shown = [drawing for drawing in drawings[True] if drawing.images]
    if demo_grids or shown:
        sections[DEMO_HEADING] = (demo_grids, shown)
    return {name: parts for name, parts in sections.items() if any(parts)}


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


def write_report(config: ReportConfig) -> Path:
    """Writes all files; returns the page."""
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
    for grids, drawings in sections.values():
        files |= {f"tables/{grid.slug}.csv": to_csv(grid).encode() for grid in grids}
        for drawing in drawings:
            if drawing.images:
                files[f"figures/{drawing.slug}.png"] = drawing.images["light"]
    replace_files(folder, files)
    return folder / "report.html"


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
        sys.stdout.write(f"report: {write_report(config)}\n")
    return 0

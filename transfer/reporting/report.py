"""run_report(config): reads rows and run folders, writes the page, Markdown, CSV and figures."""

import re
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from instdisc.errors import UserError, some_of
from instdisc.runs.folders import atomic_file, git_revision, runs_root, write_text
from instdisc.runs.results import Result, check_results, repair_results, results_file
from transfer.reporting.networks import Network
from transfer.reporting.page import render_report
from transfer.reporting.rows import collect
from transfer.reporting.scorecard import Scorecard, build_scorecard
from transfer.reporting.sections import build_sections
from transfer.reporting.settings import ReportConfig
from transfer.reporting.tables import Tables
from transfer.reporting.text import card_to_csv, card_to_text, to_csv, to_markdown

TITLE = "What the backbone is worth"
NOTHING = (
    "No result rows yet: there is only what was published. Measure with transfer/suite.py, "
    "or one task at a time."
)
DEMO_ONLY = (
    "All rows are of the demo images: they say that the code works, and nothing about the method."
)
MISSING = "Results are missing, because these jobs failed or were not run: "
LIST_OF_FILES = ".report-files"
OUR_FILES = re.compile(r"report\.(html|md)|tables/[\w.-]+\.csv|figures/[\w.-]+\.(png|jpg)")


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
    if config.missing:
        warning = f"{warning} {MISSING}{', '.join(config.missing)}.".strip()
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
                files[f"figures/{drawing.file_name}"] = drawing.images["light"]
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


def open_line(page: Path) -> str:
    """The command that shows a page in a browser, on this system."""
    opener = {"darwin": "open", "win32": "start"}.get(sys.platform, "xdg-open")
    return f"{opener} {shlex.quote(str(page))}"


def names_of(run: str) -> set[str]:
    """What rows may call a network that --weights called `run`: a folder, a file, or any name."""
    path = Path(run)
    names = {run, path.name, path.stem if path.suffix else path.name}
    return names | ({path.parent.name} if path.name == "backbone.pt" else set())


def compare(rows: Sequence[Result], runs: Sequence[str]) -> list[Scorecard]:
    """The scorecards of some networks, beside the untrained ones of their architectures.

    Raises:
        UserError: there is no row of one of them.
    """
    entries = collect(rows)
    chosen: set[Network] = set()
    for run in runs:
        found = {e.network for e in entries if names_of(run) & set(e.network.names)}
        if not found:
            known = sorted({name for entry in entries for name in entry.network.names})
            raise UserError(f"no row is of {run}: measure it first; there are {some_of(known)}")
        chosen |= found
    archs = {network.arch for network in chosen}
    chosen |= {e.network for e in entries if e.network.kind == "random" and e.network.arch in archs}
    shown = [entry for entry in entries if entry.network in chosen]
    grids = Tables(shown).build()
    cards = [build_scorecard(shown, grids, is_demo=is_demo) for is_demo in (False, True)]
    return [card for card in cards if card is not None]


def show_cards(cards: Sequence[Scorecard]) -> None:
    """Scorecards on the terminal."""
    width = shutil.get_terminal_size(fallback=(120, 24)).columns
    sys.stdout.writelines(f"\n{card_to_text(card, width)}" for card in cards)


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
    if config.compare:
        show_cards(compare(check_rows(path), config.compare))
    if not (config.check or config.repair or config.compare):
        page, cards = write_report(config)
        show_cards(cards)
        sys.stdout.write(f"\nreport: {page}\nopen it: {open_line(page)}\n")
    return 0

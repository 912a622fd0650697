"""ReportConfig: flags of transfer/report.py. Imports no torch."""

import dataclasses
from pathlib import Path

from instdisc.cli import CommandConfig
from transfer.config import data_option, run_option


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportConfig(CommandConfig):
    """The report of a runs folder."""

    PROG = "transfer/report.py"
    DESCRIPTION = """
    Writes the report of a runs folder: report.html (one file, works from disk),
    report.md, a CSV for each table, and the figures. It begins with a scorecard,
    which the terminal shows too: a row for each network, a column for each task,
    and the difference to the same architecture untrained. Tables follow, with the
    published numbers and their source beside what was measured as mean ± std (n).
    Protocols never share a column; results on the embedded images have a scorecard
    and a section of their own.
    """
    EPILOG = """
    examples:
      python transfer/report.py                        runs/results.jsonl -> runs/report/
      python transfer/report.py --compare runs/pretrain/a runs/pretrain/b
      python transfer/report.py --check                is every row sound?
      python transfer/report.py --repair               move damaged rows out of the way
      python transfer/report.py --results a.jsonl --output report-a
    """

    results: Path | None = data_option(
        None, "rows to read; results.jsonl of the runs folder if not given", metavar="FILE"
    )
    output: Path | None = run_option(
        None, "folder of the report; report/ in the runs folder if not given", metavar="DIR"
    )
    figures: bool = run_option(True, "draw the figures")
    missing: tuple[str, ...] = run_option(
        (), "jobs that failed, to be named in the report", metavar="JOB"
    )
    compare: tuple[str, ...] = run_option(
        (),
        "only print the scorecard of these networks, as --weights or a row names them, beside "
        "their architectures untrained; write nothing",
        metavar="RUN",
    )
    check: bool = run_option(False, "only check that every row is sound; write nothing")
    repair: bool = run_option(
        False, "move damaged lines to results.jsonl.damaged, as one cut short by a crash"
    )

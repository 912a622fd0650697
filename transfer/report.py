"""python transfer/report.py: the paper's tables and figures beside what was measured."""

import sys
from collections.abc import Sequence

from instdisc.cli import run_command
from transfer.suites.settings import ReportConfig

DESCRIPTION = """\
Writes the report of a runs folder: report.html (one file, works from disk),
report.md, a CSV for each table, and the figures. It begins with a scorecard,
which the terminal shows too: a row for each network, a column for each task,
and the difference to the same architecture untrained. Tables follow, with the
published numbers and their source beside what was measured as mean ± std (n).
Protocols never share a column; results on the embedded images have a scorecard
and a section of their own."""

EPILOG = """\
examples:
  python transfer/report.py                        runs/results.jsonl -> runs/report/
  python transfer/report.py --check                is every row sound?
  python transfer/report.py --repair               move damaged rows out of the way
  python transfer/report.py --results a.jsonl --output report-a"""


def execute(config: ReportConfig) -> int:
    """Runs the command."""
    from transfer.reporting.report import run_report

    return run_report(config)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command(
        ReportConfig,
        execute,
        argv,
        prog="transfer/report.py",
        description=DESCRIPTION,
        epilog=EPILOG,
    )


if __name__ == "__main__":
    sys.exit(main())

"""python transfer/report.py: the paper's tables and figures beside what was measured."""

import sys

from instdisc.cli import command
from transfer.reporting.settings import ReportConfig

main = command(ReportConfig, "transfer.reporting.report:run_report")

if __name__ == "__main__":
    sys.exit(main())

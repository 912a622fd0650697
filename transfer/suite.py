"""python transfer/suite.py --weights X --tasks all: every transfer task, for several networks."""

import sys

from instdisc.cli import command
from transfer.suites.settings import SuiteConfig

main = command(SuiteConfig, "transfer.suites.suite:run_suite")

if __name__ == "__main__":
    sys.exit(main())

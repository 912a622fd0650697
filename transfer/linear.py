"""python transfer/linear.py: linear SVMs on the frozen conv1..conv5 (section 4.2)."""

import sys

from instdisc.cli import command
from transfer.probing.settings import LinearConfig

main = command(LinearConfig, "transfer.probing.linear:run_linear")

if __name__ == "__main__":
    sys.exit(main())

"""python transfer/retrieve.py: the nearest images of validation images, or of your own."""

import sys

from instdisc.cli import command
from transfer.nearest.settings import RetrieveConfig

main = command(RetrieveConfig, "transfer.nearest.retrieve:run_retrieve")

if __name__ == "__main__":
    sys.exit(main())

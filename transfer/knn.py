"""python transfer/knn.py: classifies validation images by their nearest training images."""

import sys

from instdisc.cli import command
from transfer.nearest.settings import KnnConfig

main = command(KnnConfig, "transfer.nearest.knn:run_knn")

if __name__ == "__main__":
    sys.exit(main())

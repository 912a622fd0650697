"""python transfer/fewshot.py: few-shot episodes, classified by the nearest class mean."""

import sys

from instdisc.cli import command
from transfer.nearest.settings import FewshotConfig

main = command(FewshotConfig, "transfer.nearest.fewshot:run_fewshot")

if __name__ == "__main__":
    sys.exit(main())

"""python transfer/semisup.py --labeled 0.01: fine-tunes with a part of the labels (section 4.3)."""

import sys

from instdisc.cli import command
from transfer.finetuning.settings import SemisupConfig

main = command(SemisupConfig, "transfer.finetuning.semisup:run_semisup")

if __name__ == "__main__":
    sys.exit(main())

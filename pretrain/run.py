"""python pretrain/run.py --arch resnet50: trains a backbone by instance discrimination."""

import sys

from instdisc.cli import command
from pretrain.config import PretrainConfig

main = command(PretrainConfig, "pretrain.trainer:pretrain")

if __name__ == "__main__":
    sys.exit(main())

"""python transfer/linear.py: linear SVMs on the frozen conv1..conv5 (section 4.2)."""

import sys
from collections.abc import Sequence

from instdisc.cli import run_command
from transfer.config import LinearConfig

DESCRIPTION = """\
Trains a linear SVM on each stage of a frozen network, pooled to about 10,000
dimensions, and reports top-1 and top-5 on the validation images. All stages
share one pass over the images. C is chosen on held-out training images. The
network is proved unchanged afterwards, batch-norm statistics included."""

EPILOG = """\
examples:
  python transfer/linear.py                                       newest run, its own data
  python transfer/linear.py --stage embedding                     SVM on the learned feature
  python transfer/linear.py --weights timm:resnet50.a1_in1k --data /data/imagenet
  python transfer/linear.py --data /data/places205 --cache off    no features on disk
  python transfer/linear.py --solver liblinear --stage conv5      scikit-learn's LinearSVC
Features are stored in runs/features and used again."""


def execute(config: LinearConfig) -> int:
    """Runs the task; torch is imported here so that --help is quick."""
    from transfer.probing.linear import run_linear

    run_linear(config)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command(
        LinearConfig,
        execute,
        argv,
        prog="transfer/linear.py",
        description=DESCRIPTION,
        epilog=EPILOG,
    )


if __name__ == "__main__":
    sys.exit(main())

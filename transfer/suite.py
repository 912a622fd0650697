"""python transfer/suite.py --weights X --tasks all: every transfer task, for several networks."""

import sys
from collections.abc import Sequence

from instdisc.cli import run_command
from transfer.suites.settings import SuiteConfig

DESCRIPTION = """\
Runs the readouts and transfer tasks for one or several networks, each task in
a process of its own, the cheap ones first, then writes the report. What is
finished is not run again; a task that fails does not stop the others, and is
named at the end (exit code 1). Stopped by a signal, the suite ends with 75:
the same command goes on."""

EPILOG = """\
examples:
  python transfer/suite.py                                         newest run, all tasks
  python transfer/suite.py --weights a.pt --data /data/imagenet --voc-root VOCdevkit
  python transfer/suite.py --weights a.pt b.pt timm:resnet50 random:resnet50 --tasks knn linear
  python transfer/suite.py --tasks semisup --labeled 0.01 0.1 --trials 3 --extra 'semisup --sweep'
Features are computed once per network and kept in runs/features, where kNN and
retrieval share them. runs/suite has a record of each finished part."""


def execute(config: SuiteConfig) -> int:
    """Runs the suite."""
    from transfer.suites.suite import run_suite

    return run_suite(config)


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command(
        SuiteConfig,
        execute,
        argv,
        prog="transfer/suite.py",
        description=DESCRIPTION,
        epilog=EPILOG,
    )


if __name__ == "__main__":
    sys.exit(main())

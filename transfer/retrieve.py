"""python transfer/retrieve.py: the nearest images of validation images, or of your own."""

import sys
from collections.abc import Sequence

from instdisc.cli import run_command
from transfer.config import RetrieveConfig

DESCRIPTION = """\
Image retrieval. Without --query: the nearest training images of all validation
images, and the paper's figure of the best and the worst cases (section 4.2) as
an HTML page and a PNG. With --query: the images nearest to given ones in any
folder of images, with their paths and cosine similarities."""

EPILOG = """\
examples:
  python transfer/retrieve.py                               newest run, on its own images
  python transfer/retrieve.py --data /data/imagenet --num-cases 8
  python transfer/retrieve.py --query cat.jpg dog.jpg --data ~/Pictures
The features of a folder are computed once and kept in runs/features, so that a
second query is immediate. Pages (retrieval.html; query.html for given files) are
one file each and need no network."""


def execute(config: RetrieveConfig) -> int:
    """Runs the command; torch is imported here so that --help is quick."""
    from transfer.nearest.retrieve import run_retrieve

    run_retrieve(config)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command(
        RetrieveConfig,
        execute,
        argv,
        prog="transfer/retrieve.py",
        description=DESCRIPTION,
        epilog=EPILOG,
    )


if __name__ == "__main__":
    sys.exit(main())

"""python transfer/knn.py: classifies validation images by their nearest training images."""

import sys
from collections.abc import Sequence

from instdisc.cli import run_command
from transfer.config import KnnConfig

DESCRIPTION = """\
Weighted k-nearest-neighbour classification, the paper's first question to a
representation (sections 3.4 and 4.2): each of the k nearest training images
votes for its class with weight exp(cosine similarity / tau). Defaults are the
paper's: the 128-d output recomputed for all training images, k 200, tau 0.07."""

EPILOG = """\
examples:
  python transfer/knn.py                                    newest run, on its own images
  python transfer/knn.py --k 10 20 100 200 --features embedding bank backbone
  python transfer/knn.py --weights runs/pretrain/resnet50 --data /data/places205
  python transfer/knn.py --weights timm:resnet50.a1_in1k --data /data/imagenet
  torchrun --nproc-per-node 8 transfer/knn.py --data /data/imagenet
Features are computed once and kept in runs/features; a stopped command goes on
where it was. Each number becomes a row of runs/results.jsonl, with the accuracy
of every class in it."""


def execute(config: KnnConfig) -> int:
    """Runs the command; torch is imported here so that --help is quick."""
    from transfer.nearest.knn import run_knn

    run_knn(config)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command(
        KnnConfig, execute, argv, prog="transfer/knn.py", description=DESCRIPTION, epilog=EPILOG
    )


if __name__ == "__main__":
    sys.exit(main())

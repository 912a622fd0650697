"""python pretrain/run.py --arch resnet50: trains a backbone by instance discrimination."""

import sys
from collections.abc import Sequence

from instdisc.cli import run_command
from pretrain.config import PretrainConfig

DESCRIPTION = """\
Trains a backbone so that every image is recognised as itself among all others
(Wu, Xiong, Yu, Lin: Unsupervised Feature Learning via Non-Parametric Instance
Discrimination, CVPR 2018). Defaults are the paper's for ImageNet; CIFAR and
Fashion-MNIST get the authors' CIFAR recipe; with no data named, the embedded
demo images and a recipe of minutes are used."""

EPILOG = """\
examples:
  python pretrain/run.py --arch resnet50                        demo images, minutes on a laptop
  python pretrain/run.py -a resnet50 --data /data/imagenet      the paper's run
  python pretrain/run.py -a resnet18 --data cifar-10-batches-bin --objective softmax
  torchrun --nproc-per-node 8 pretrain/run.py --data /data/imagenet --amp bf16
The same command again goes on where a stopped run was. A run folder holds
config.json, log.txt, metrics.jsonl, last.pt (to go on), backbone.pt (the result)."""


def execute(config: PretrainConfig) -> int:
    """Runs pretraining; torch is imported here so that --help is quick."""
    from pretrain.pipeline import pretrain

    pretrain(config)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command(
        PretrainConfig,
        execute,
        argv,
        prog="pretrain/run.py",
        description=DESCRIPTION,
        epilog=EPILOG,
    )


if __name__ == "__main__":
    sys.exit(main())

"""python transfer/semisup.py --labeled 0.01: fine-tunes with a part of the labels (section 4.3)."""

import sys
from collections.abc import Sequence

from instdisc.cli import run_command
from transfer.config import SemisupConfig

DESCRIPTION = """\
Fine-tunes a pretrained network with the labels of a part of its training
images and reports top-1 and top-5 on the validation images, single centre
crop. Defaults are the paper's: 70 epochs, lr 0.01 divided by ten every 30
epochs, everything trained; on the embedded images the labels are drawn class
by class."""

EPILOG = """\
examples:
  python transfer/semisup.py --labeled 0.01                      newest run, its own data
  python transfer/semisup.py --labeled 0.01 0.02 0.04 0.1 0.2 --init pretrained scratch --trials 5
  python transfer/semisup.py --list 1percent.txt --recipe swav-1 --weights runs/pretrain/resnet50
  torchrun --nproc-per-node 8 transfer/semisup.py --labeled 0.1 --data /data/imagenet --amp bf16
The same command again goes on where a stopped one was; trials that are measured
stay measured. Each trial's folder keeps labels.txt, metrics.jsonl, result.json;
the curve of all fractions so far is curve.png and curve.svg."""


def execute(config: SemisupConfig) -> int:
    """Runs the task; torch is imported here so that --help is quick."""
    from transfer.finetuning.semisup import run_semisup

    run_semisup(config)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command(
        SemisupConfig,
        execute,
        argv,
        prog="transfer/semisup.py",
        description=DESCRIPTION,
        epilog=EPILOG,
    )


if __name__ == "__main__":
    sys.exit(main())

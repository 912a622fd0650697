"""python transfer/detect.py --cfg detection_configs/faster_r50.yaml: VOC07 (section 4.4)."""

import sys
from collections.abc import Sequence

from instdisc.cli import run_command
from transfer.detection.settings import DetectConfig

DESCRIPTION = """\
Fine-tunes Fast or Faster R-CNN on Detectron2 from a pretrained backbone, and
reports the mAP of VOC07: converts the backbone, proves that every tensor of it
arrived, trains, evaluates, draws. With no data named the embedded images are
used, with a recipe of minutes."""

EPILOG = """\
examples:
  python transfer/detect.py --cfg detection_configs/faster_r50.yaml      newest ResNet-50 run
  python transfer/detect.py --cfg fast_alexnet --voc-root VOCdevkit --make-proposals
  python transfer/detect.py --cfg faster_r50 --init scratch --trials 3 SOLVER.IMS_PER_BATCH 1
  python transfer/detect.py --cfg fast_alexnet --init supervised:alexnet.pth --voc-root VOCdevkit
  torchrun --nproc-per-node 8 transfer/detect.py --cfg faster_r50_syncbn --voc-root VOCdevkit
Another SOLVER.IMS_PER_BATCH scales learning rate, steps and warm-up with it; keys that are given
beside it stay as they are given. The same command again goes on where a stopped one was."""


def execute(config: DetectConfig) -> int:
    """Runs the task; Detectron2 is imported here so that --help is quick."""
    from transfer.detection.logs import quiet_libraries

    quiet_libraries()  # before Detectron2 is imported, which warns already then
    from transfer.detection.launch import launch

    launch(config)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    return run_command(
        DetectConfig,
        execute,
        argv,
        prog="transfer/detect.py",
        description=DESCRIPTION,
        epilog=EPILOG,
    )


if __name__ == "__main__":
    sys.exit(main())

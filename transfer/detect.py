"""python transfer/detect.py --cfg detection_configs/faster_r50.yaml: VOC07 (section 4.4)."""

import sys

from instdisc.cli import command
from transfer.detection.settings import DetectConfig

main = command(DetectConfig, "transfer.detection.task:run_detect")

if __name__ == "__main__":
    sys.exit(main())

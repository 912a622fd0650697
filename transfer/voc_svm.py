"""python transfer/voc_svm.py: VOC07 classification by linear SVMs, full and low-shot."""

import sys

from instdisc.cli import command
from transfer.probing.settings import VocSvmConfig

main = command(VocSvmConfig, "transfer.probing.voc_svm:run_voc_svm")

if __name__ == "__main__":
    sys.exit(main())

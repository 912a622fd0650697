"""python pretrain/export.py --to timm detectron2: converts a backbone for other libraries."""

import sys

from instdisc.cli import command
from instdisc.export.settings import ExportConfig

main = command(ExportConfig, "instdisc.export.bundle:run_export")

if __name__ == "__main__":
    sys.exit(main())

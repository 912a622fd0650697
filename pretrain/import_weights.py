"""python pretrain/import_weights.py moco_v2.pth.tar: makes a backbone.pt of a peer's checkpoint."""

import sys

from instdisc.cli import command
from instdisc.importers.settings import ImportConfig

main = command(ImportConfig, "instdisc.importers.api:run_import")

if __name__ == "__main__":
    sys.exit(main())

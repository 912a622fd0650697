"""python transfer/proposals.py make --voc-root VOCdevkit: proposals for Fast R-CNN."""

import sys

from instdisc.cli import command
from transfer.detection.settings import ProposalsConfig

main = command(ProposalsConfig, "transfer.detection.proposals:run_proposals")

if __name__ == "__main__":
    sys.exit(main())

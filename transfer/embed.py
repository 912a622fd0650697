"""python transfer/embed.py: features of every image of a folder, as .npy and .csv."""

import sys

from instdisc.cli import command
from transfer.nearest.settings import EmbedConfig

main = command(EmbedConfig, "transfer.nearest.embed:run_embed")

if __name__ == "__main__":
    sys.exit(main())

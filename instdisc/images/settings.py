"""ArrangeConfig: flags of `python -m instdisc.images.arrange`. Imports no torch."""

import dataclasses
from pathlib import Path
from typing import Literal

from instdisc.cli import CommandConfig, option
from instdisc.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrangeConfig(CommandConfig):
    """Class folders of links for a data set that comes without them."""

    PROG = "instdisc.images.arrange"
    DESCRIPTION = """
    Makes <output>/<class>/<image>, the layout that every command takes, out of an unpacked data
    set and its official list. Images are linked to, not copied; those that are there stay.
    """
    EPILOG = """
    examples:
      mv imagenet/val imagenet/val-flat
      python -m instdisc.images.arrange --layout imagenet-val --images imagenet/val-flat \\
          --list ILSVRC2012_devkit_t12 --output imagenet/val
      python -m instdisc.images.arrange --layout places205 --images images256 \\
          --list trainvalsplit_places205/train_places205.csv --output places205/train
    """

    layout: Literal["imagenet-val", "places205"] | None = option(
        None, "what it is: ImageNet's validation images, or either list of Places205"
    )
    images: Path | None = option(
        None, "folder of the images, as the archive unpacks", metavar="FOLDER"
    )
    list: Path | None = option(
        None,
        "which image is of which class: ImageNet's development kit (folder), or Kaggle's "
        "LOC_val_solution.csv; Places205's train_places205.csv or val_places205.csv",
        metavar="PATH",
    )
    output: Path | None = option(None, "folder of class folders to make", metavar="FOLDER")

    def __post_init__(self) -> None:
        """Checks that nothing is missing."""
        for name in ("layout", "images", "list", "output"):
            if getattr(self, name) is None:
                raise UserError(f"--{name} is missing: see the examples of --help")

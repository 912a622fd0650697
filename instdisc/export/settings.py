"""ExportConfig: flags of pretrain/export.py. Imports no torch."""

import dataclasses
from pathlib import Path

from instdisc.cli import CommandConfig, option
from instdisc.errors import UserError
from instdisc.export import Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig(CommandConfig):
    """A backbone for other libraries."""

    PROG = "pretrain/export.py"
    DESCRIPTION = "Convert a backbone for timm, Detectron2 and torchvision, and prove it."
    EPILOG = """
    examples:
      python pretrain/export.py                                    the newest run, all libraries
      python pretrain/export.py --weights runs/pretrain/resnet50 --to timm
      python pretrain/export.py --inspect backbone.pt              what a checkpoint is
    """

    weights: Path | None = option(
        None, "a backbone.pt or a run folder that holds one; none is the newest run", metavar="PATH"
    )
    to: tuple[Target, ...] = option(
        ("timm", "detectron2", "torchvision"), "libraries to convert for"
    )
    output: Path | None = option(
        None, "folder to make; none is `export` beside the weights", metavar="FOLDER"
    )
    overwrite: bool = option(False, "replace an export folder that exists")
    inspect: Path | None = option(
        None, "print what a checkpoint is, and convert nothing", metavar="FILE"
    )

    def __post_init__(self) -> None:
        """Checks what the types cannot say."""
        if not self.to:
            raise UserError("--to names no library: give timm, detectron2 or torchvision")

"""ImportConfig: flags of pretrain/import_weights.py. Imports no torch."""

import dataclasses
from pathlib import Path
from typing import Literal

from instdisc.cli import CommandConfig, option
from instdisc.errors import UserError
from instdisc.importers.dialect_table import FORMATS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportConfig(CommandConfig):
    """A peer's checkpoint as backbone.pt."""

    PROG = "import_weights"
    DESCRIPTION = "Import a peer's checkpoint. FILE may be given without --file."
    EPILOG = """
    examples:
      python pretrain/import_weights.py moco_v2_800ep_pretrain.pth.tar
      python pretrain/import_weights.py resnet50.pth --name barlow-twins
      python pretrain/import_weights.py --inspect unknown.ckpt      what it holds; imports nothing
      python pretrain/import_weights.py distilled.ckpt --prefix student.
      python pretrain/import_weights.py resnet50-1x.pth --format simclr-converter
    Then, for instance: python transfer/knn.py --weights runs/pretrain/barlow-twins
    """

    files: tuple[Path, ...] = option((), "the checkpoint", metavar="FILE", positional=True)
    file: Path | None = option(None, "the same as a flag", metavar="FILE")
    format: str = option(
        "auto", f"what wrote it: {', '.join(FORMATS)}; auto tells it by content", metavar="NAME"
    )
    prefix: str | None = option(
        None, "which of several trunks: the prefix of its names, or the end of it", metavar="PREFIX"
    )
    inspect: bool = option(False, "tell what the file holds, and import nothing")
    output: Path | None = option(
        None, "file to write; none is runs/pretrain/<name>/backbone.pt", metavar="FILE"
    )
    name: str | None = option(
        None, "name of the run folder; none is the checkpoint's name", metavar="NAME"
    )
    overwrite: bool = option(False, "replace a backbone.pt that exists")
    image_size: int | None = option(
        None, "side of its images; none is what the file or format says"
    )
    mean: tuple[float, ...] = option((), "mean of its pixels in [0, 1], red green blue")
    std: tuple[float, ...] = option((), "standard deviation of its pixels, red green blue")
    crop_ratio: float | None = option(
        None, "side of the evaluation crop / side of the resized image"
    )
    stem: Literal["auto", "small"] = option(
        "auto", "small: a 3x3 stem has stride 1, padding 1 and no max pooling, as ours"
    )
    assume_rgb: bool = option(
        False, "a Detectron2 file was trained with RGB, ImageNet statistics, STRIDE_IN_1X1 False"
    )
    ignore_unknown: bool = option(False, "leave out tensors that the format does not have")
    allow_missing_fc: bool = option(
        False, "make AlexNet's and VGG16's fc6 and fc7 random where the file has none"
    )

    def __post_init__(self) -> None:
        """Checks what the types cannot say."""
        named = [*self.files, *([] if self.file is None else [self.file])]
        if not named:
            raise UserError("no checkpoint named: python pretrain/import_weights.py FILE")
        if len(named) > 1:
            raise UserError(f"unrecognized arguments: {named[1]}: one checkpoint at a time")
        if self.name is not None and (self.output is not None or Path(self.name).name != self.name):
            raise UserError("--name is a folder's name, without a path and without --output")

    @property
    def checkpoint(self) -> Path:
        """The file, however it was named."""
        return self.file or self.files[0]

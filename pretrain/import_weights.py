"""Makes a backbone.pt of a peer's checkpoint: `python pretrain/import_weights.py moco_v2.pth.tar`.

The format is found by content, and every tensor is accounted for. Nothing in the file is run.
"""

import dataclasses
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from instdisc.cli import build_parser, option, run_command
from instdisc.errors import UserError
from instdisc.runs.folders import runs_root

Format = Literal[
    "auto",
    "torchvision",
    "timm",
    "lemniscate",
    "moco",
    "moco-v3",
    "simclr",
    "simsiam",
    "simclr-converter",
    "pycontrast",
    "supcontrast",
    "cmc",
    "swav",
    "dino",
    "vicreg",
    "barlow-twins",
    "vissl",
    "mmselfsup",
    "solo-learn",
    "lightly",
    "detectron2",
    "caffe2",
]
EPILOG = """\
examples:
  python pretrain/import_weights.py moco_v2_800ep_pretrain.pth.tar
  python pretrain/import_weights.py resnet50.pth --name barlow-twins
  python pretrain/import_weights.py resnet50-1x.pth --format simclr-converter
Then, for instance: python transfer/knn.py --weights runs/pretrain/barlow-twins
"""
DESCRIPTION = "Import a peer's checkpoint. FILE may be given without --file."
SUFFIXES = re.compile(r"(\.(pth|pt|pkl|ckpt|tar|torch|bin|safetensors|t7|pyth))+$")
# What a training run keeps in its folder; an import would mix with it.
RUN_FILES = ("last.pt", "metrics.jsonl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """Flags of the command."""

    file: Path | None = option(None, "the checkpoint", metavar="FILE")
    format: Format = option("auto", "what wrote it; auto tells it by content")
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
        if self.file is None:
            raise UserError("no checkpoint named: python pretrain/import_weights.py FILE")
        if self.name is not None and (self.output is not None or Path(self.name).name != self.name):
            raise UserError("--name is a folder's name, without a path and without --output")


def say(line: str) -> None:
    """One line to the terminal."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def find_output(config: ImportConfig) -> Path:
    """Where backbone.pt goes, or why it cannot go there."""
    assert config.file is not None
    name = config.name or SUFFIXES.sub("", config.file.name) or "imported"
    output = config.output or runs_root() / "pretrain" / name / "backbone.pt"
    if output.is_dir():
        output = output / "backbone.pt"
    if any(folder.exists() and not folder.is_dir() for folder in output.parents):
        raise UserError(f"{output.parent} is no folder: choose another --output")
    if any((output.parent / run_file).exists() for run_file in RUN_FILES):
        raise UserError(f"{output.parent} is a training run: choose another folder with --name")
    if output.exists() and not config.overwrite:
        raise UserError(f"{output} exists: choose another --name, or replace it with --overwrite")
    return output


def summary(names: Sequence[str]) -> str:
    """Names of left-out tensors by their first part: `encoder_k (320), queue`."""
    groups: dict[str, int] = {}
    for name in names:
        start = name.partition(".")[0]
        groups[start] = groups.get(start, 0) + 1
    return ", ".join(name if n == 1 else f"{name} ({n})" for name, n in groups.items()) or "none"


def run_import(config: ImportConfig) -> None:
    """Imports one checkpoint."""
    output = find_output(config)
    # Late imports: `--help` does without torch.
    from instdisc.importers.api import import_checkpoint
    from instdisc.importers.inputs import Overrides
    from instdisc.runs.checkpoint import save_checkpoint

    assert config.file is not None
    report = import_checkpoint(
        config.file,
        format=config.format,
        ignore_unknown=config.ignore_unknown,
        allow_missing_fc=config.allow_missing_fc,
        overrides=Overrides(
            image_size=config.image_size,
            mean=config.mean or None,
            std=config.std or None,
            crop_ratio=config.crop_ratio,
            stem="small" if config.stem == "small" else None,
            assume_rgb=config.assume_rgb,
        ),
    )
    payload = report.payload
    save_checkpoint(output, "backbone", payload)
    head = payload["projection"]
    say(f"format: {report.format}{'' if config.format != 'auto' else ' (found by content)'}")
    say(f"arch: {report.arch}, stem {payload['stem']}, batch norm {payload['batch_norm']}")
    say(f"used: {report.num_used} tensors; dropped: {summary(report.dropped)}")
    say(f"projection: {len(head['bias'])} dimensions" if head else "projection: none")
    for note in report.notes:
        say(note)
    say(f"backbone: {output}")


def name_the_file(argv: Sequence[str]) -> list[str]:
    """Turns the one argument that belongs to no flag into `--file`."""
    parser = build_parser(ImportConfig, prog="import_weights", description=DESCRIPTION)
    _, rest = parser.parse_known_args(argv)
    if len(rest) != 1 or rest[0].startswith("-"):
        return list(argv)  # the command's own parser has the message
    place = list(argv).index(rest[0])
    return [*argv[:place], *argv[place + 1 :], "--file", rest[0]]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    given = list(sys.argv[1:] if argv is None else argv)
    if not {"-h", "--help"} & set(given):
        given = name_the_file(given)
    return run_command(
        ImportConfig,
        run_import,
        given,
        prog="import_weights",
        description=DESCRIPTION,
        epilog=EPILOG,
    )


if __name__ == "__main__":
    sys.exit(main())

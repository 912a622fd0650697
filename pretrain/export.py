"""Converts a backbone for other libraries: `python pretrain/export.py --to timm detectron2`.

Each conversion is opened by its library and run before the export folder appears.
"""

import dataclasses
import sys
from pathlib import Path

from instdisc.cli import option, run_command
from instdisc.errors import UserError
from instdisc.export import Target
from instdisc.runs.folders import newest_backbone

EPILOG = """\
examples:
  python pretrain/export.py                                    the newest run, all libraries
  python pretrain/export.py --weights runs/pretrain/resnet50 --to timm
  python pretrain/export.py --inspect backbone.pt              what a checkpoint is
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Flags of the command."""

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


def say(line: str) -> None:
    """One line to the terminal."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run_export(config: ExportConfig) -> None:
    """Converts, or inspects."""
    # Late imports: `--help` does without torch.
    if config.inspect is not None:
        from instdisc.export.describe import describe_checkpoint

        say(describe_checkpoint(config.inspect))
        return
    from instdisc.export.bundle import export_backbone

    weights = config.weights if config.weights is not None else newest_backbone()
    if weights.is_dir():
        weights = weights / "backbone.pt"
    output = config.output if config.output is not None else weights.parent / "export"
    targets = tuple(dict.fromkeys(config.to))
    say(f"weights: {weights}")
    export_backbone(weights, output, targets=targets, overwrite=config.overwrite, say=say)
    say(f"export: {output}")


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    return run_command(
        ExportConfig,
        run_export,
        argv,
        prog="pretrain/export.py",
        description="Convert a backbone for timm, Detectron2 and torchvision, and prove it.",
        epilog=EPILOG,
    )


if __name__ == "__main__":
    sys.exit(main())

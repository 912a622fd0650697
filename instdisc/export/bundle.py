"""The export folder: all targets, verified, with a report; it appears whole or not at all."""

import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from instdisc.cli import say
from instdisc.errors import UserError
from instdisc.export import Target
from instdisc.export.contract import Source, load_source
from instdisc.export.describe import describe_checkpoint
from instdisc.export.settings import ExportConfig
from instdisc.export.verify import CONVERTERS, TOLERANCE, Verification, verify_target
from instdisc.runs.folders import newest_backbone, provenance, write_json
from instdisc.runs.log import progress

FORMAT = "instdisc/export/1"
REPORT = "report.json"


def hash_file(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def _check_output(output: Path, overwrite: bool) -> None:
    """Refuses to write over what is there, and to delete what is no export."""
    if not output.parent.is_dir():
        raise UserError(
            f"{output.parent} is not a folder: make it first, or choose another --output"
        )
    if not os.path.lexists(output):
        return
    if not overwrite:
        raise UserError(f"{output} exists: give --overwrite to replace it, or another --output")
    ours = (output / REPORT).is_file() and FORMAT in (output / REPORT).read_text("utf-8", "replace")
    if output.is_symlink() or not (output.is_dir() and (ours or not any(output.iterdir()))):
        raise UserError(f"{output} is not an export folder, so it is not replaced: move it away")


def _sibling(output: Path, suffix: str) -> Path:
    """A name beside the output that no other process has, on this machine or another."""
    return output.with_name(f".{output.name}.{uuid.uuid4().hex}.{suffix}")


def _publish(folder: Path, output: Path, overwrite: bool) -> None:
    """Gives a finished folder its name; a former one is deleted once the new one is in place."""
    if not (overwrite and output.exists()):
        try:
            folder.rename(output)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise UserError(f"{output} appeared meanwhile: give another --output") from None
        return
    former = _sibling(output, "old")
    output.rename(former)
    try:
        folder.rename(output)
    except BaseException:
        former.rename(output)
        raise
    shutil.rmtree(former)


def _report(source: Source, weights: Path, entries: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "source": {
            "path": str(weights),
            "arch": source.arch,
            "stem": source.backbone.stem,
            "batch_norm": source.backbone.batch_norm,
            "input": source.spec.to_dict(),
            "weights_sha256": source.weights_sha256,
        },
        "tolerance": TOLERANCE,
        "targets": entries,
        "provenance": provenance(),
    }


def _entry(check: Verification, folder: Path, files: set[Path]) -> dict[str, Any]:
    return {
        "files": {path.relative_to(folder).as_posix(): hash_file(path) for path in sorted(files)},
        "library": check.library,
        "num_tensors": check.num_tensors,
        "largest_difference": check.largest_difference,
        "differences": check.differences,
    }


def export_backbone(
    weights: Path,
    output: Path,
    *,
    targets: Sequence[Target] = tuple(CONVERTERS),
    overwrite: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Converts a backbone.pt, verifies each conversion by running it, then shows the folder.

    Args:
        weights: the backbone.pt.
        output: the folder to make.
        targets: libraries to convert for.
        overwrite: replace an export folder that is there.
        say: gets one line per verified target.

    Returns:
        What report.json holds.
    """
    _check_output(output, overwrite)
    source = load_source(weights)
    for target in targets:  # refusals come before any writing
        CONVERTERS[target].convert(source)
    folder = _sibling(output, "tmp")
    folder.mkdir()
    try:
        entries: dict[str, Any] = {}
        for target in progress(targets, title="exporting", unit="libraries"):
            before = _files(folder)
            CONVERTERS[target].save(folder, source)
            check = verify_target(folder, target, source)
            say(str(check))
            entries[target] = _entry(check, folder, _files(folder) - before)
        report = _report(source, weights, entries)
        write_json(folder / REPORT, report)
        _publish(folder, output, overwrite)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return report


def run_export(config: ExportConfig) -> None:
    """The command: converts, or inspects."""
    if config.inspect is not None:
        say(describe_checkpoint(config.inspect))
        return
    weights = config.weights if config.weights is not None else newest_backbone()
    if weights.is_dir():
        weights = weights / "backbone.pt"
    output = config.output if config.output is not None else weights.parent / "export"
    targets = tuple(dict.fromkeys(config.to))
    say(f"weights: {weights}")
    export_backbone(weights, output, targets=targets, overwrite=config.overwrite, say=say)
    say(f"export: {output}")

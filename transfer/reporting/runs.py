"""What the run folders hold for the report's figures. Imports no torch."""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from instdisc.errors import UserError
from instdisc.runs.folders import read_jsonl
from instdisc.runs.results import Result
from transfer.suites.settings import FIELDS_WITHOUT_EFFECT

SKIPPED = {"features", "demo-data", "report", "tensorboard", "export", "pictures", "inference"}


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """The record of a training; `is_demo` unless it saw other data than the embedded images."""

    name: str
    config: dict[str, Any]
    metrics: Sequence[dict[str, Any]]
    is_demo: bool

    def points(self, name: str) -> list[tuple[float, float]]:
        """(epoch, value) of all rows that have this number."""
        return [(row["epoch"], row[name]) for row in self.metrics if name in row and "epoch" in row]


@dataclasses.dataclass(frozen=True)
class FolderFile:
    """A file that a task left for a figure."""

    path: Path
    name: str
    is_demo: bool


def _folders(root: Path) -> Iterator[tuple[Path, list[str]]]:
    for folder, children, files in os.walk(root):
        children[:] = sorted(set(children) - SKIPPED)
        yield Path(folder), files


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is none that can be read."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def find_pretraining(root: Path) -> list[TrainingRun]:
    """All pretrainings below a folder, by name."""
    runs = []
    for folder, files in _folders(root):
        if "metrics.jsonl" not in files or "config.json" not in files:
            continue
        config = _read_object(folder / "config.json")
        if "objective" in config:
            try:
                metrics = read_jsonl(folder / "metrics.jsonl")
            except UserError:
                continue  # another task's business to complain of; its figure is left out
            name = folder.relative_to(root).as_posix().removeprefix("pretrain/")
            demo = config.get("data") in (None, "demo")
            runs.append(TrainingRun(name, config, metrics, demo))
    return sorted(runs, key=lambda run: run.name)


def find_finetuning(root: Path, rows: Sequence[Result]) -> list[TrainingRun]:
    """All trials of semi-supervised learning below a folder, by name."""
    runs = []
    for file in find_files(root, "metrics.jsonl", rows):
        if file.name.startswith("semisup/"):
            try:
                metrics = read_jsonl(file.path)
            except UserError:
                continue
            name = file.name.removeprefix("semisup/")
            runs.append(TrainingRun(name, {}, metrics, file.is_demo))
    return runs


def find_files(root: Path, name: str, rows: Sequence[Result]) -> list[FolderFile]:
    """All files of a name below a folder; one that is not known to be of real data is a demo's.

    The rows of a task name its folder; else its config.json says which data was named.
    """
    known = {row.details.get("folder"): row.is_demo for row in rows if "folder" in row.details}
    found = []
    for folder, files in _folders(root):
        if name not in files:
            continue
        relative = folder.relative_to(root)
        places = [place.as_posix() for place in (relative, relative.parent)]
        demo = next((known[place] for place in places if place in known), None)
        if demo is None:
            config = _read_object(folder / "config.json") or _read_object(
                folder.parent / "config.json"
            )
            named = config.get("data") or config.get("voc_root")
            demo = named in (None, "demo")
        found.append(FolderFile(folder / name, relative.as_posix(), demo))
    return found


def proximal_groups(runs: Sequence[TrainingRun]) -> list[list[TrainingRun]]:
    """Runs that differ in the weight of the proximal term only, with and without it."""
    groups: dict[str, list[TrainingRun]] = {}
    # A longer run with the term still shows it beside a shorter one without.
    ignored = {*FIELDS_WITHOUT_EFFECT, "epochs", "proximal_weight"} - {"data"}
    for run in runs:
        kept = {k: v for k, v in run.config.items() if k not in ignored}
        key = json.dumps([kept, run.is_demo], sort_keys=True)
        groups.setdefault(key, []).append(run)
    return [
        sorted(group, key=lambda r: r.config.get("proximal_weight", 0.0))
        for group in groups.values()
        if len({run.config.get("proximal_weight") for run in group}) > 1
        and all(len(run.points("epoch_loss")) > 1 for run in group)
    ]

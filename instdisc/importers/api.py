"""Peers' checkpoints -> backbone.pt, with the format found by content and nothing guessed.

Every tensor of the file is either used, or one that its dialect is known to have besides the
backbone, or unknown, which is an error; what is used must fill one of our networks exactly. Files
are read without running anything in them (foreign_files.py).
"""

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from instdisc.cli import say
from instdisc.errors import UserError
from instdisc.importers.dialect_table import FORMATS
from instdisc.importers.foreign_files import MALFORMED, ForeignFile, read_foreign
from instdisc.importers.inputs import Overrides, check_detectron2, find_input
from instdisc.importers.plan import Plan, choose, find_format, make_plan, shown
from instdisc.importers.settings import ImportConfig
from instdisc.importers.stored_tensors import StoredTensor
from instdisc.runs.checkpoint import save_checkpoint
from instdisc.runs.folders import runs_root
from instdisc.training.seed import seeded

__all__ = ["FORMATS", "ImportReport", "describe", "find_format", "import_checkpoint", "run_import"]

MISSING_FC_SEED = 0
SUFFIXES = re.compile(r"(\.(pth|pt|pkl|ckpt|tar|torch|bin|safetensors|t7|pyth))+$")
# What a training run keeps in its folder; an import would mix with it.
RUN_FILES = ("last.pt", "metrics.jsonl")


@dataclasses.dataclass(frozen=True)
class ImportReport:
    """What was imported.

    Attributes:
        payload: for `save_checkpoint(path, "backbone", payload)`.
        format: the dialect.
        arch: which of our networks it is.
        num_used: how many tensors of the file were used.
        dropped: names of those that the dialect is known to have besides the backbone.
        unknown: names of those left out because `ignore_unknown` was given.
        notes: what a user should know, a line each.
    """

    payload: dict[str, Any]
    format: str
    arch: str
    num_used: int
    dropped: tuple[str, ...]
    unknown: tuple[str, ...]
    notes: tuple[str, ...]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(file: ForeignFile, plan: Plan, *, ignore_unknown: bool, allow_missing_fc: bool) -> None:
    """Refuses a plan that leaves tensors over or places empty."""
    what = f"{file.path} ({plan.match.dialect.name}, {plan.network.arch})"
    if plan.unknown and not ignore_unknown:
        raise UserError(
            f"{what} has {len(plan.unknown)} tensors that this format does not have, "
            f"{shown(plan.unknown)}: --ignore-unknown leaves them out"
        )
    layers = {name.rpartition(".")[0] for name in plan.missing}
    linear = all(layer.startswith("classifier.") for layer in layers)
    linear = linear and len(plan.missing) == 2 * len(layers)  # weight and bias of each
    if plan.missing and not (linear and allow_missing_fc):
        cure = "--allow-missing-fc makes these layers random" if linear else "use another file"
        raise UserError(f"{what} lacks {len(plan.missing)} tensors, {shown(plan.missing)}: {cure}")


def _random_linear(names: Iterable[str], model: nn.Module) -> dict[str, Tensor]:
    """Linear layers as torch makes them, the same at every import."""
    made = {}
    with seeded(MISSING_FC_SEED, "missing fc"):
        for layer in sorted({name.rpartition(".")[0] for name in names}):
            wanted = model.get_submodule(layer)
            assert isinstance(wanted, nn.Linear), f"{layer} is no linear layer"
            linear = nn.Linear(wanted.in_features, wanted.out_features)
            made.update({f"{layer}.{k}": v.detach() for k, v in linear.state_dict().items()})
    return made


def _load(file: ForeignFile, plan: Plan) -> tuple[dict[str, Tensor], dict[str, Tensor] | None]:
    """Trunk and projection in float32, out of the file."""
    state: dict[str, StoredTensor] = dict(plan.match.state)

    def load(origin: str) -> Tensor:
        try:
            tensor = state[origin].load()
        except MALFORMED as error:
            raise UserError(f"{file.path}: {origin} cannot be read ({error})") from None
        # The sum first: it shows every NaN and infinity, and is five times as fast.
        if not tensor.float().sum().isfinite() and not tensor.isfinite().all():
            raise UserError(f"{file.path}: {origin} holds NaN or infinity: use another file")
        return tensor

    trunk = _random_linear(plan.missing, plan.model)
    for name, wanted in plan.model.state_dict().items():
        if name in plan.used:
            trunk[name] = load(plan.used[name]).reshape(wanted.shape).to(wanted.dtype)
        elif name not in trunk:
            trunk[name] = torch.zeros((), dtype=torch.long)  # num_batches_tracked
    plan.model.load_state_dict(trunk, strict=True, assign=True)
    head = {kind: load(origin).float() for kind, origin in plan.projection.items()}
    return {name: trunk[name] for name in plan.model.state_dict()}, head or None


def _notes(file: ForeignFile, plan: Plan) -> list[str]:
    state, notes = plan.match.state, []
    if file.unbuilt:
        notes.append(f"objects in the file that were not built or run: {shown(file.unbuilt)}")
    kinds = {state[origin].dtype for origin in plan.used.values()} - {torch.float32, torch.int64}
    if kinds:
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        notes.append(f"weights were converted from {names} to float32")
    counters = [n for n in plan.model.state_dict() if n.endswith("num_batches_tracked")]
    if any(name not in plan.used for name in counters):
        notes.append("batch norm's counters are absent, as in old files: set to 0")
    if plan.match.root in (("state_dict_ema",), ("student",)):
        notes.append(f"taken from {plan.match.root[0]}")
    if plan.missing:
        layers = sorted({name.rpartition(".")[0] for name in plan.missing})
        notes.append(
            f"WARNING: {', '.join(layers)} are not in the file and random (seed {MISSING_FC_SEED})"
            ": only conv1..conv5 carry features"
        )
    if plan.unknown:
        notes.append(f"left out although unknown: {shown(plan.unknown)}")
    return notes


def import_checkpoint(
    path: Path,
    *,
    format: str = "auto",
    ignore_unknown: bool = False,
    allow_missing_fc: bool = False,
    overrides: Overrides | None = None,
) -> ImportReport:
    """Reads a peer's checkpoint.

    Args:
        path: a torch file, a safetensors file or a Detectron2 pickle.
        format: one of `FORMATS`, or `auto` to tell it by content.
        ignore_unknown: leave out tensors that the format does not have.
        allow_missing_fc: make AlexNet's and VGG16's linear layers random where the file has none.
        overrides: what the user knows of the network's input.

    Raises:
        UserError: the file is damaged, its format unknown or not certain, or it is no network of
            ours; the message says which.
    """
    file = read_foreign(path)
    plan = make_plan(file, choose(file, format))
    dialect, network = plan.match.dialect, plan.network
    overrides = overrides or Overrides()
    if dialect.name == "detectron2":
        check_detectron2(file, network, overrides.assume_rgb)
    _check(file, plan, ignore_unknown=ignore_unknown, allow_missing_fc=allow_missing_fc)
    spec, origin = find_input(file, dialect, network, overrides)
    trunk, projection = _load(file, plan)
    notes = _notes(file, plan)
    notes.append(f"input: {spec.size} pixels, mean {spec.mean}, std {spec.std} ({origin})")
    pretraining: dict[str, Any] = {
        "imported_from": path.name,
        "format": dialect.name,
        "sha256": _sha256(path),
    }
    if plan.missing:
        pretraining["missing"] = list(plan.missing)
    payload = {
        "arch": network.arch,
        "stem": network.stem,
        "batch_norm": network.batch_norm,
        "trunk": trunk,
        "projection": projection,
        "input": spec.to_dict(),
        "pretraining": pretraining,
    }
    num_used = len(plan.used) + len(plan.projection)
    return ImportReport(
        payload, dialect.name, network.arch, num_used, plan.dropped, plan.unknown, tuple(notes)
    )


def describe(path: Path) -> str:
    """What a foreign file is, in a few lines; refused or unknown formats are described too."""
    file = read_foreign(path)
    lines = [f"container: {file.container}"]
    if file.unbuilt:
        lines.append(f"objects not built or run: {shown(file.unbuilt)}")
    try:
        plan = make_plan(file, choose(file, "auto"))
    except UserError as error:
        return "\n".join([*lines, f"not importable: {error}"])
    dialect, network = plan.match.dialect, plan.network
    lines += [
        f"format: {dialect.name} ({dialect.source})",
        f"arch: {network.arch}",
        f"stem: {network.stem}",
        f"batch norm: {'yes' if network.batch_norm else 'no'}",
        f"tensors: {len(plan.used) + len(plan.projection)} used, {len(plan.dropped)} dropped, "
        f"{len(plan.unknown)} unknown, {len(plan.missing)} missing",
    ]
    for what in ("dropped", "unknown", "missing"):
        if names := getattr(plan, what):
            lines.append(f"{what}: {shown(names)}")
    lines.append(f"import it: python pretrain/import_weights.py {path}")
    return "\n".join(lines)


def find_output(config: ImportConfig) -> Path:
    """Where backbone.pt goes, or why it cannot go there."""
    name = config.name or SUFFIXES.sub("", config.checkpoint.name) or "imported"
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
    """The command: imports one checkpoint."""
    output = find_output(config)
    report = import_checkpoint(
        config.checkpoint,
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

"""Peers' checkpoints -> backbone.pt, with the trunk found by names and shapes and nothing guessed.

Every tensor of the file is either used, or known to be of no trunk (a head, a queue, an optimizer),
or unknown, which is an error; what is used must fill one of our networks exactly. Files are read
without running anything in them (`untrusted`). Torch is imported where tensors are loaded, so
that a file can be inspected without it.
"""

import collections
import dataclasses
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instdisc.cli import say
from instdisc.errors import UserError
from instdisc.importers.dialect_table import BY_NAME, TORCHVISION
from instdisc.importers.plan import (
    Listing,
    Plan,
    choose,
    find_format,
    find_trunks,
    list_tensors,
    make_plan,
    shown,
)
from instdisc.importers.settings import ImportConfig
from instdisc.runs.folders import runs_root
from instdisc.runs.log import progress
from instdisc.untrusted.containers import MALFORMED, ForeignFile, read_foreign
from instdisc.untrusted.pickles import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

    from instdisc.importers.inputs import Overrides

MISSING_FC_SEED = 0
SUFFIXES = re.compile(r"(\.(pth|pt|pkl|ckpt|tar|torch|bin|safetensors|t7|pyth))+$")
# What a training run keeps in its folder; an import would mix with it.
RUN_FILES = ("last.pt", "metrics.jsonl")
MOST_LINES = 40  # of one kind in a description


@dataclasses.dataclass(frozen=True)
class ImportReport:
    """What was imported.

    Attributes:
        payload: for `save_checkpoint(path, "backbone", payload)`.
        format: the dialect.
        prefix: what stands before the names of the trunk in the file.
        num_used: how many tensors of the file were used.
        dropped: names of those that are known to be of no trunk, or of another one.
        unknown: names of those left out because `ignore_unknown` was given.
        notes: what a user should know, a line each.
    """

    payload: dict[str, Any]
    format: str
    prefix: str
    num_used: int
    dropped: tuple[str, ...]
    unknown: tuple[str, ...]
    notes: tuple[str, ...]


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


def _random_linear(names: Iterable[str], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Linear layers as torch makes them, the same at every import."""
    from torch import nn

    from instdisc.training.seed import seeded

    made = {}
    with seeded(MISSING_FC_SEED, "missing fc"):
        for layer in sorted({name.rpartition(".")[0] for name in names}):
            rows, columns = shapes[f"{layer}.weight"]
            linear = nn.Linear(columns, rows)
            made.update({f"{layer}.{k}": v.detach() for k, v in linear.state_dict().items()})
    return made


def _load(file: ForeignFile, plan: Plan) -> tuple[dict[str, "Tensor"], dict[str, "Tensor"] | None]:
    """Trunk and projection in float32, out of the file."""
    import torch

    def load(path: str) -> "Tensor":
        try:
            tensor = plan.match.listing.tensors[path].load()
        except MALFORMED as error:
            raise UserError(f"{file.path}: {path} cannot be read ({error})") from None
        # The sum first: it shows every NaN and infinity, and is five times as fast.
        if not tensor.float().sum().isfinite() and not tensor.isfinite().all():
            raise UserError(f"{file.path}: {path} holds NaN or infinity: use another file")
        return tensor

    shapes = plan.network.shapes()
    trunk = _random_linear(plan.missing, shapes)
    for name, shape in progress(shapes.items(), title="importing", unit="tensors"):
        counter = name.endswith("num_batches_tracked")
        if name in plan.used:
            kind = torch.long if counter else torch.float32
            trunk[name] = load(plan.used[name]).reshape(shape).to(kind)
        elif counter:
            trunk[name] = torch.zeros((), dtype=torch.long)
    head = {kind: load(path).float() for kind, path in plan.projection.items()}
    return {name: trunk[name] for name in shapes}, head or None


def _notes(file: ForeignFile, plan: Plan) -> list[str]:
    tensors, notes = plan.match.listing.tensors, []
    if plan.match.others:
        others = (trunk.prefix or "no prefix" for trunk in plan.match.others)
        notes.append(f"other trunks in the file, left out: {shown(others)}")
    if file.unbuilt:
        notes.append(f"objects in the file that were not built or run: {shown(file.unbuilt)}")
    kinds = {tensors[path].dtype for path in plan.used.values()} - {"float32", "int64"}
    if kinds:
        notes.append(f"weights were converted from {', '.join(sorted(kinds))} to float32")
    empty = plan.network.shapes().keys() - plan.used.keys()
    if any(name.endswith("num_batches_tracked") for name in empty):
        notes.append("batch norm's counters are absent, as in old files: set to 0")
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
    prefix: str | None = None,
    ignore_unknown: bool = False,
    allow_missing_fc: bool = False,
    overrides: "Overrides | None" = None,
) -> ImportReport:
    """Reads a peer's checkpoint.

    Args:
        path: a torch file, a safetensors file or a Detectron2 pickle.
        format: one of `FORMATS`, or `auto` to tell it by content.
        prefix: what stands before the names of the trunk, where the file has several; the end of
            it will do.
        ignore_unknown: leave out tensors that the format does not have.
        allow_missing_fc: make AlexNet's and VGG16's linear layers random where the file has none.
        overrides: what the user knows of the network's input.

    Raises:
        UserError: the file is damaged, its format unknown or not certain, or it is no network of
            ours; the message says which.
    """
    from instdisc.importers.inputs import Overrides, check_detectron2, find_input

    file = read_foreign(path)
    plan = make_plan(file, choose(file, format, prefix))
    dialect, network, found = plan.match.dialect, plan.network, plan.match.trunk.prefix
    overrides = overrides or Overrides()
    if dialect.name == "detectron2":
        check_detectron2(file, network, overrides.assume_rgb)
    _check(file, plan, ignore_unknown=ignore_unknown, allow_missing_fc=allow_missing_fc)
    spec, origin = find_input(file, dialect, network, overrides)
    trunk, projection = _load(file, plan)
    notes = _notes(file, plan)
    notes.append(f"input: {spec.size} pixels, mean {spec.mean}, std {spec.std} ({origin})")
    pretraining: dict[str, Any] = {"imported_from": path.name, "format": dialect.name}
    with path.open("rb") as stream:
        pretraining["sha256"] = hashlib.file_digest(stream, "sha256").hexdigest()
    if found:
        pretraining["prefix"] = found
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
    return ImportReport(
        payload=payload,
        format=dialect.name,
        prefix=found,
        num_used=len(plan.used) + len(plan.projection),
        dropped=plan.dropped,
        unknown=plan.unknown,
        notes=tuple(notes),
    )


def _groups(listing: Listing) -> list[str]:
    """A line for each trunk, and for each part of a name or entry beside them."""
    formats = find_format(listing)
    trunks = find_trunks(listing, BY_NAME[formats[0]] if len(formats) == 1 else TORCHVISION)
    groups: dict[str, list[StoredTensor]] = {trunk.prefix: [] for trunk in trunks}
    owner: dict[str, str] = {}
    kinds: dict[str, str] = {}
    for trunk in trunks:
        network = trunk.network(listing)
        own = network.shapes() if network else {}
        kinds[trunk.prefix] = f", trunk {network.arch if network else 'of no network of ours'}"
        owner |= {path: trunk.prefix for name, path in trunk.names if name in own}
    starts = {path: trunk.prefix for trunk in trunks for _, path in trunk.names}
    for path, tensor in listing.tensors.items():
        folder = next((t.folder for t in trunks if path.startswith(t.folder)), "")
        folder = starts.get(path, folder)
        part = path.removeprefix(folder).partition(".")[0]
        groups.setdefault(owner.get(path, folder + part), []).append(tensor)
    lines = []
    for name, tensors in groups.items():
        count = f"shape {tensors[0].shape}" if len(tensors) == 1 else f"{len(tensors)} tensors"
        count += f", {sum(tensor.numel for tensor in tensors):,} numbers"
        types = "".join(f", {dtype}" for dtype in sorted({tensor.dtype for tensor in tensors}))
        lines.append(f"  {shown([name or 'no prefix'])}: {count}{types}{kinds.get(name, '')}")
    more = len(lines) - MOST_LINES
    return lines[:MOST_LINES] + ([f"  and {more} more"] if more > 0 else [])


def describe(path: Path, format: str = "auto", prefix: str | None = None) -> str:
    """What a foreign file is, in a few lines; refused or unknown formats are described too."""
    file = read_foreign(path)
    lines = [f"container: {file.container}"]
    content = file.content if isinstance(file.content, dict) else {}
    plain = [(str(k), str(v)) for k, v in content.items() if isinstance(v, str | int | float)]
    lines += [f"{shown([name])}: {shown([value])}" for name, value in plain[:MOST_LINES]]
    if file.unbuilt:
        lines.append(f"objects not built or run: {shown(file.unbuilt)}")
    try:
        lines += ["tensors:", *_groups(list_tensors(file))]
        plan = make_plan(file, choose(file, format, prefix))
        dialect, network = plan.match.dialect, plan.network
        lines += [
            f"format: {dialect.name} ({dialect.source})",
            f"prefix: {plan.match.trunk.prefix or 'none'}",
            f"arch: {network.arch}, stem {network.stem}, batch norm {network.batch_norm}",
            f"used: {len(plan.used) + len(plan.projection)} tensors",
        ]
        for what in ("dropped", "unknown", "missing"):
            if names := getattr(plan, what):
                lines.append(f"{what}: {summary(names)}")
        _check(file, plan, ignore_unknown=False, allow_missing_fc=False)
        lines.append(f"import it: python pretrain/import_weights.py {path}")
    except UserError as error:
        lines.append(f"not importable as it is: {error}")
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
    groups = collections.Counter(name.partition(".")[0] for name in names)
    return shown([name if n == 1 else f"{name} ({n})" for name, n in groups.items()], 12) or "none"


def run_import(config: ImportConfig) -> None:
    """The command: imports one checkpoint, or tells what it holds."""
    if config.inspect:
        say(describe(config.checkpoint, config.format, config.prefix))
        return
    from instdisc.importers.inputs import Overrides
    from instdisc.runs.checkpoint import save_checkpoint

    output = find_output(config)
    report = import_checkpoint(
        config.checkpoint,
        format=config.format,
        prefix=config.prefix,
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
    say(f"prefix: {report.prefix or 'none'}")
    say(f"arch: {payload['arch']}, stem {payload['stem']}, batch norm {payload['batch_norm']}")
    say(f"used: {report.num_used} tensors; dropped: {summary(report.dropped)}")
    say(f"projection: {len(head['bias'])} dimensions" if head else "projection: none")
    for note in report.notes:
        say(note)
    say(f"backbone: {output}")

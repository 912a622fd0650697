"""Which dialect a checkpoint is in, and which of its tensors goes where; loads no tensor."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from instdisc.errors import UserError
from instdisc.importers.dialect_table import BY_NAME, DIALECTS, FORMATS
from instdisc.importers.dialects import Dialect
from instdisc.importers.foreign_files import ForeignFile
from instdisc.importers.inputs import timm_config
from instdisc.importers.recognition import FC_NAMES, Network, recognise
from instdisc.importers.stored_tensors import Inert, is_tensor, module_state
from instdisc.networks.backbones import ARCHS, build_backbone

# Where a backbone begins, under torchvision's names.
FIRST_TENSORS = ("conv1.weight", "features.0.weight")
# Entries of training checkpoints that belong to no network.
BOOKKEEPING = re.compile(
    r"optim|sched|scaler|amp|args|opt$|config|cfg|hyper|epoch|iter|step|best|acc|loss|meta|loops|"
    r"callbacks|rng|seed|hook|meter|metric|message_hub"
)
MOST_VALUES = 20_000  # of a file's structure, which a hostile one may nest without end


def shown(names: Iterable[str], count: int = 4) -> str:
    """The first few names, fit for one line."""
    first = list(names)
    parts = [name[:80] if name.isprintable() else repr(name)[:80] for name in first[:count]]
    return ", ".join(parts) + (f" and {len(first) - count} more" if len(first) > count else "")


@dataclasses.dataclass(frozen=True)
class Match:
    """A file read as one dialect: its state dict without `module.`, and the backbone's prefix."""

    dialect: Dialect
    root: tuple[str, ...]
    state: Mapping[str, Any]
    prefix: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which tensor goes where.

    Attributes:
        match: the file.
        network: what the tensors are.
        model: its trunk, on the meta device.
        used: name in the trunk -> name in the file.
        projection: `weight` and `bias` -> name in the file, or empty.
        dropped: names of tensors and entries that the dialect has besides the backbone.
        unknown: names that it does not.
        missing: names in the trunk that the file does not fill; batch counters do not count.
    """

    match: Match
    network: Network
    model: nn.Module
    used: dict[str, str]
    projection: dict[str, str]
    dropped: tuple[str, ...]
    unknown: tuple[str, ...]
    missing: tuple[str, ...]


def _state_at(content: Any, root: tuple[str, ...]) -> dict[str, Any]:
    """The state dict at a place in the file, `module.` taken away; empty if there is none."""
    for key in root:
        content = content.get(key) if isinstance(content, dict) else None
    if isinstance(content, Inert):
        content = module_state(content)
    if not isinstance(content, dict):
        return {}
    state = {key: value for key, value in content.items() if isinstance(key, str)}
    if not root:  # beside the tensors, the file itself may keep anything
        state = {key: value for key, value in state.items() if is_tensor(value)}
    for wrapper in ("_orig_mod.", "module.", "_orig_mod."):
        if state and all(key.startswith(wrapper) for key in state):
            state = {key.removeprefix(wrapper): value for key, value in state.items()}
    return state


def _match(dialect: Dialect, content: Any) -> Match | None:
    """Reads a file as a dialect, if a backbone can be found in it that way."""
    for root in dialect.roots:
        state = _state_at(content, root)
        if not any(is_tensor(value) for value in state.values()):
            continue
        for prefix in dialect.prefixes:
            inner = (key.removeprefix(prefix) for key in state if key.startswith(prefix))
            if dialect.refusal or any(dialect.rename(key) in FIRST_TENSORS for key in inner):
                return Match(dialect, root, state, prefix)
    return None


def find_format(file: ForeignFile) -> list[str]:
    """Names of the dialects that the content of a file identifies."""
    top = set(file.content) if isinstance(file.content, dict) else set()
    if timm_config(file.path) is not None:
        top.add("timm")
    found = []
    for dialect in DIALECTS:
        match = _match(dialect, file.content)
        if match and any(evidence.holds(top, match.state) for evidence in dialect.evidence):
            found.append(dialect.name)
    return found


def choose(file: ForeignFile, format: str) -> Match:
    """The dialect that was asked for, or the one that the content identifies."""
    content = file.content
    ours = content.get("format") if isinstance(content, dict) else None
    if isinstance(ours, str) and ours.startswith("instdisc/"):
        raise UserError(f"{file.path} is a checkpoint of this project: use it as it is")
    if format != "auto":
        if format not in BY_NAME:
            raise UserError(f"--format {format}: choose auto or one of {', '.join(FORMATS)}")
        found = [format]
    else:
        found = find_format(file)
    if len(found) > 1:
        raise UserError(f"{file.path} fits {' and '.join(found)}: say which with --format NAME")
    match = _match(BY_NAME[found[0]], content) if found else None
    if match is not None:
        if match.dialect.refusal:
            name, why = match.dialect.name, match.dialect.refusal
            raise UserError(f"{file.path} ({name}) cannot be imported: {why}; use another one")
        return match
    names = [key for key in content if isinstance(key, str)] if isinstance(content, dict) else []
    has = f"it has {shown(names)}" if names else "it is no dict of tensors"
    if found:
        raise UserError(f"{file.path} is not in the {format} format ({has}): try --format auto")
    fits = [d.name for d in DIALECTS if not d.refusal and _match(d, content)]
    if fits:
        raise UserError(
            f"{file.path}: nothing in it tells the format, its names fit {', '.join(fits)}: "
            "say which with --format NAME"
        )
    raise UserError(
        f"{file.path} is in no known format ({has}): save its backbone's state_dict "
        "under torchvision's names, then import that"
    )


def _holds_tensors(value: Any) -> bool:
    waiting, seen = [value], set[int]()
    while waiting and len(seen) < MOST_VALUES:
        current = waiting.pop()
        if is_tensor(current):
            return True
        if id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, dict):
            waiting.extend(current.values())
        elif isinstance(current, list | tuple):
            waiting.extend(current)
        elif isinstance(current, Inert):
            waiting.extend((current.arguments, current.state, current.items))
    return bool(waiting)


def _entries_beside(content: Any, match: Match) -> tuple[list[str], list[str]]:
    """Entries with tensors next to the state dict: known ones, unknown ones."""
    known: list[str] = []
    unknown: list[str] = []
    for key in match.root or (None,):
        for name, value in content.items() if isinstance(content, dict) else ():
            if name == key or is_tensor(value) or not _holds_tensors(value):
                continue
            named = isinstance(name, str)
            ours = named and (name in match.dialect.siblings or BOOKKEEPING.search(name))
            (known if ours else unknown).append(name if named else repr(type(name)))
        content = content.get(key) if isinstance(content, dict) else None
    return known, unknown


def _projection(match: Match, width: int) -> dict[str, str]:
    """The linear head that is our projection, if the dialect has one and the file too."""
    for start, deeper in match.dialect.projection:
        names = {"weight": f"{start}weight", "bias": f"{start}bias"}
        found = [match.state.get(name) for name in names.values()]
        if deeper in match.state or not all(is_tensor(value) for value in found):
            continue
        weight, bias = (value.shape for value in found if value is not None)
        if len(weight) == 2 and weight[1] == width and bias == weight[:1]:
            return names
    return {}


def make_plan(file: ForeignFile, match: Match) -> Plan:
    """Maps every tensor of the file; refuses what is no network of ours."""
    dialect, state = match.dialect, match.state
    used: dict[str, str] = {}
    dropped, unknown = _entries_beside(file.content, match)
    for name, value in state.items():
        inner = dialect.rename(name.removeprefix(match.prefix))
        if not is_tensor(value):
            unknown.append(name)
        elif name.startswith(dialect.drop):
            dropped.append(name)
        elif not name.startswith(match.prefix):
            unknown.append(name)
        elif inner.startswith(dialect.heads):
            dropped.append(name)
        elif inner in used:
            raise UserError(f"{file.path}: {shown([used[inner], name])} are both {inner}")
        else:
            used[inner] = name
    network = recognise({name: state[origin].shape for name, origin in used.items()})
    numbered = FC_NAMES.get(network.arch)
    for name in [name for name in used if name.startswith(("fc6.", "fc7."))]:
        origin = used.pop(name)
        if numbered is None:  # a detector's own head
            dropped.append(origin)
        else:
            used[numbered[name[:3]] + name[3:]] = origin
    with torch.device("meta"):
        model = build_backbone(network.arch, stem=network.stem, batch_norm=network.batch_norm).trunk
    expected = model.state_dict()
    unknown += [used.pop(name) for name in list(used) if name not in expected]
    for name, origin in used.items():
        stored, wanted = state[origin], tuple(expected[name].shape)
        unrolled = dialect.name == "timm" and name.startswith("classifier.") and stored.shape[2:]
        if stored.shape != wanted and not (unrolled and stored.numel == expected[name].numel()):
            raise UserError(f"{file.path}: {origin} is {stored.shape}, {network.arch} has {wanted}")
    projection = _projection(match, ARCHS[network.arch].feature_dim)
    return Plan(
        match=match,
        network=network,
        model=model,
        used=used,
        projection=projection,
        dropped=tuple(name for name in dropped if name not in projection.values()),
        unknown=tuple(unknown),
        missing=tuple(
            name
            for name in expected
            if name not in used and not name.endswith("num_batches_tracked")
        ),
    )

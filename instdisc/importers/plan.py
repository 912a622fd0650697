"""Which trunk of a checkpoint to take, and which of its tensors goes where; loads no tensor.

A trunk is found by names and shapes under whatever prefix it lies; the prefix is the whole path in
the file, `state_dict.module.encoder_q.`. Imports no torch.
"""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from instdisc.errors import UserError, some_of
from instdisc.importers.dialect_table import BY_NAME, SIMCLR_CONVERTER, TORCHVISION, Dialect
from instdisc.importers.recognition import FC_NAMES, FEATURE_DIMS, Network, recognise
from instdisc.untrusted.containers import ForeignFile
from instdisc.untrusted.pickles import Inert, StoredTensor, is_tensor

TRUNK_PARTS = ("layer", "conv", "bn1.", "features.")
# Every trunk has one of these, three or four parts long.
ANCHORS = ("layer1.0.conv1.weight", "features.0.weight")
# Entries of training checkpoints that belong to no network.
BOOKKEEPING = re.compile(
    r"optim|sched|scaler|amp|args|opt$|config|cfg|hyper|epoch|iter|step|best|acc|loss|meta|loops|"
    r"callbacks|rng|seed|hook|meter|metric|message_hub|task$"
)
# Parts of names that are of no trunk: heads, queues and banks, copies, detectors.
HEADS = re.compile(
    r"(^|[._])(fc\d*|bn|linear|classifier|heads?|head_jig|mlp|neck|proj\w*|pred\w*|prototypes\w*|"
    r"queue\w*|memory\w*|contrast|lemniscate|criterion|knn|encoder_k|momentum\w*|ema|ema_state_dict|"
    r"online_net|target_net|data_preprocessor|proposal_generator|roi_heads|fpn_\w+|top_block|"
    r"pixel_\w+|anchor\w*)(\.|$)"
)
WRAPPERS = re.compile(r"(?:(?:_orig_mod|module)\.)*")
DEEPEST = 64  # no state dict lies deeper, and a hostile file may nest without end
MOST_TRUNKS = 100
LARGEST_SIDECAR = 1 << 20


def shown(names: Iterable[str], count: int = 4) -> str:
    """The first few names, fit for one line."""
    parts = [name[:80] if name.isprintable() else repr(name)[:80] for name in names]
    return some_of(parts, count)


def read_small(path: Path) -> str:
    """The text of a file beside the checkpoint; empty if there is none."""
    if not path.is_file() or path.stat().st_size > LARGEST_SIDECAR:
        return ""
    return path.read_text("utf-8", errors="replace")


def timm_config(path: Path) -> dict[str, Any] | None:
    """The config.json that timm keeps beside its weights, if there is one."""
    try:
        config = json.loads(read_small(path.parent / "config.json") or "null")
    except (json.JSONDecodeError, RecursionError):
        return None
    named = isinstance(config, dict) and isinstance(config.get("architecture"), str)
    return config if named else None


@dataclasses.dataclass(frozen=True)
class Listing:
    """All tensors of a file.

    Attributes:
        tensors: by path.
        folders: path -> path of the dict that holds the tensor.
        text: the entries of the file in a line, then a line for each path; see `Dialect.has`.
    """

    tensors: Mapping[str, StoredTensor]
    folders: Mapping[str, str]
    text: str


def _entries(content: Any) -> list[str]:
    return [key for key in content if isinstance(key, str)] if isinstance(content, dict) else []


def list_tensors(file: ForeignFile) -> Listing:
    """Finds every tensor, in dicts, lists and objects that were not built, each of these once."""
    tensors: dict[str, StoredTensor] = {}
    folders: dict[str, str] = {}
    seen = set[int]()

    def visit(value: Any, path: str, depth: int) -> None:
        seen.add(id(value))
        if isinstance(value, Inert):
            value = {"_modules": value.state, "args": value.arguments, "items": value.items}
        entries = enumerate(value) if isinstance(value, list | tuple) else ()
        for key, child in value.items() if isinstance(value, dict) else entries:
            inside = key in ("_parameters", "_buffers", "_modules")  # no part of a name
            name = path if inside else f"{path}{key if isinstance(key, str) else repr(key)}."
            if is_tensor(child):
                if name[:-1] in tensors:
                    raise UserError(f"{file.path} has {shown([name])} twice: save a state_dict")
                tensors[name[:-1]], folders[name[:-1]] = child, path
            elif depth < DEEPEST and id(child) not in seen:
                visit(child, name, depth + 1)

    visit(file.content, "", 0)
    top = _entries(file.content) + ([] if timm_config(file.path) is None else ["timm"])
    return Listing(tensors, folders, "\n".join([f" {' '.join(sorted(top))} ", *tensors]))


@dataclasses.dataclass(frozen=True)
class Trunk:
    """A network in a file.

    Attributes:
        prefix: what stands before its names.
        folder: the part of the prefix that names beside the network have too.
        names: (torchvision's name, path) of every tensor behind the prefix.
    """

    prefix: str
    folder: str
    names: tuple[tuple[str, str], ...]

    def recognise(self, listing: Listing) -> Network:
        """Which network it is, or an error that says what it looks like."""
        return recognise({name: listing.tensors[path].shape for name, path in self.names})

    def network(self, listing: Listing) -> Network | None:
        """Which network it is, None for one that is not ours."""
        with contextlib.suppress(UserError):
            return self.recognise(listing)
        return None


def find_trunks(listing: Listing, dialect: Dialect = TORCHVISION) -> list[Trunk]:
    """Every network that begins like one of ours, in the order of the file."""
    anchors: dict[str, str] = {}
    for path in listing.tensors:
        parts = path.split(".")
        for count in (3, 4):
            if len(parts) >= count and dialect.rename(".".join(parts[-count:])) in ANCHORS:
                before = "".join(f"{part}." for part in parts[:-count])
                anchors.setdefault(re.sub(dialect.inside, "", before), path)
    if len(anchors) > MOST_TRUNKS:
        raise UserError(f"the file has {len(anchors)} networks: save the state_dict of one alone")
    trunks = []
    for prefix, anchor in anchors.items():
        longer = tuple(p for p in anchors if len(p) > len(prefix) and p.startswith(prefix))
        names = tuple(
            (dialect.rename(path.removeprefix(prefix)), path)
            for path in listing.tensors
            if path.startswith(prefix) and not (longer and path.startswith(longer))
        )
        folder = listing.folders[anchor]
        folder = folder if prefix.startswith(folder) else prefix  # a module holds each tensor apart
        folder += WRAPPERS.findall(prefix, len(folder))[0]
        trunks.append(Trunk(prefix, folder, names))
    return trunks


@dataclasses.dataclass(frozen=True)
class Match:
    """A file read as one dialect: the trunk to take, and the others."""

    dialect: Dialect
    listing: Listing
    trunk: Trunk
    others: tuple[Trunk, ...] = ()


def _taken(dialect: Dialect, trunks: list[Trunk]) -> list[Trunk]:
    """The trunks that a dialect would take; more than one is for the user to choose from."""
    for pattern in dialect.take:
        if found := [trunk for trunk in trunks if re.search(pattern, trunk.prefix)]:
            return found
    return []


def find_format(listing: Listing) -> list[str]:
    """Names of the dialects that the content of a file identifies."""
    found = []
    for dialect in BY_NAME.values():
        shows = all(re.search(pattern, listing.text, re.MULTILINE) for pattern in dialect.has)
        if dialect is TORCHVISION or not shows or re.search(dialect.lacks, listing.text):
            continue
        if dialect.refusal or _taken(dialect, find_trunks(listing, dialect)):
            found.append(dialect.name)
    if found in ([], [SIMCLR_CONVERTER.name]) and find_trunks(listing):
        found.insert(0, TORCHVISION.name)
    return found


def choose(file: ForeignFile, format: str = "auto", prefix: str | None = None) -> Match:
    """The dialect that was asked for, or the one that the content identifies, and its trunk.

    Raises:
        UserError: there is no trunk, or more than one of either and none was chosen.
    """
    content = file.content
    ours = content.get("format") if isinstance(content, dict) else None
    if isinstance(ours, str) and ours.startswith("instdisc/"):
        raise UserError(f"{file.path} is a checkpoint of this project: use it as it is")
    if format not in ("auto", *BY_NAME):
        raise UserError(f"--format {format}: choose auto or one of {', '.join(BY_NAME)}")
    listing = list_tensors(file)
    found = find_format(listing) if format == "auto" else [format]
    if len(found) > 1:
        raise UserError(f"{file.path} fits {' and '.join(found)}: say which with --format NAME")
    names = _entries(content)
    has = f"it has {shown(names)}" if names else "it is no dict of tensors"
    if not found:
        raise UserError(
            f"{file.path} is in no known format ({has}): save its backbone's state_dict "
            "under torchvision's names, then import that"
        )
    dialect = BY_NAME[found[0]]
    if dialect.refusal:
        why = dialect.refusal
        raise UserError(f"{file.path} ({dialect.name}) cannot be imported: {why}; use another one")
    trunks = find_trunks(listing, dialect)
    taken = _taken(dialect, trunks)
    if not taken:
        raise UserError(f"{file.path} is not in the {format} format ({has}): try --format auto")
    if prefix is not None:
        wanted = f"{prefix.strip('.')}." if prefix.strip(".") else ""
        ends = [trunk for trunk in trunks if f".{trunk.prefix}".endswith(f".{wanted}")]
        bare = [trunk for trunk in trunks if trunk.prefix == trunk.folder]
        taken = [t for t in trunks if t.prefix == wanted] or (ends if wanted else bare)
    if len(taken) != 1:
        of = "trunks" if prefix is None or taken else f"no trunk under {prefix!r} but"
        networks = [(trunk.prefix, trunk.network(listing)) for trunk in taken or trunks]
        named = ", ".join(
            f"{start or 'no prefix'} ({network.arch if network else 'no network of ours'})"
            for start, network in networks
        )
        raise UserError(f"{file.path} has {of} {named}: choose one with --prefix PREFIX")
    others = tuple(trunk for trunk in trunks if trunk is not taken[0])
    return Match(dialect, listing, taken[0], others)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which tensor goes where.

    Attributes:
        match: the file.
        network: what the tensors are.
        used: name in the trunk -> path in the file.
        projection: `weight` and `bias` -> path in the file, or empty.
        dropped: tensors and entries that are known to be of no trunk, or of another one.
        unknown: those that are not.
        missing: names in the trunk that the file does not fill; batch counters do not count.
    """

    match: Match
    network: Network
    used: dict[str, str]
    projection: dict[str, str]
    dropped: tuple[str, ...]
    unknown: tuple[str, ...]
    missing: tuple[str, ...]


def _projection(match: Match, width: int, used: Iterable[str]) -> dict[str, str]:
    """The linear head that is our projection, if the dialect has one and the file too."""
    tensors, trunk, others = match.listing.tensors, match.trunk, set(used)
    for start in match.dialect.projection:
        for place in (trunk.prefix, trunk.folder):
            paths = {"weight": f"{place}{start}weight", "bias": f"{place}{start}bias"}
            found = [tensors[path].shape for path in paths.values() if path in tensors]
            head = f"{place}{start.partition('.')[0]}."
            deeper = any(p.startswith(head) for p in tensors.keys() - others - {*paths.values()})
            if len(found) != 2 or deeper or len(found[0]) != 2:
                continue
            if found[0][1] == width and found[1] == found[0][:1]:
                return paths
    return {}


def make_plan(file: ForeignFile, match: Match) -> Plan:
    """Maps every tensor of the file; refuses what is no network of ours."""
    listing, trunk = match.listing, match.trunk
    network = trunk.recognise(listing)
    expected, numbered = network.shapes(), FC_NAMES.get(network.arch, {})
    used: dict[str, str] = {}
    behind: dict[str, str] = {}
    for name, path in trunk.names:
        if name[:3] in numbered and name[3:4] == ".":
            name = numbered[name[:3]] + name[3:]
        behind[path] = name
        if name in used:
            raise UserError(f"{file.path}: {shown([used[name], path])} are both {name}")
        if name in expected:
            used[name] = path
    for name, path in used.items():
        shape, wanted = listing.tensors[path].shape, expected[name]
        if name.startswith("classifier.") and len(shape) == 4:  # timm's linear layers
            shape = (shape[0], shape[1] * shape[2] * shape[3])
        if shape != wanted:
            raise UserError(f"{file.path}: {path} is {shape}, {network.arch} has {wanted}")
    projection = _projection(match, FEATURE_DIMS[network.arch], used.values())
    taken = {*used.values(), *projection.values()}
    copies = {  # a network without a prefix has no end: only its convolutions are known
        path
        for other in match.others
        for name, path in other.names
        if other.prefix or name.startswith(TRUNK_PARTS)
    }
    left: dict[str, bool] = {}  # name to show -> whether it is known
    for path in listing.tensors:
        if path in taken:
            continue
        if path.startswith(trunk.folder):
            local = path.removeprefix(trunk.folder)
            inner = behind.get(path, local)
            known = not (path in behind and inner.startswith(TRUNK_PARTS))
            known = known and bool(HEADS.search(inner))
        else:  # an entry beside the state dict, named by where the two paths part
            own = trunk.folder.split(".")
            parts = path.split(".")[: len(own)]
            pairs = zip(parts, own, strict=False)
            local = next((part for part, mine in pairs if part != mine), path)
            known = bool(BOOKKEEPING.search(local) or HEADS.search(local))
        left[local] = left.get(local, True) and (known or path in copies)
    empty = (name for name in expected if name not in used)
    return Plan(
        match=match,
        network=network,
        used=used,
        projection=projection,
        dropped=tuple(name for name, known in left.items() if known),
        unknown=tuple(name for name, known in left.items() if not known),
        missing=tuple(name for name in empty if not name.endswith("num_batches_tracked")),
    )

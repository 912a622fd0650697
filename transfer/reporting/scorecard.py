"""The scorecard: what was measured, a row for each network, a column for each protocol.

Imports no torch. A column is the headline number of a task: top-1 of kNN, precision of retrieval,
top-1 of a linear probe, top-1 and top-5 of each fraction of labels, AP50 of detection, every number
of a task that is not known here. Of the variants of a protocol (how many neighbours, which stage,
which AP) the one that most networks have stands for all, and among equals the paper's. A network is
compared with its architecture untrained.
"""

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from instdisc.runs.results import Measured
from transfer.reporting.grids import Grid
from transfer.reporting.networks import STARTS, Network
from transfer.reporting.paper_numbers import Kind
from transfer.reporting.parts import column_order
from transfer.reporting.rows import Entry

# In the order of their rows, with the word that a reader filters by.
KINDS: dict[Kind, str] = {
    "ours": "pretrained",
    "random": "untrained",
    "data-init": "data-init",
    "other": "other",
    "labels": "supervised",
}
KIND_ORDER = tuple(KINDS)
START_ORDER = tuple(STARTS)  # what stands for the network before training, the closest first
SHADES = 5
# Commands whose headline numbers are known; of any other every number is one.
TASKS = ("knn", "retrieve", "linear", "semisup", "detect", "voc_svm", "fewshot")


@dataclasses.dataclass(frozen=True)
class Column:
    """One protocol on one data set.

    Attributes:
        head: its heading.
        data: the data set, without size and fingerprint.
        protocol: how it was measured, in full.
        anchor: slug of the table that has the details of most of its numbers.
    """

    head: str
    data: str
    protocol: str
    anchor: str


@dataclasses.dataclass(frozen=True)
class Cell:
    """A measurement beside the other rows.

    Attributes:
        measured: the number.
        untrained: that of the same architecture untrained; None where there is none.
        is_best: whether no other row has a higher one; False in a column of one number.
        shade: 1 to SHADES, from the lowest to the highest of its column; 0 where all are equal.
        anchor: slug of the table that has the details; empty where it is the column's.
    """

    measured: Measured
    untrained: Measured | None
    is_best: bool
    shade: int
    anchor: str = ""

    @property
    def gain(self) -> float | None:
        """Points above the untrained network."""
        return None if self.untrained is None else self.measured.mean - self.untrained.mean

    @property
    def number(self) -> str:
        """The mean, rounded."""
        return f"{self.measured.mean:.1f}"

    @property
    def spread(self) -> str:
        """Deviation and count, where it was repeated."""
        std = self.measured.std
        return "" if std is None else f"± {std:.1f} (n={self.measured.count})"

    def __str__(self) -> str:
        return f"{self.number} {self.spread}".strip()


@dataclasses.dataclass(frozen=True)
class CardRow:
    """A network: a short label, all its settings, its kind in a word, a cell for each column."""

    label: str
    settings: str
    kind: str
    cells: tuple[Cell | None, ...]


@dataclasses.dataclass(frozen=True)
class Scorecard:
    """The measurements of real data, or those of the embedded images."""

    columns: tuple[Column, ...]
    rows: tuple[CardRow, ...]
    is_demo: bool

    @property
    def slug(self) -> str:
        """Name of its file and anchor."""
        return "scorecard" + "-demo" * self.is_demo

    @property
    def data_spans(self) -> list[tuple[str, int]]:
        """Data sets, and how many columns each has side by side."""
        groups = itertools.groupby(column.data for column in self.columns)
        return [(data, len(list(columns))) for data, columns in groups]

    def group_of(self, column: int) -> int:
        """Which of the data sets, counted from 1, a column belongs to."""
        last = 0
        for number, (_, count) in enumerate(self.data_spans, start=1):
            last += count
            if column < last:
                return number
        raise IndexError(column)

    @property
    def kinds(self) -> list[str]:
        """Kinds of its networks."""
        return list(dict.fromkeys(row.kind for row in self.rows))

    @property
    def title(self) -> str:
        """Its heading."""
        return "Scorecard: embedded demo images" if self.is_demo else "Scorecard"


@dataclasses.dataclass(frozen=True)
class _Headline:
    """Where an entry would stand: columns of one group are variants, of which one is chosen."""

    order: int
    group: str
    head: str
    is_usual: bool = True


def _headline(entry: Entry) -> _Headline | None:
    """What an entry is on the scorecard; None for a number that is no headline."""
    features = entry.family.rpartition(" ")[2]
    of = "" if features == "embedding" else f", {features}"
    match entry.task, entry.metric:
        case "knn", "top-1":
            usual = entry.family.startswith("k=200 tau=0.07 ")
            return _Headline(0, features, f"kNN top-1{of}", usual)
        case "retrieve", metric if metric.startswith("precision at "):
            head = metric.replace("precision at ", "retrieval P@")
            return _Headline(1, features, head + of, metric == "precision at 10")
        case "linear", "top-1":
            usual = entry.place == "conv5"
            return _Headline(2, entry.family, f"linear {entry.place} top-1", usual)
        case "semisup", "top-1" | "top-5":
            head = f"{entry.place} labels {entry.metric}"
            return _Headline(3, f"{entry.family} {head}", head)
        case "detect", "AP50, 11-point" | "AP50, area":
            usual = entry.metric == "AP50, 11-point"
            return _Headline(4, entry.family, "detection AP50" + ", area" * (not usual), usual)
        case "detect", "box AP" | "mask AP":
            return _Headline(4, f"{entry.family} {entry.metric}", entry.metric)
        case "voc_svm", _:
            stage, _, shots = entry.place.partition(" ")
            kind = "low-shot" if shots else "full"
            usual = stage == "conv5" and shots in ("", "k=96")
            return _Headline(
                5, f"{entry.family} {kind}", f"SVM {entry.place} {entry.metric}", usual
            )
        case "fewshot", _:
            return _Headline(6, entry.family, entry.column, entry.place == "5-shot")
        case task, metric if task not in TASKS:
            head = " ".join(filter(None, (task.replace("_", " "), entry.place, metric)))
            return _Headline(7, f"{task} {entry.family} {head}", head)
    return None


def _short_data(entry: Entry) -> str:
    return entry.data.partition(" (")[0]


def _choose_columns(entries: Iterable[Entry]) -> list[tuple[_Headline, list[Entry]]]:
    """The columns in order, each with its measurements."""
    groups: dict[tuple[int, str, str], dict[tuple[str, str], list[Entry]]] = {}
    heads: dict[int, _Headline] = {}
    for entry in entries:
        headline = _headline(entry)
        if headline is not None:
            heads[id(entry)] = headline
            variants = groups.setdefault((headline.order, headline.group, entry.data), {})
            variants.setdefault((headline.head, entry.family), []).append(entry)

    def worth(found: list[Entry]) -> tuple[int, bool, float]:
        best = max(entry.measured.mean for entry in found)
        return len(found), heads[id(found[0])].is_usual, best

    chosen = [max(variants.values(), key=worth) for variants in groups.values()]
    # The top-5 of five classes or fewer is always right.
    chosen = [
        found
        for found in chosen
        if found[0].metric != "top-5" or any(entry.measured.mean < 100 for entry in found)
    ]
    first: dict[str, int] = {}
    for found in chosen:
        data, order = _short_data(found[0]), heads[id(found[0])].order
        first[data] = min(order, first.get(data, order))
    sizes = Counter(_short_data(entry) for found in chosen for entry in found)

    def place(found: list[Entry]) -> tuple[object, ...]:
        data, headline = _short_data(found[0]), heads[id(found[0])]
        return first[data], -sizes[data], data, headline.order, column_order(headline.head)

    return [(heads[id(found[0])], found) for found in sorted(chosen, key=place)]


def _build_columns(
    chosen: Sequence[tuple[_Headline, list[Entry]]], anchors: dict[int, str]
) -> list[Column]:
    """Headings; where two would be equal, the words of the protocol that differ follow."""
    words = []
    for _, found in chosen:
        details = f"{found[0].family}, {found[0].data}"
        words.append(re.split(r", " if found[0].task == "detect" else r",? ", details))
    named = [(_short_data(found[0]), headline.head) for headline, found in chosen]
    columns = []
    for number, (headline, found) in enumerate(chosen):
        alike = [words[i] for i, name in enumerate(named) if name == named[number]]
        own = [w.strip("()") for w in words[number] if not all(w in others for others in alike)]
        head = headline.head + (f" ({' '.join(own)})" if own else "")
        entry = found[0]
        parts = (entry.task, entry.family, entry.place, entry.metric, f"on {entry.data}")
        protocol = ", ".join(dict.fromkeys(filter(None, parts)))
        usual = Counter(anchors[id(entry.measured)] for entry in found).most_common(1)[0][0]
        columns.append(Column(head, _short_data(entry), protocol, usual))
    return columns


def _start_rank(network: Network) -> int:
    return next(i for i, word in enumerate(START_ORDER) if network.key.startswith(word))


def _is_start_of(start: Network, network: Network) -> bool:
    """Whether a network may have begun as `start`: nothing that is known of both differs."""
    known = start.facts.keys() & network.facts.keys()
    alike = all(start.facts[name] == network.facts[name] for name in known)
    return start.arch == network.arch and alike


def _merge_untrained(
    networks: Iterable[Network], columns: dict[Network, set[int]]
) -> list[list[Network]]:
    """Rows of networks in order; the ways to begin untrained share one where no cell has two."""
    rows: list[list[Network]] = []
    shared: dict[str, list[Network]] = {}
    for network in networks:
        row = shared.get(network.arch) if network.kind == "random" else None
        if row is None or any(columns[network] & columns[other] for other in row):
            row = []
            rows.append(row)
            if network.kind == "random":
                shared.setdefault(network.arch, row)
        row.append(network)
    return rows


def _name_row(networks: Sequence[Network]) -> str:
    """The short label; several networks are the ways to begin untrained."""
    ways = [STARTS[START_ORDER[_start_rank(network)]] for network in networks[1:]]
    return " / ".join([networks[0].short, *ways])


def build_scorecard(
    entries: Iterable[Entry], grids: Iterable[Grid], *, is_demo: bool
) -> Scorecard | None:
    """The scorecard of real data or of the demo; None where there is no headline number.

    Args:
        entries: all measurements; those of the other kind are left out.
        grids: the tables that have the details.
        is_demo: which kind.
    """
    anchors = {
        id(measured): grid.slug for grid in reversed(list(grids)) for measured in grid.measurements
    }
    chosen = _choose_columns(entry for entry in entries if entry.is_demo == is_demo)
    if not chosen:
        return None
    values: dict[Network, dict[int, Measured]] = {}
    for number, (_, found) in enumerate(chosen):
        for entry in found:
            values.setdefault(entry.network, {})[number] = entry.measured

    def place(network: Network) -> tuple[object, ...]:
        kind = KIND_ORDER.index(network.kind)
        rank = _start_rank(network) if network.kind == "random" else 0
        return max(kind, 2), network.arch, kind, rank

    networks = sorted(values, key=place)
    starts = [network for network in networks if network.kind == "random"]

    def untrained(network: Network, number: int) -> Measured | None:
        fitting = (s for s in starts if number in values[s] and _is_start_of(s, network))
        start = None if network.kind == "random" else next(fitting, None)
        return None if start is None else values[start][number]

    columns = _build_columns(chosen, anchors)
    means = [[entry.measured.mean for entry in found] for _, found in chosen]

    def cell(networks: Sequence[Network], number: int) -> Cell | None:
        network = next((n for n in networks if number in values[n]), None)
        if network is None:
            return None
        measured, low, high = values[network][number], min(means[number]), max(means[number])
        part = (measured.mean - low) / (high - low) if high > low else None
        shade = 0 if part is None else 1 + round((SHADES - 1) * part)
        best = measured.mean == high and len(means[number]) > 1
        anchor = anchors[id(measured)]
        elsewhere = anchor if anchor != columns[number].anchor else ""
        return Cell(measured, untrained(network, number), best, shade, elsewhere)

    rows = _merge_untrained(networks, {n: set(found) for n, found in values.items()})
    numbers = range(len(chosen))
    shown = [
        CardRow(
            _name_row(row),
            ". ".join(network.settings for network in row),
            KINDS[row[0].kind],
            tuple(cell(row, n) for n in numbers),
        )
        for row in rows
    ]
    return Scorecard(tuple(columns), tuple(shown), is_demo)

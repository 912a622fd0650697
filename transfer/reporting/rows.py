"""From result rows to measurements: what was measured, of which network, how often.

Imports no torch. Two rows are repetitions of one measurement if they agree in everything but seeds:
of the task, and of the pretraining or the random weights behind it.
"""

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from instdisc.errors import UserError
from instdisc.runs.results import Measured, Result
from transfer.reporting.networks import Facts, Network, describe_pretraining, name_networks
from transfer.reporting.paper_numbers import Kind

METRICS = {
    "top1": "top-1",
    "top5": "top-5",
    "ap50_11point": "AP50, 11-point",
    "ap50_area": "AP50, area",
    "ap": "AP",
    "ap75": "AP75",
    "ap_11point": "AP, 11-point",
    "ap75_11point": "AP75, 11-point",
    "ap_envelope": "mAP",
    **{
        f"{name}_{kind}": f"{kind} {label}"
        for kind in ("box", "mask")
        for name, label in {
            **{"ap": "AP", "ap50": "AP50", "ap75": "AP75", "ap_small": "AP, small"},
            **{"ap_medium": "AP, medium", "ap_large": "AP, large"},
        }.items()
    },
}
AP_WORDS = ("11-point", "area")  # of a detection protocol; the metric says it again
# The paper's data, told by classes and training images: a folder may be called anything.
BENCHMARKS = {
    (1000, 1_281_167): "ImageNet",
    (205, 2_448_873): "Places205",
    (10, 50_000): "CIFAR-10",
}
# By training and test images.
DETECTION_BENCHMARKS = {
    (5011, 4952): "VOC2007",
    (16551, 4952): "VOC2007 + 2012",
    (117_266, 5000): "COCO 2017",  # training images that have an object
    (118_287, 5000): "COCO 2017",
}
# Tasks whose protocol has words that tell columns apart.
PLACES = {
    "linear": re.compile(r"stage=(.+)"),
    "semisup": re.compile(r"labeled=(.+)"),
    "voc_svm": re.compile(r"stage=(.+)|(k=.+)"),
    "fewshot": re.compile(r"(\d+-shot)"),
}
# Of a pretraining, what the network that it starts from depends on, besides the seed.
START = ("embedding_dim", "stem", "image_size")


@dataclasses.dataclass(frozen=True)
class Entry:
    """One measurement.

    Attributes:
        task: the command that measured it.
        family: its protocol without what a column says: the stage, the fraction, the kind of AP.
        place: that word: conv3, 1%, 5-shot, ...; empty where there is none.
        metric: as a reader sees it.
        data: the images: a benchmark of the paper, or name, size and fingerprint.
        network: what was measured.
        measured: the number.
        is_demo: whether it is of the embedded images, or of a network that saw only those.
    """

    task: str
    family: str
    place: str
    metric: str
    data: str
    network: Network
    measured: Measured
    is_demo: bool

    @property
    def column(self) -> str:
        """Heading of its column."""
        return f"{self.place} {self.metric}".strip()


def split_protocol(row: Result) -> tuple[str, str]:
    """The protocol without what tells columns apart, and that word."""
    if row.task in PLACES:
        words = row.protocol.split(" ")
        told = [match for word in words if (match := PLACES[row.task].fullmatch(word))]
        family = " ".join(word for word in words if not PLACES[row.task].fullmatch(word))
        place = " ".join(match[match.lastindex or 0] for match in told)
        is_fraction = row.task == "semisup" and place
        return family, f"{100 * float(place):.4g}%" if is_fraction else place
    if row.task == "detect":
        parts = [part.strip() for part in row.protocol.split(",")]
        if "iterations" in row.details:  # a shortened run is another protocol
            parts.append(f"{row.details['iterations']} iterations")
        return ", ".join(part for part in dict.fromkeys(parts) if part not in AP_WORDS), ""
    return row.protocol, "kNN" if row.task == "knn" else ""


def name_data(row: Result) -> str:
    """The paper's name of a data set that has its size; else name, size and fingerprint."""
    details = row.details
    count, classes = details.get("num_train"), details.get("num_classes")
    if classes is None:
        classes = len(details.get("per_class") or ())
    if count is None and details.get("fraction"):
        count = round(details["num_labeled"] / details["fraction"])
    if details.get("num_test") and not row.is_demo:
        name = DETECTION_BENCHMARKS.get((count or 0, details["num_test"]))
        return name or f"{row.dataset} ({row.data_fingerprint[:8]})"
    if not count:
        return f"{row.dataset} ({row.data_fingerprint[:8]})"
    name = BENCHMARKS.get((int(classes), int(count)))
    if name is not None and (name != "CIFAR-10" or row.dataset == "cifar10"):
        return name
    few = f"{count:,} training images, {classes} classes"
    return f"{row.dataset} ({few}, {row.data_fingerprint[:8]})"


def find_runs(rows: Iterable[Result]) -> dict[tuple[str, str], Facts]:
    """What is known of the pretraining of each (weights, arch)."""
    known = ((row, row.details.get("pretraining") or {}) for row in rows)
    return {(row.weights, row.arch): facts for row, facts in known if "objective" in facts}


def find_network(
    row: Result, runs: Mapping[tuple[str, str], Facts]
) -> tuple[Network, tuple[int, int]]:
    """The network of a row, and which repetition the row is: seeds of network and task.

    Args:
        row: the row.
        runs: of `find_runs`: the row of `untrained:RUN` does not say with which settings RUN began.
    """
    facts = dict(row.details.get("pretraining") or {})
    kind, _, rest = row.weights.partition(":")
    if kind == "untrained":
        run = runs.get((rest, row.arch), {})
        start = {name: run[name] for name in START if name in run}
        key = f"untrained {row.arch} {json.dumps(start, sort_keys=True) if run else rest}"
        network = Network(key, "untrained", row.arch, "random", start)
        return network, (int(run.get("seed") or 0), row.seed)
    if row.weights == "scratch":
        return Network(f"scratch {row.arch}", "scratch", row.arch, "random", {}), (0, row.seed)
    if kind in ("random", "data-init"):
        arch, _, seed = rest.partition(":")
        name = f"{kind}:{arch}"
        found: Kind = "random" if kind == "random" else "data-init"
        return Network(name, name, arch, found, {}), (int(seed or 0), row.seed)
    if kind == "supervised":
        key = f"{row.weights} {row.weights_hash}"
        return Network(key, row.weights, row.arch, "labels", {}), (0, row.seed)
    if "objective" not in facts:
        key = f"{row.weights} {row.weights_hash}"
        return Network(key, row.weights, row.arch, "other", facts), (0, row.seed)
    seed_of_weights = int(facts.pop("seed", 0))
    if facts.get("train_fraction", 1.0) != 1.0:
        facts.pop("data_fingerprint", None)  # the seed chooses the images
    key = f"ours {row.arch} {json.dumps(facts, sort_keys=True)}"
    label = describe_pretraining(facts)
    return Network(key, label, row.arch, "ours", facts), (seed_of_weights, row.seed)


def _check(row: Result, runs: Mapping[tuple[str, str], Facts]) -> None:
    """Refuses a row whose words do not say what they should, such as `labeled=much`."""
    try:
        find_network(row, runs)
        split_protocol(row)
        name_data(row)
    except (ValueError, TypeError, LookupError, ArithmeticError) as error:
        raise UserError(
            f"the {row.task} row of {row.weights} ({row.protocol}, seed {row.seed}) cannot be told "
            f"({type(error).__name__}: {error}): remove it from the results"
        ) from None


def collect(rows: Iterable[Result]) -> list[Entry]:
    """One entry per measurement; of one repetition the latest row counts."""
    rows = list(rows)
    runs = find_runs(rows)
    for row in rows:
        _check(row, runs)
    # Of several image lists with the size of one benchmark, that with most rows is meant.
    lists = Counter((name_data(row), row.data_fingerprint) for row in rows)
    usual = {data: fingerprint for (data, fingerprint), _ in reversed(lists.most_common())}
    groups: dict[tuple[str, ...], tuple[Entry, dict[tuple[int, int], float]]] = {}
    names: dict[str, set[str]] = {}
    for row in rows:
        network, repetition = find_network(row, runs)
        names.setdefault(network.key, set()).add(row.weights)
        family, place = split_protocol(row)
        demo = row.is_demo or network.facts.get("dataset") == "demo"
        data = name_data(row)
        if usual[data] != row.data_fingerprint:
            data = f"{data}, other images ({row.data_fingerprint[:8]})"
        metric = METRICS.get(row.metric, row.metric.replace("_", " "))
        nothing = Measured(math.nan, None, 0)
        entry = Entry(row.task, family, place, metric, data, network, nothing, demo)
        key = (row.task, family, place, metric, data, network.key, str(demo))
        groups.setdefault(key, (entry, {}))[1][repetition] = row.value
    entries = [
        dataclasses.replace(entry, measured=Measured.of(values.values()))
        for entry, values in groups.values()
    ]
    return _with_distinct_labels(entries, names)


def _with_distinct_labels(entries: list[Entry], names: Mapping[str, set[str]]) -> list[Entry]:
    """Where two networks would look the same, their names tell them apart."""
    keys: dict[tuple[str, str], set[str]] = {}
    for entry in entries:
        network = entry.network
        keys.setdefault((network.label, network.arch), set()).add(network.key)
    named: dict[str, Network] = {}
    for entry in entries:
        network = entry.network
        own = tuple(sorted(names[network.key]))
        several = len(keys[network.label, network.arch]) > 1
        label = f"{network.label} ({', '.join(own)})" if several else network.label
        named[network.key] = dataclasses.replace(network, label=label, names=own)
    short = name_networks(list(named.values()))
    named = {key: dataclasses.replace(each, short=short[each]) for key, each in named.items()}
    return [dataclasses.replace(entry, network=named[entry.network.key]) for entry in entries]

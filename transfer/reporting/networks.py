"""What was measured, and what it is called: a full label, and a short one that is unique.

Imports no torch.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from transfer.reporting.drawing import shorten
from transfer.reporting.paper_numbers import Kind

Facts = Mapping[str, Any]
# Settings that a label names if they are not the paper's.
NOTED = {
    "train_fraction": (1.0, "{:.3g} of the images"),
    "embedding_dim": (128, "{}-d"),
    "temperature": (0.07, "tau {:g}"),
    "proximal_weight": (0.0, "proximal {:g}"),
    "bank_momentum": (0.5, "bank momentum {:g}"),
    "negatives": ("per-image", "{} noise"),
    "lr": (0.03, "lr {:g}"),
}
MOST_LETTERS = 44  # of what tells two labels apart
# Networks before training, by the beginning of their keys; the closest to a run's start first.
STARTS = {"untrained": "untrained", "random": "random weights", "scratch": "from scratch"}


@dataclasses.dataclass(frozen=True)
class Network:
    """What was measured, apart from seeds.

    Attributes:
        key: equal for repetitions.
        label: what a reader sees.
        arch: its architecture.
        kind: what of the published rows it can be compared with.
        facts: how it was pretrained, without the seed; empty where unknown.
        names: what --weights called it, of all repetitions.
        short: its label where there is little room; no other network has it.
    """

    key: str
    label: str
    arch: str
    kind: Kind
    facts: Facts = dataclasses.field(hash=False, compare=False)
    names: tuple[str, ...] = dataclasses.field(default=(), hash=False, compare=False)
    short: str = dataclasses.field(default="", hash=False, compare=False)

    @property
    def settings(self) -> str:
        """All that is known of it."""
        facts = sorted(self.facts.items())
        settings = [f"{name.replace('_', ' ')} {shorten(str(value), 24)}" for name, value in facts]
        names = shorten(", ".join(self.names), 80)
        return "; ".join(filter(None, (self.label, names, ", ".join(settings))))


def name_objective(facts: Facts) -> str:
    """As a reader knows it."""
    objective = str(facts.get("objective"))
    return {"nce": "NCE"}.get(objective, objective.replace("-", " "))


def describe_pretraining(facts: Facts) -> str:
    """Objective, length, data, and what else is not the paper's."""
    objective, words = facts.get("objective"), [name_objective(facts)]
    if objective in ("nce", "sampled-softmax"):
        words[0] += f" m={facts.get('num_negatives')}"
    done, planned = facts.get("epoch"), facts.get("epochs")
    length = f"{planned} epochs"
    if done is not None and planned is not None and not math.isclose(done, planned):
        length = f"{done:.3g} of {planned} epochs"
    words.append(f"{length} on {facts.get('dataset', 'unknown data')}")
    for name, (usual, text) in NOTED.items():
        if name in facts and facts[name] != usual:
            words.append(text.format(facts[name]))
    return ", ".join(words)


def _label(network: Network) -> str:
    if network.kind == "ours":
        return f"{network.arch}, {name_objective(network.facts)}"
    if network.kind == "random":
        start = next(text for word, text in STARTS.items() if network.key.startswith(word))
        return f"{network.arch}, {start}"
    label = shorten(network.label)
    return label if network.arch in label else f"{network.arch}, {label}"


def _words(network: Network) -> list[str]:
    """Its settings, without the objective, which the label has."""
    if network.kind != "ours":
        return []
    objective = name_objective(network.facts)
    return describe_pretraining(network.facts).removeprefix(f"{objective} ").split(", ")


def _tell_apart(networks: Sequence[Network]) -> list[str]:
    """For networks of one label: settings that differ, or names of runs, or a number."""
    if len(networks) == 1:
        return [""]
    words = [_words(network) for network in networks]
    common = set.intersection(*map(set, words))
    settings = [", ".join(word for word in own if word not in common) for own in words]
    names = [", ".join(network.names) for network in networks]
    notes = []
    for place in range(len(networks)):
        choice = [
            texts[place]
            for texts in (settings, names)
            if len(texts[place]) <= MOST_LETTERS and texts.count(texts[place]) == 1
        ]
        notes.append(choice[0] if choice else f"#{place + 1}")
    return notes


def name_networks(networks: Sequence[Network]) -> Mapping[Network, str]:
    """A short label for each; no two are equal."""
    groups: dict[str, list[Network]] = {}
    for network in dict.fromkeys(networks):
        groups.setdefault(_label(network), []).append(network)
    return {
        network: f"{label} ({note})" if note else label
        for label, group in groups.items()
        for network, note in zip(group, _tell_apart(group), strict=True)
    }

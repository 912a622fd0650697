"""One record per number: append safely, read strictly, group over seeds. Imports no torch."""

import dataclasses
import hashlib
import json
import math
import os
import stat
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from instdisc.errors import UserError
from instdisc.runs.folders import atomic_file, provenance, runs_root
from instdisc.runs.locks import open_locked

PERCENTAGES = ("top", "ap", "precision")  # metrics whose names begin so
# What makes two rows repetitions of one measurement: everything but the seed.
SAME = ("task", "protocol", "arch", "weights", "dataset", "data_fingerprint", "metric")

# What the report reads of the details, and of the pretraining among them; absent or null is none.
_NUMBERS = ("num_train", "num_test", "num_classes", "num_labeled", "fraction", "iterations")
_FACTS = (
    *("epoch", "epochs", "seed", "train_fraction", "embedding_dim", "num_negatives", "batch_size"),
    *("temperature", "proximal_weight", "bank_momentum", "lr", "image_size"),
)
_WORDS = ("objective", "dataset", "data_fingerprint", "arch", "stem", "negatives")
DETAIL_KINDS: dict[str, Any] = {
    **dict.fromkeys(_NUMBERS, (int, float)),
    **dict.fromkeys(("folder", "curve", "stage", "init"), str),
    "per_class": (dict, list),
    "pretraining": dict,
}
FACT_KINDS: dict[str, Any] = {
    **dict.fromkeys(_FACTS, (int, float)),
    **dict.fromkeys(_WORDS, str),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One number and all that is needed to know what it means.

    Attributes:
        task: command that measured it: knn, linear, semisup, detect, retrieve.
        protocol: how, in words that two equal measurements share: "k=200 tau=0.07 embedding".
        arch: the backbone's architecture.
        weights: what initialised it: a run's name, `scratch`, `random`, `timm:...`.
        weights_hash: SHA-256 of its tensors.
        dataset: name of the data set; `demo` rows never enter a paper table.
        data_fingerprint: which images exactly.
        metric: top1, top5, ap50, ...
        value: the number, in percent where it is one.
        seed: of the trial.
        config_hash: SHA-256 of the command's configuration.
        details: per-class values, sizes, anything a reader may ask for.
    """

    task: str
    protocol: str
    arch: str
    weights: str
    weights_hash: str
    dataset: str
    data_fingerprint: str
    metric: str
    value: float
    seed: int
    config_hash: str
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    provenance: Mapping[str, Any] = dataclasses.field(default_factory=provenance)

    @property
    def is_demo(self) -> bool:
        """Whether it was measured on the embedded images."""
        return self.dataset == "demo"


def results_file() -> Path:
    """Where all results of a runs folder are kept."""
    return runs_root() / "results.jsonl"


def config_hash(values: Mapping[str, Any]) -> str:
    """SHA-256 of a configuration."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def append_results(results: Sequence[Result], path: Path | None = None) -> Path:
    """Adds rows at the end of the file; several processes may do so at once."""
    path = path or results_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(dataclasses.asdict(result)) + "\n" for result in results)
    with open_locked(path, "ab") as file:
        size = file.seek(0, os.SEEK_END)
        if size and _last_byte(path) != b"\n":
            lines = "\n" + lines  # a writer died in mid-line: do not continue its line
        file.write(lines.encode())
        file.flush()
        os.fsync(file.fileno())
    return path


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1)


def _check_kinds(where: str, values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    for name, kind in kinds.items():
        value = values.get(name)
        if value is None:
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{name} in {where} has the wrong type")
        if isinstance(value, int | float) and not math.isfinite(value):
            raise ValueError(f"{name} in {where} is not a finite number")


def _parse(line: str) -> Result:
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("not an object")
    known = {field.name: field for field in dataclasses.fields(Result)}
    wrong = sorted(set(values) ^ set(known))
    if wrong:
        raise ValueError(f"missing or unknown fields: {', '.join(wrong)}")
    kinds = {"value": (int, float), "seed": int, "details": dict, "provenance": dict}
    for name, value in values.items():
        kind = kinds.get(name, str)
        if not isinstance(value, kind) or isinstance(value, bool):  # type: ignore[arg-type]
            raise ValueError(f"{name} has the wrong type")
    _check_kinds("details", values["details"], DETAIL_KINDS)
    _check_kinds("pretraining", values["details"].get("pretraining") or {}, FACT_KINDS)
    if not math.isfinite(values["value"]):
        raise ValueError("value is not a finite number")
    if values["metric"].startswith(PERCENTAGES) and not 0 <= values["value"] <= 100:
        raise ValueError(f"{values['metric']} is {values['value']}, not a percentage")
    return Result(**values)


def read_results(path: Path | None = None) -> list[Result]:
    """Reads all rows.

    Raises:
        UserError: a row is damaged; the message names the line.
    """
    results, problems = check_results(path)
    if problems:
        raise UserError(
            f"{path or results_file()}: {problems[0]}: python transfer/report.py --repair"
        )
    return results


def _split(content: bytes) -> tuple[list[Result], list[tuple[int, bytes, str]]]:
    """The good rows; and of each bad line its number, its bytes, and what is wrong with it."""
    results, bad = [], []
    lines = content.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            results.append(_parse(line.decode("utf-8")))
        except (ValueError, OverflowError, RecursionError) as error:
            # No newline behind it: its writer died, or a copy was cut.
            cut = "cut short: " if number == len(lines) else ""
            bad.append((number, line, f"line {number}: {cut}{error}"))
    return results, bad


def check_results(path: Path | None = None) -> tuple[list[Result], list[str]]:
    """The good rows, and a line about each bad one."""
    path = path or results_file()
    if not path.exists():
        return [], []
    with open_locked(path, "rb", shared=True) as file:  # not while somebody is writing a line
        content = file.read()
    results, bad = _split(content)
    return results, [problem for _, _, problem in bad]


def repair_results(path: Path | None = None) -> list[str]:
    """Moves bad lines to a file beside it, `results.jsonl.damaged`; returns what was wrong.

    Replaced under the writers' lock, not changed in place: a kill in the middle would break rows
    that are good. A writer that waits for the lock gets the new file (`open_locked`).
    """
    path = (path or results_file()).resolve()
    if not path.exists():
        return []
    with open_locked(path, "rb") as file:
        content = file.read()
        _, bad = _split(content)
        if bad:
            with path.with_name(path.name + ".damaged").open("ab") as kept:
                kept.writelines(line + b"\n" for _, line, _ in bad)
                kept.flush()
                os.fsync(kept.fileno())
        numbers = {number for number, _, _ in bad}
        lines = enumerate(content.split(b"\n"), start=1)
        good = b"".join(line + b"\n" for number, line in lines if line and number not in numbers)
        if good != content:
            with atomic_file(path) as repaired:
                os.fchmod(repaired.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
                repaired.write(good)
    return [problem for _, _, problem in bad]


@dataclasses.dataclass(frozen=True)
class Measured:
    """A number over repetitions: mean, sample deviation (None of one), and how many."""

    mean: float
    std: float | None
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Measured":
        """Of the numbers of all repetitions."""
        numbers = list(values)
        std = statistics.stdev(numbers) if len(numbers) > 1 else None
        return cls(statistics.fmean(numbers), std, len(numbers))

    def __str__(self) -> str:
        spread = f" ± {self.std:.2f}" if self.std is not None else ""
        return f"{self.mean:.2f}{spread} (n={self.count})"


def summarize(results: Iterable[Result]) -> list[tuple[Result, Measured]]:
    """Rows that differ in seed only: the first of them, and all; of one seed the latest counts."""
    groups: dict[tuple[str, ...], dict[int, Result]] = {}
    for result in results:
        key = tuple(getattr(result, name) for name in SAME)
        groups.setdefault(key, {})[result.seed] = result
    return [
        (next(iter(group.values())), Measured.of(result.value for result in group.values()))
        for group in groups.values()
    ]

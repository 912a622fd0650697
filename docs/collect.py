"""Writes what a study measured from its run folders to a file of docs/results/.

    python docs/collect.py runs docs/results/table1-cpu.json

Each pretraining `RUNS/studies/seedN/NAME` becomes an entry of `runs`: its command, versions and
machine, loss, kNN and RankMe by epoch, and the rows of `RUNS/results.jsonl` measured of it. Entries
whose folders are not here stay, so that a study may be run in parts and on several machines; a
finished one is replaced by a finished one only. An
object of the list `rows` gets the values of the finished runs of its `name` as lists, in order of
seeds, which docs/tables.py shows by mean and deviation; `untrained` gets those of the networks that
runs began with. An object of the list `pairs` gets by how much its row `upper` is above `lower`,
and whether two seeds of one row differ by as much; `level` says that they should not differ. An
object of the list `measured` names a `task`, a `metric` and words of the `protocol`: it gets what
was measured so of each network, by the network's name (`photographs`, `untrained`, `scratch`).
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instdisc.runs.folders import read_jsonl, write_json

PATHS = ("--data", "--output", "--weights")  # flags of which only the last part of a path is kept
INSTRUCTIONS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "amx_bf16",
)  # which decide over speed and rounding


def describe_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor and its vector instructions; empty where the system does not tell."""
    try:
        text = cpuinfo.read_text("utf-8")
    except OSError:
        return ""
    found = re.search(r"^model name\s*: (.*)$", text, re.M)
    words = set(text.split())
    return " ".join([found[1].strip() if found else "", *filter(words.__contains__, INSTRUCTIONS)])


def show_command(argv: Sequence[str]) -> str:
    """A command without the folders of its machine."""
    words = list(argv)
    for place, word in enumerate(words[:-1]):
        if word in PATHS:
            words[place + 1] = Path(words[place + 1]).name
    return " ".join(["python", *words])


def show_results(rows: Sequence[dict[str, Any]], *, untrained: bool) -> dict[str, float]:
    """Values by task and metric, of the trained network or of the one that the run began with."""
    return {
        f"{row['task']} {row['metric']}": round(row["value"], 4)
        for row in rows
        if row["details"]["folder"].endswith("-untrained") == untrained
    }


def read_run(folder: Path, results: Sequence[dict[str, Any]], machine: str) -> dict[str, Any]:
    """The entry of one pretraining; `results` are the rows that were measured of it."""
    provenance = json.loads((folder / "provenance.json").read_text("utf-8"))
    config = json.loads((folder / "config.json").read_text("utf-8"))
    metrics = read_jsonl(folder / "metrics.jsonl")
    rates = [row["images_per_second"] for row in metrics if "images_per_second" in row]

    def by_epoch(field: str) -> dict[str, float]:
        return {f"{row['epoch']:.0f}": round(row[field], 4) for row in metrics if field in row}

    loss = by_epoch("epoch_loss")
    return {
        "name": folder.name,
        "seed": config["seed"],
        "finished": len(loss) == config["epochs"],
        "results": show_results(results, untrained=False),
        "untrained": show_results(results, untrained=True),
        "loss": loss,
        "knn": by_epoch("knn_recomputed"),
        "rankme": by_epoch("rankme"),
        "images_per_second": round(statistics.median(rates)) if rates else None,
        "command": show_command(provenance["argv"]),
        "git": provenance["git"],
        "versions": {"python": provenance["python"], **provenance["versions"]},
        "machine": machine,
    }


def read_results(runs: Path) -> list[dict[str, Any]]:
    """All rows below a runs folder."""
    path = runs / "results.jsonl"
    return read_jsonl(path) if path.exists() else []


def read_runs(runs: Path) -> list[dict[str, Any]]:
    """All pretrainings of the studies below a runs folder."""
    rows = read_results(runs)
    machine = describe_machine()
    entries = []
    for config in sorted(runs.glob("studies/seed*/*/metrics.jsonl")):
        folder = config.parent
        prefix = f"{folder.relative_to(runs).as_posix()}/"
        mine = [row for row in rows if row["details"].get("folder", "").startswith(prefix)]
        entries.append(read_run(folder, mine, machine))
    return entries


def fill_rows(rows: list[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> None:
    """Puts the values of finished runs, seed after seed, into the rows that bear their names."""
    for row in rows:
        mine = [run for run in runs if run["name"] == row["name"] and run["finished"]]
        found = [run["results"] for run in mine]
        if row["name"] == "untrained":
            found = [run["untrained"] for run in runs]
        for name in sorted({name for values in found for name in values}):
            row[name.replace(" ", "_")] = [values[name] for values in found if name in values]
        if mine:
            row["last_loss"] = [list(run["loss"].values())[-1] for run in mine]


def fill_pairs(pairs: list[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> None:
    """Compares rows; the spread is the largest difference between two seeds of any of them."""
    by_name = {row["name"]: row for row in rows}
    for pair in pairs:
        metric = pair["metric"]
        spreads = [
            max(row[metric]) - min(row[metric]) for row in rows if len(row.get(metric, ())) > 1
        ]
        lower, upper = (by_name[pair[side]].get(metric) for side in ("lower", "upper"))
        if not lower or not upper:
            continue
        pair["difference"] = round(statistics.mean(upper) - statistics.mean(lower), 2)
        if not pair.get("level"):
            pair["verdict"] = "in order" if pair["difference"] > 0 else "out of order"
        if spreads:
            pair["spread"] = round(max(spreads), 2)
            if abs(pair["difference"]) <= pair["spread"]:
                pair["verdict"] = "within the spread"
            elif pair.get("level"):
                pair["verdict"] = "not level"


def fill_measured(measured: list[dict[str, Any]], results: Sequence[dict[str, Any]]) -> None:
    """Puts the values of each network, in order of seeds, into the objects that ask for them."""
    for entry in measured:
        words = set(entry.get("protocol", "").split())
        found: dict[str, dict[int, float]] = {}
        for row in results:
            fits = all(row[field] == entry[field] for field in ("task", "metric"))
            if fits and words <= set(row["protocol"].split()):
                network = row["weights"].partition(":")[0]
                found.setdefault(network, {})[row["seed"]] = round(row["value"], 4)
        for network, by_seed in found.items():
            entry[network] = [by_seed[seed] for seed in sorted(by_seed)]


def main(argv: Sequence[str] | None = None) -> int:
    """Brings the file up to date; returns the exit code."""
    parser = argparse.ArgumentParser(prog="docs/collect.py", description="Results of a study.")
    parser.add_argument("runs", type=Path, help="runs folder that the study wrote to")
    parser.add_argument("file", type=Path, help="file of docs/results to bring up to date")
    parser.add_argument("--match", default="", help="only runs whose names begin so")
    args = parser.parse_args(argv)
    stored = json.loads(args.file.read_text("utf-8")) if args.file.exists() else {"tables": {}}
    entries = {(run["name"], run["seed"]): run for run in stored.get("runs", [])}
    found = [run for run in read_runs(args.runs) if run["name"].startswith(args.match)]
    for run in found:
        known = entries.get((run["name"], run["seed"]))
        if run["finished"] or known is None or not known["finished"]:
            entries[run["name"], run["seed"]] = run
    stored["runs"] = [entries[key] for key in sorted(entries)]
    fill_rows(stored.get("rows", []), stored["runs"])
    fill_pairs(stored.get("pairs", []), stored.get("rows", []))
    fill_measured(stored.get("measured", []), read_results(args.runs))
    write_json(args.file, stored)
    finished = sum(run["finished"] for run in found)
    print(f"{args.file}: {len(found)} runs found, {finished} of them finished")
    return 0


if __name__ == "__main__":
    sys.exit(main())

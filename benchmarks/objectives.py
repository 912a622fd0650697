"""Objectives at the paper's size: ours against the ways of the authors' code and of cross_entropy.

python benchmarks/objectives.py [--quick]

Each method computes the loss of a batch and its gradient. All run in one process on the same data,
in turn, several rounds; a ratio is the median over rounds of one method's time over that of the
authors' NCE in the same round. Peak memory is that of a process for each method: the growth of its
resident high-water mark over one call. Waiting threads sleep, for all methods alike.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TAU = 0.07
AUTHORS = "NCE per image, authors' way"
FULL = "softmax, cross_entropy on all logits"
Problem = dict[str, Any]


def build_problem(n: int, args: argparse.Namespace) -> Problem:
    """A bank of unit rows, features, the images they are of, and a step's noise."""
    import torch

    from pretrain.bank import initial_rows
    from pretrain.objectives import draw_noise

    noise = {"seed": 0, "step": 0}
    return {
        "bank": initial_rows(n, args.dim, seed=0, rows=range(n)),
        "features": initial_rows(args.batch, args.dim, seed=1, rows=range(args.batch)),
        "own": torch.arange(args.batch),
        "log_z": torch.tensor(math.log(n) + 1 / (2 * args.dim * TAU**2)),
        "per_image": draw_noise(n, range(args.batch), args.negatives, **noise),
        "shared": draw_noise(n, range(1), args.negatives, **noise),
    }


def _gradient(problem: Problem, loss: Callable[[Any], Any]) -> Any:
    features = problem["features"].clone().requires_grad_()
    loss(features).sum().backward()
    return features.grad


def streamed_softmax(problem: Problem) -> Any:
    """Ours: the bank goes by in chunks, and the gradient is formed on the way."""
    from pretrain.objectives import softmax_loss

    bank, own = problem["bank"], problem["own"]
    return _gradient(problem, lambda f: softmax_loss(f, bank, bank[own].float(), TAU))


def full_softmax(problem: Problem) -> Any:
    """The obvious way: all B x n logits, then cross_entropy."""
    from torch.nn.functional import cross_entropy

    def loss(f: Any) -> Any:
        return cross_entropy(f @ problem["bank"].T / TAU, problem["own"], reduction="none")

    return _gradient(problem, loss)


def _nce(problem: Problem, noise: Any) -> Any:
    from pretrain import objectives

    bank, own = problem["bank"], problem["own"]

    def loss(f: Any) -> Any:
        positive = objectives.positive_logits(f, bank[own].float(), TAU)
        negative = objectives.noise_logits(f, bank, noise, TAU)
        return objectives.nce_loss(positive, negative, problem["log_z"], len(bank))

    return _gradient(problem, loss)


def nce_per_image(problem: Problem) -> Any:
    """Ours, with noise for each image."""
    return _nce(problem, problem["per_image"])


def nce_shared(problem: Problem) -> Any:
    """Ours, with one set of noise for the batch: a matrix product."""
    return _nce(problem, problem["shared"])


def authors_nce(problem: Problem) -> Any:
    """All rows of positives and noise copied at once; probabilities rather than logits."""
    import torch

    bank, noise = problem["bank"], problem["per_image"]
    n, m = len(bank), noise.shape[1]
    z = problem["log_z"].exp()

    def loss(f: Any) -> Any:
        chosen = torch.cat([problem["own"][:, None], noise], dim=1)
        rows = bank.index_select(0, chosen.reshape(-1)).view(len(f), m + 1, -1)
        p = torch.bmm(rows, f[:, :, None]).squeeze(2).div(TAU).exp().div(z)
        true = p[:, 0] / (p[:, 0] + m / n)
        false = (m / n) / (p[:, 1:] + m / n)
        return -true.log() - false.log().sum(dim=1)

    return _gradient(problem, loss)


METHODS: dict[str, Callable[[Problem], Any]] = {
    AUTHORS: authors_nce,
    "NCE per image, ours": nce_per_image,
    "NCE shared, ours": nce_shared,
    FULL: full_softmax,
    "softmax streamed, ours": streamed_softmax,
    "softmax streamed, half-precision bank": streamed_softmax,
}
# What must give one gradient.
SAME = (("NCE per image, ours", AUTHORS), ("softmax streamed, ours", FULL))


def prepare(name: str, problem: Problem) -> Problem:
    """The problem as a method wants it."""
    return {**problem, "bank": problem["bank"].half()} if "half" in name else problem


def chosen(n: int, args: argparse.Namespace) -> list[str]:
    """All methods, without those that need more memory than allowed: three tables of logits."""
    too_large = 3 * 4 * args.batch * n > args.max_gb * 1e9
    return [name for name in METHODS if not (name == FULL and too_large)]


def measure_times(n: int, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of each method in each round, and the largest difference of equal gradients."""
    problem = build_problem(n, args)
    problems = {name: prepare(name, problem) for name in chosen(n, args)}
    found = {name: METHODS[name](each) for name, each in problems.items()}  # not timed: warms up
    times: dict[str, list[float]] = {name: [] for name in problems}
    for _ in range(args.rounds):
        for name, each in problems.items():
            started = time.perf_counter()
            METHODS[name](each)
            times[name].append((time.perf_counter() - started) * 1e3)
    rows: dict[str, Any] = {}
    for name, values in times.items():
        ratios = [value / other for value, other in zip(values, times[AUTHORS], strict=True)]
        rows[name] = {
            "ms": statistics.median(values),
            "rounds": values,
            "ratio": statistics.median(ratios),
        }
    for one, other in SAME:
        if other in found:
            rows[one]["gradient_difference"] = float((found[one] - found[other]).abs().max())
    return rows


def measure_memory(n: int, name: str, args: argparse.Namespace) -> float:
    """Growth in MB of this process's resident high-water mark over one call."""
    small = argparse.Namespace(**{**vars(args), "batch": 2, "negatives": 8})
    METHODS[name](prepare(name, build_problem(64, small)))
    problem = prepare(name, build_problem(n, args))
    Path("/proc/self/clear_refs").write_text("5")  # forget the mark that building the data left
    before = _high_water()
    METHODS[name](problem)
    return (_high_water() - before) / 1e6


def _high_water() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def ask_child(args: argparse.Namespace, what: list[Any]) -> Any:
    """Runs one measurement in a fresh process and returns what it found."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(args.threads),
        "OMP_WAIT_POLICY": "passive",
    }
    command = [sys.executable, __file__, "--child", json.dumps(what)]
    for option in ("batch", "dim", "negatives", "rounds", "threads", "max_gb"):
        command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def draw_plot(report: dict[str, Any], target: Path) -> None:
    """Bars of milliseconds, a group for each bank size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = list(report["sizes"])
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(6 * len(sizes), 3.6), squeeze=False)
    for axis, size in zip(axes[0], sizes, strict=True):
        rows = report["sizes"][size]
        axis.barh(list(rows), [row["ms"] for row in rows.values()])
        axis.set(title=f"n = {int(size):,}", xlabel="ms, loss and gradient", xscale="log")
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(target, dpi=120)


def main() -> None:
    """Measures, prints the tables, writes JSON and a plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--n", type=int, nargs="+", help="bank rows (default: 50000 1281167)")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--negatives", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=None, help="default: 3; 2 with --quick")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-gb", type=float, default=2.0, help="leave out what needs more")
    parser.add_argument("--quick", action="store_true", help="banks of 20,000 and 100,000 rows")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/objectives.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.rounds = args.rounds or (2 if args.quick else 3)
    args.n = args.n or ([20_000, 100_000] if args.quick else [50_000, 1_281_167])
    if args.child:
        n, *method = json.loads(args.child)
        print(json.dumps(measure_memory(n, method[0], args) if method else measure_times(n, args)))
        return
    from instdisc.runs.folders import provenance, write_json

    keys = ("batch", "dim", "negatives", "threads", "rounds")
    report: dict[str, Any] = {"settings": {key: getattr(args, key) for key in keys}, "sizes": {}}
    for n in args.n:
        rows = ask_child(args, [n])
        print(f"\nn = {n:,}, B = {args.batch}, d = {args.dim}, m = {args.negatives}")
        print(f"{'':40}{'ms':>9}{'ratio':>8}{'extra MB':>10}")
        for name, row in rows.items():
            row["peak_extra_mb"] = ask_child(args, [n, name])
            numbers = f"{row['ms']:9.1f}{row['ratio']:8.3f}{row['peak_extra_mb']:10.0f}"
            print(f"{name:40}{numbers}", flush=True)
        report["sizes"][str(n)] = rows
    report["provenance"] = provenance()
    write_json(args.output, report)
    draw_plot(report, args.output.with_suffix(".png"))
    print(f"\nratio: time over that of the authors' way; written to {args.output} and .png")


if __name__ == "__main__":
    main()

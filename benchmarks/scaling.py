"""Cost against the number of images and of processes, beside the model of docs/performance.md.

python benchmarks/scaling.py [--quick]

First, one process: loss and gradient for n from 10^4 to 10^7 rows, and what the model says from the
unit costs of one chunk, measured in the same run. Then W = 1, 2, 4 gloo processes of one thread
each with a global batch: the bank sharded, and replicated as the peers have it, with the bytes that
each process holds and sends.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instdisc.runs.folders import provenance, write_json
from instdisc.training import dist
from pretrain import objectives
from pretrain.bank import MemoryBank, initial_rows
from pretrain.objectives import draw_noise
from pretrain.sharded_bank import ShardedBank

TAU = 0.07
WAYS = ("softmax", "nce-shared", "nce-per-image")


def median_seconds(function: Callable[[], Any], rounds: int) -> float:
    """The median time of some calls, after one that is not counted."""
    function()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def run_objective(
    way: str, bank: MemoryBank, features: Tensor, rows: range, n: int, m: int
) -> Tensor:
    """The gradient of one step's loss by one way."""
    f = features.clone().requires_grad_()
    own = bank.rows(torch.arange(rows.start, rows.stop))
    positive = objectives.positive_logits(f, own, TAU)
    if way == "softmax":
        losses = bank.log_normalizer(f, TAU) - positive
    else:
        shared = way == "nce-shared"
        noise = draw_noise(n, range(1) if shared else rows, m, seed=0, step=0)
        negative = bank.noise_logits(f, noise, TAU, shared=shared)
        losses = objectives.nce_loss(positive, negative, torch.tensor(float(n)).log(), n)
    losses.sum().backward()
    assert f.grad is not None
    return f.grad


def unit_costs(bank: Tensor, features: Tensor, rounds: int) -> dict[str, float]:
    """Seconds for one image and one row: the two products, and the exponentials between them."""
    chunk = objectives.CHUNK_ELEMENTS // len(features)
    parts = bank[: 4 * chunk].split(chunk)
    logits = features @ parts[0].T
    count = sum(len(part) for part in parts) * len(features)

    def weigh() -> None:
        for _ in parts:
            logits.sub_(1).div_(TAU).exp_().sum(dim=1)

    ways: dict[str, Callable[[], Any]] = {
        "logits": lambda: [features @ part.T for part in parts],
        "weights": weigh,
        "gradient": lambda: [logits[:, : len(part)] @ part for part in parts],
    }
    return {name: median_seconds(way, rounds) / count for name, way in ways.items()}


def measure_sizes(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds by way and n; for the exact softmax also the model's, and the relative error."""
    largest = max(args.n)
    whole = MemoryBank(1, args.dim, momentum=0.0, seed=0)
    table = initial_rows(largest, args.dim, seed=0, rows=range(largest))
    features = initial_rows(args.batch, args.dim, seed=1, rows=range(args.batch))
    costs = unit_costs(table, features, args.rounds)
    per_row = args.batch * sum(costs.values())
    # What does not grow with n, from the smallest bank that has a row for each image.
    whole.vectors = table[: args.batch]

    def smallest() -> Tensor:
        rows = range(args.batch)
        return run_objective("softmax", whole, features, rows, args.batch, args.negatives)

    fixed = max(0.0, median_seconds(smallest, args.rounds) - args.batch * per_row)
    found: dict[str, Any] = {"unit_seconds": costs, "fixed_seconds": fixed, "n": {}}
    for n in args.n:
        whole.vectors = table[:n]
        row = {}
        for way in WAYS:
            rounds = max(1, min(args.rounds, 20_000_000 // n))

            def call(way: str = way, n: int = n) -> Tensor:
                return run_objective(way, whole, features, range(args.batch), n, args.negatives)

            row[way] = median_seconds(call, rounds)
        row["model"] = fixed + n * per_row
        row["model_error"] = row["model"] / row["softmax"] - 1
        found["n"][str(n)] = row
    return found


def bytes_sent(way: str, batch: int, dim: int, m: int, world_size: int) -> float:
    """What a process sends in one step over ring collectives; docs/performance.md has the sums."""
    ring = (world_size - 1) / world_size
    gather, reduce = ring, 2 * ring  # times the size of the whole result
    own_rows = gather * 8 * batch + reduce * 4 * batch * dim
    update = gather * 4 * batch * (dim + 3)  # features, image number, whether it was readable
    objective = {
        "softmax": gather * 4 * batch * dim + reduce * 4 * batch * (dim + 1),
        "nce-shared": reduce * 4 * m * dim,
        "nce-per-image": gather * (4 * batch * dim + 12 * batch * m)
        + reduce * 4 * (batch * m + batch * dim),
    }
    return own_rows + objective[way] + update


def run_rank(job: dict[str, Any]) -> None:
    """One process of a group; the first prints what it found."""
    torch.set_num_threads(1)
    process = dist.init_process("cpu")
    n, dim, batch, world = job["n"], job["dim"], job["batch"], process.world_size
    share = batch // world
    rows = range(process.rank * share, (process.rank + 1) * share)
    everyone = initial_rows(batch, dim, seed=1, rows=range(batch))
    features = everyone[rows.start : rows.stop]
    sizes = {"momentum": 0.5, "seed": 0}
    found: dict[str, Any] = {}
    for placement in ("sharded", "replicated"):
        bank = (
            ShardedBank(n, dim, rank=process.rank, world_size=world, **sizes)
            if placement == "sharded"
            else MemoryBank(n, dim, **sizes)
        )
        found[placement] = {"bank_bytes": bank.vectors.numel() * bank.vectors.element_size()}
        for way in WAYS:

            def step(way: str = way, bank: MemoryBank = bank) -> None:
                run_objective(way, bank, features, rows, n, job["negatives"])
                gathered = dist.all_gather_rows(features)
                bank.update(torch.arange(batch), gathered, torch.ones(batch, dtype=torch.bool))
                dist.barrier()

            found[placement][way] = median_seconds(step, job["rounds"])
    if process.is_main:
        print(json.dumps(found))
    dist.close()


def run_group(args: argparse.Namespace, world_size: int, n: int) -> dict[str, Any]:
    """Starts the processes of a group and returns what the first found."""
    keys = ("dim", "batch", "negatives", "rounds")
    job = json.dumps({"n": n, **{key: getattr(args, key) for key in keys}})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = []
    for rank in range(world_size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        children.append(
            subprocess.Popen(
                [sys.executable, __file__, "--child", job],
                env={**os.environ, **place, **address},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [child.communicate()[0] for child in children]
    assert all(child.returncode == 0 for child in children), "a process of the group failed"
    found = json.loads(outputs[0].splitlines()[-1])
    sizes = (args.batch, args.dim, args.negatives, world_size)
    found["bytes_sent"] = {way: bytes_sent(way, *sizes) for way in WAYS}
    return found


def draw_plot(report: dict[str, Any], target: Path) -> None:
    """Seconds against n with the model's line; seconds and bytes against W."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    rows = report["sizes"]["n"]
    n = [int(size) for size in rows]
    for way in WAYS:
        left.loglog(n, [row[way] for row in rows.values()], "o-", label=way)
    left.loglog(n, [row["model"] for row in rows.values()], "k--", label="softmax, model")
    left.set(xlabel="n", ylabel="seconds, loss and gradient", title="one process")
    left.legend(fontsize="small")
    groups = report["processes"]
    worlds = [int(world) for world in groups]
    for way in WAYS:
        right.plot(worlds, [g["sharded"][way] for g in groups.values()], "o-", label=way)
        right.plot(worlds, [g["replicated"][way] for g in groups.values()], "x--", alpha=0.5)
    right.set(xlabel="W", ylabel="seconds a step", title="sharded (dashed: replicated)")
    right.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(target, dpi=120)


def main() -> None:
    """Measures, prints the tables, writes JSON and a plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--n", type=int, nargs="+", help="default: 10^4 to 10^7")
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--negatives", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=None, help="default: 5; 2 with --quick")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="10^4 and 10^5 rows")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/scaling.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return run_rank(json.loads(args.child))
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.n = sorted(args.n or (10**p for p in range(4, 6 if args.quick else 8)))
    torch.set_num_threads(args.threads)
    keys = ("n", "batch", "dim", "negatives", "rounds", "threads")
    report: dict[str, Any] = {"settings": {key: getattr(args, key) for key in keys}}
    report["sizes"] = measure_sizes(args)
    print(f"{'n':>12}" + "".join(f"{way:>15}" for way in WAYS) + f"{'model':>10}{'off by':>8}")
    for n, row in report["sizes"]["n"].items():
        seconds = "".join(f"{row[way]:>13.3f} s" for way in WAYS)
        print(f"{int(n):>12,}{seconds}{row['model']:>8.3f} s{100 * row['model_error']:>7.0f}%")
    report["processes"], at = {}, min(1_000_000, max(args.n))
    print(f"\nn = {at:,}, global batch {args.batch}; seconds a step, sharded / replicated")
    for world_size in args.world_sizes:
        group = run_group(args, world_size, at)
        report["processes"][str(world_size)] = group
        both = [f"{group['sharded'][way]:.3f} / {group['replicated'][way]:.3f}" for way in WAYS]
        held = group["sharded"]["bank_bytes"] / 1e6
        print(f"W = {world_size}  {held:7.1f} MB" + "".join(f"{each:>18}" for each in both))
    report["provenance"] = provenance()
    write_json(args.output, report)
    draw_plot(report, args.output.with_suffix(".png"))
    print(f"written to {args.output} and .png")


if __name__ == "__main__":
    main()

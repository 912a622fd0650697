"""What the kNN monitor costs beside extraction, over W processes, on features that are drawn.

python benchmarks/monitor.py [--quick]

W = 1 and 2 gloo processes of one thread each run the monitor of pretraining over a bank as large as
ImageNet's, with some of its 50,000 validation images; the searches (bank and recomputed features)
grow with their number, the rest (RankMe) does not. Extraction, not measured, is n/W images each.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instdisc.images.transforms import InputSpec
from instdisc.runs.folders import provenance, write_json
from instdisc.training import dist
from pretrain.bank import initial_rows
from pretrain.config import PretrainConfig
from pretrain.monitor import Monitor

NUM_CLASSES, NUM_VALIDATION = 1000, 50_000
CLOCKS = ("wall", "cpu")  # CPU time of the first process is what counts where cores are shared
SEARCHED: list[np.ndarray] = []  # by each clock, of each search


class DrawnImages:
    """As much of a data set as the monitor looks at."""

    classes = tuple(map(str, range(NUM_CLASSES)))

    def __init__(self, rows: Tensor) -> None:
        self.rows, self.labels = rows, np.arange(len(rows)) % NUM_CLASSES

    def __len__(self) -> int:
        return len(self.rows)


class DrawnMonitor(Monitor):
    """The monitor, with features that are there already; keeps the time of its searches."""

    def _features(self, model: Any, images: Any, title: str, check: Any) -> Tensor:
        return images.rows

    def _accuracy(self, *args: Any) -> float:
        started = read_clocks()
        found = super()._accuracy(*args)
        SEARCHED.append(read_clocks() - started)
        return found


def read_clocks() -> np.ndarray:
    """Wall and CPU seconds."""
    return np.array([time.perf_counter(), time.process_time()])


def run_rank(job: dict[str, Any]) -> None:
    """One process of a group; the first prints what it found."""
    torch.set_num_threads(1)
    process = dist.init_process("cpu")
    n, dim, count = job["n"], job["dim"], job["queries"]
    train = DrawnImages(initial_rows(n, dim, seed=0, rows=range(n)))
    val = DrawnImages(initial_rows(count, dim, seed=1, rows=range(count)))
    images: Any = (train, val)
    model: Any = nn.Identity()
    monitor = DrawnMonitor(PretrainConfig(), *images, InputSpec(), process)

    def check() -> None:  # as in training, by a group that waits for the slowest
        assert not dist.agree(False)

    dist.barrier()
    started = read_clocks()
    measured = monitor.measure(model, train.rows, check)
    whole = read_clocks() - started
    if process.is_main:
        searched = np.sum(SEARCHED, axis=0)
        found: dict[str, Any] = {"measured": measured}
        for clock, search, rest in zip(CLOCKS, searched, whole - searched, strict=True):
            every = rest + search * NUM_VALIDATION / count
            found[clock] = {"search": search, "rest": rest, "all": every}
        print(json.dumps(found))
    dist.close()


def run_group(job: dict[str, Any], world_size: int) -> dict[str, Any]:
    """Starts the processes of a group and returns what the first found."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = []
    for rank in range(world_size):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        children.append(
            subprocess.Popen(
                [sys.executable, __file__, "--child", json.dumps(job)],
                env={**os.environ, **place, **address},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [child.communicate()[0] for child in children]
    assert all(child.returncode == 0 for child in children), "a process of the group failed"
    return json.loads(outputs[0].splitlines()[-1])


def main() -> None:
    """Measures, prints seconds and ratios, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--n", type=int, help="rows; default: ImageNet's 1,281,167")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--queries", type=int, default=1024)
    parser.add_argument("--world-sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quick", action="store_true", help="100,000 rows")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/monitor.json"))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return run_rank(json.loads(args.child))
    args.n = args.n or (100_000 if args.quick else 1_281_167)
    job = {"n": args.n, "dim": args.dim, "queries": args.queries}
    report: dict[str, Any] = {"settings": job, "processes": {}}
    print(f"{args.n:,} rows, {args.queries} queries; all: {NUM_VALIDATION:,} of them")
    for world_size in args.world_sizes:
        found = run_group(job, world_size)
        report["processes"][str(world_size)] = found
        first = report["processes"][str(args.world_sizes[0])]
        found["ratio"] = {c: found[c]["all"] / first[c]["all"] for c in CLOCKS}
        assert found["measured"] == first["measured"], "processes measure something else than one"
        for clock in CLOCKS:
            parts = "  ".join(f"{part} {value:7.2f} s" for part, value in found[clock].items())
            print(f"W = {world_size}  {clock:4}  {parts}  ratio {found['ratio'][clock]:.3f}")
    report["provenance"] = provenance()
    write_json(args.output, report)
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()

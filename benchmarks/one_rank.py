"""What one process of many draws for a run over 10^8 images: its time and its memory.

python benchmarks/one_rank.py [--quick]

Order, noise and first bank rows of one process, each measured in an interpreter of its own:
seconds, and the most memory over what the interpreter held before (the last column has that too;
files that are mapped, such as libraries, are not counted). Beside the order, the list that
torch.randperm makes.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from instdisc.images.loading import BatchPlan
from instdisc.runs.folders import provenance, write_json
from pretrain.bank import initial_rows
from pretrain.objectives import draw_noise
from pretrain.sharded_bank import rows_of_rank

STEPS = 200  # whose order and noise are drawn


def anonymous_bytes() -> int:
    """Memory of this process but for files that it maps: libraries, which come and go."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


class Peak:
    """The most memory while a block runs, looked at every few milliseconds."""

    def __enter__(self) -> "Peak":
        self.bytes = anonymous_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.bytes = max(self.bytes, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.bytes = max(self.bytes, anonymous_bytes())


def draw_order(args: argparse.Namespace) -> object:
    """The images of this process in some steps in the middle of an epoch."""
    middle = args.n // args.batch // 2
    plan = BatchPlan(
        args.n,
        args.batch,
        seed=0,
        start=middle,
        num_steps=middle + STEPS,
        rank=args.rank,
        world_size=args.world_size,
    )
    return list(plan)


def draw_shared(args: argparse.Namespace) -> object:
    """Noise for the whole batch, in as many steps."""
    for step in range(STEPS):
        noise = draw_noise(args.n, range(1), args.negatives, seed=0, step=step)
    return noise


def draw_per_image(args: argparse.Namespace) -> object:
    """Noise for each image of this process, in as many steps."""
    share = args.batch // args.world_size
    rows = range(args.rank * share, (args.rank + 1) * share)
    for step in range(STEPS):
        noise = draw_noise(args.n, rows, args.negatives, seed=0, step=step)
    return noise


def draw_bank(args: argparse.Namespace, dtype: torch.dtype = torch.float32) -> object:
    """The first rows that this process owns."""
    owned = rows_of_rank(args.n, args.rank, args.world_size)
    return initial_rows(args.n, args.dim, seed=0, rows=owned, dtype=dtype)


PARTS: dict[str, Callable[[argparse.Namespace], object]] = {
    "order by torch.randperm": lambda args: torch.randperm(args.n),
    "order": draw_order,
    "noise, shared": draw_shared,
    "noise, per image": draw_per_image,
    "bank, float32": draw_bank,
    "bank, float16": lambda args: draw_bank(args, torch.float16),
    "all of them, float32": lambda args: [
        draw(args) for draw in (draw_bank, draw_order, draw_shared, draw_per_image)
    ],
}


def run_part(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Seconds and megabytes of one part, in this process."""
    torch.set_num_threads(1)
    small = argparse.Namespace(**{**vars(args), "n": 1 << 24, "world_size": 1 << 14, "rank": 0})
    small.batch = small.world_size
    PARTS[name](small)  # what is loaded at the first call
    before, started, used = anonymous_bytes(), time.perf_counter(), time.process_time()
    with Peak() as peak:
        result = PARTS[name](args)
        seconds, processor = time.perf_counter() - started, time.process_time() - used
    del result
    return {
        "seconds": seconds,
        "processor_seconds": processor,
        "mb": (peak.bytes - before) / 1e6,
        "mb_of_the_process": peak.bytes / 1e6,
    }


def ask_child(name: str, arguments: list[str]) -> dict[str, float]:
    """The same in a fresh process."""
    command = [sys.executable, __file__, *arguments, "--part", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Measures, prints a table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--n", type=int, help="images; default: 10^8, 2 * 10^7 with --quick")
    parser.add_argument("--world-size", type=int, default=64)
    parser.add_argument("--rank", type=int, default=37)
    parser.add_argument("--batch", type=int, default=2048, help="over all processes")
    parser.add_argument("--negatives", type=int, default=4096)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="fewer images")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/one_rank.json"))
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.n = args.n or (2 * 10**7 if args.quick else 10**8)
    if args.part:
        print(json.dumps(run_part(args.part, args)))
        return
    keys = ("n", "world_size", "rank", "batch", "negatives", "dim")
    report: dict[str, Any] = {"settings": {key: getattr(args, key) for key in keys}, "parts": {}}
    print(f"one of {args.world_size} processes, {args.n:,} images, {STEPS} steps of {args.batch}")
    print(f"{'':24}{'seconds':>9}{'processor':>11}{'MB':>8}{'MB of the process':>20}")
    for name in PARTS:
        found = ask_child(name, sys.argv[1:])
        report["parts"][name] = found
        print(
            f"{name:24}{found['seconds']:>9.3f}{found['processor_seconds']:>11.3f}"
            f"{found['mb']:>8.0f}{found['mb_of_the_process']:>20.0f}"
        )
    listed, computed = (report["parts"][name]["processor_seconds"] for name in list(PARTS)[:2])
    print(f"ratio of processor seconds, order computed over order listed: {computed / listed:.3f}")
    report["provenance"] = provenance()
    write_json(args.output, report)
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()

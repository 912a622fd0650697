"""How long a save holds up training: written at once, and written in the background.

python benchmarks/checkpoint.py [--quick]

The state is a bank as large as ImageNet's beside the weights and the momentum of a ResNet-50, on
the CPU. `at once` is the time of writing it to disk; `background` that of copying it, after which
training goes on; the first copy, which gets its memory from the system, is reported separately.
Files go to a temporary folder below --scratch, and are removed.
"""

import argparse
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instdisc.runs.background import BackgroundWriter
from instdisc.runs.checkpoint import copy_to_host, load_checkpoint, save_checkpoint
from instdisc.runs.folders import provenance, write_json

PARAMETERS = 23_770_304  # ResNet-50's trunk and its projection to 128 dimensions


def build_state(n: int, dim: int, parameters: int) -> dict[str, Tensor]:
    """Numbers that do not compress, of the sizes of a run."""
    draw = torch.Generator().manual_seed(0)
    sizes = {"model": (parameters,), "momentum": (parameters,), "bank": (n, dim)}
    return {name: torch.randn(size, generator=draw) for name, size in sizes.items()}


def measure(state: dict[str, Tensor], folder: Path, rounds: int) -> dict[str, Any]:
    """Seconds that training waits, by way; and those of the write in the background."""
    last = folder / "last.pt"
    found: dict[str, list[float]] = {"at once": [], "background": [], "until written": []}
    copied: dict[str, Tensor] = {}
    with BackgroundWriter() as writer:
        for _ in range(1 + rounds):  # the first copy has its memory yet to get
            started = time.perf_counter()
            save_checkpoint(last, "train", state, keep_previous=True)
            found["at once"].append(time.perf_counter() - started)
            started = time.perf_counter()
            copied = copy_to_host(state, copied)
            writer.start(partial(save_checkpoint, last, "train", copied, keep_previous=True))
            found["background"].append(time.perf_counter() - started)
            writer.wait()
            found["until written"].append(time.perf_counter() - started)
    assert torch.equal(load_checkpoint(last, "train")["bank"], state["bank"])
    first = {way: times.pop(0) for way, times in found.items()}
    medians = {way: statistics.median(times) for way, times in found.items()}
    ratios = [b / a for a, b in zip(found["at once"], found["background"], strict=True)]
    return {"seconds": medians, "ratio": statistics.median(ratios), "first": first, "rounds": found}


def main() -> None:
    """Measures, prints both and their ratio, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--n", type=int, help="rows of the bank; default: ImageNet's 1,281,167")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path, help="default: the system's temporary folder")
    parser.add_argument("--quick", action="store_true", help="a tenth of the size, one round")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/checkpoint.json"))
    args = parser.parse_args()
    small = 10 if args.quick else 1
    args.n = args.n or 1_281_167 // small
    state = build_state(args.n, args.dim, PARAMETERS // small)
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        report = measure(state, Path(scratch), 1 if args.quick else args.rounds)
    size = sum(tensor.nbytes for tensor in state.values()) / 1e6
    report["settings"] = {"n": args.n, "dim": args.dim, "megabytes": round(size)}
    seconds = report["seconds"]
    print(f"{size:,.0f} MB, bank of {args.n:,} rows: training waits")
    print(f"  at once     {seconds['at once']:7.3f} s")
    print(f"  background  {seconds['background']:7.3f} s   ratio {report['ratio']:.3f}")
    print(f"  the first   {report['first']['background']:7.3f} s   it gets its memory")
    report["provenance"] = provenance()
    write_json(args.output, report)
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()

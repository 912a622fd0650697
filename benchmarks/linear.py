"""Five linear probes against one feature-extraction pass, same images, same run.

python benchmarks/linear.py --data DIR [--weights NAME] [--size 224] [--num-images 2000]

Prints and writes as JSON the time of
    one pass of the frozen network over the images (pooled output only, nothing kept),
    all of the probes with stored features (pass, pooling, storing, choosing C, training), and
    the same streamed, per pass,
and their ratios to the first; in seconds of the clock, and in seconds of the processors, which
other work on the machine does not stretch. Without --data the embedded images are used.
"""

import argparse
import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from instdisc.features.extract import extract_features
from instdisc.images.subsets import choose_labeled
from instdisc.runs.folders import provenance, write_json
from transfer.probing.linear import LinearProbing
from transfer.probing.settings import LinearConfig
from transfer.task import open_task


class Stopwatch(LinearProbing):
    """Probes that also count the time of the processors."""

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.process_time()
        with super()._timed(part):
            yield
        self.cpu_seconds = {**getattr(self, "cpu_seconds", {}), part: time.process_time() - started}

    @property
    def cost(self) -> dict[str, float]:
        """Clock and processors until the probes are trained."""
        clock, processors = self.seconds, self.cpu_seconds
        return {
            "seconds": clock["features"] + clock["probes"],
            "cpu_seconds": processors["features"] + processors["probes"],
        }


@contextlib.contextmanager
def open_probing(args: argparse.Namespace, output: Path, **changes: Any) -> Iterator[Stopwatch]:
    """The probes of the command's defaults, on a part of the images."""
    config = LinearConfig(
        weights=args.weights,
        data=args.data,
        output=output,
        workers=args.workers,
        device=args.device,
        **changes,
    )
    with open_task("linear", config) as task:
        spec = dataclasses.replace(task.weights.spec, size=args.size or task.weights.spec.size)
        weights = dataclasses.replace(task.weights, spec=spec)
        probing = Stopwatch(dataclasses.replace(task, weights=weights), config)
        if args.num_images and args.num_images < len(probing.train):
            fraction = args.num_images / len(probing.train)
            probing.train = choose_labeled(probing.train, fraction, mode="balanced").images
            probing.val = choose_labeled(probing.val, fraction, mode="balanced").images
        yield probing


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds of every way, and their ratios."""
    with open_probing(args, folder / "stored") as probing:
        started, cpu_started = time.perf_counter(), time.process_time()
        extract_features(
            probing.task.weights.backbone,
            probing.train,
            probing.task.weights.spec,
            probing.process,
            batch_size=probing.config.batch_size,
            workers=args.workers,
        )
        once = {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time() - cpu_started,
        }
        rows = probing.run()
    with open_probing(args, folder / "streamed", cache="off", epochs=1) as streaming:
        streaming.run()
    cost = {"one_pass": once, "stored": probing.cost, "streamed": streaming.cost}
    return {
        "num_images": len(probing.train),
        "size": probing.task.weights.spec.size,
        "weights": args.weights,
        "threads": torch.get_num_threads(),
        "cost": cost,
        "ratio": {
            name: {clock: value[clock] / once[clock] for clock in once}
            for name, value in cost.items()
        },
        "top1": {row.details["stage"]: row.value for row in rows[::2]},
        "provenance": provenance(),
    }


def main() -> None:
    """Runs the comparison in a runs folder of its own, so that no feature is there before."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--data", default=None, help="as the commands take it")
    parser.add_argument("--weights", default="random:resnet18", help="as the commands take it")
    parser.add_argument("--size", type=int, default=None, help="image side; the network's if none")
    parser.add_argument("--num-images", type=int, default=None, help="training images; all if none")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--quick", action="store_true", help="200 images of 64 pixels")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/linear.json"))
    args = parser.parse_args()
    if args.quick:
        args.num_images, args.size = args.num_images or 200, args.size or 64
    if args.data is not None:
        args.data = str(Path(args.data).resolve())
    if Path(args.weights).exists():
        args.weights = str(Path(args.weights).resolve())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["INSTDISC_RUNS"] = folder
        report = run(args, Path(folder))
    write_json(args.output, report)
    print(f"{report['num_images']} images of {report['size']} pixels, {report['weights']}")
    print(f"{'':<10}{'seconds':>9}{'ratio':>7}{'processor seconds':>20}{'ratio':>7}")
    for name, cost in report["cost"].items():
        ratio = report["ratio"][name]
        clock = f"{cost['seconds']:>9.1f}{ratio['seconds']:>7.2f}"
        print(f"{name:<10}{clock}{cost['cpu_seconds']:>20.1f}{ratio['cpu_seconds']:>7.2f}")
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()

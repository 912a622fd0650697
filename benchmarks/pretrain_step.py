"""A whole pretraining step of ResNet-18, and what the objective and the bank take of it.

python benchmarks/pretrain_step.py [--quick] [--objectives nce-shared softmax ...]

The step is the trainer's own, timed by the clock that every run reports with. Beside each objective
stands the peers' way of it: rows gathered for each image with autograd's copies, or all logits of
the exact softmax at once. Images come from memory; their content does not matter.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instdisc.images.loading import BatchPlan, Samples, build_loader
from instdisc.images.sets import ImageSet
from instdisc.images.transforms import pretrain_transform
from instdisc.runs.folders import provenance, write_json
from instdisc.training import dist
from pretrain.bank import MemoryBank
from pretrain.config import PretrainConfig
from pretrain.session import Session
from pretrain.trainer import Trainer

OBJECTIVES: dict[str, dict[str, Any]] = {
    "nce-shared": {"objective": "nce", "negatives": "shared"},
    "nce-per-image": {"objective": "nce", "negatives": "per-image"},
    "softmax": {"objective": "softmax"},
}
PARTS = ("data", "forward", "objective", "backward", "optimizer", "bank")


class PeersBank(MemoryBank):
    """A bank with the obvious ways: autograd over copies of rows, or over all logits."""

    def log_normalizer(self, features: Tensor, temperature: float) -> Tensor:
        """All B x n logits."""
        return (features @ self.vectors.T / temperature).logsumexp(dim=1)

    def noise_logits(
        self, features: Tensor, noise: Tensor, temperature: float, *, shared: bool
    ) -> Tensor:
        """Rows for each image, also where the batch shares the noise, as peers do it."""
        noise = noise.expand(len(features), -1)
        rows = self.vectors.index_select(0, noise.reshape(-1)).view(*noise.shape, -1)
        return torch.bmm(rows, features[:, :, None]).squeeze(2) / temperature


def open_session(args: argparse.Namespace, objective: str, folder: Path) -> Session:
    """A run over images that take no memory: one of them, as often as asked for."""
    config = PretrainConfig(
        arch="resnet18",
        image_size=args.size,
        batch_size=args.batch,
        num_negatives=args.negatives,
        epochs=1,
        workers=0,
        output=folder,
        device="cpu",
        tensorboard=False,
        **OBJECTIVES[objective],
    )
    session = Session(config, dist.Process(0, 1, torch.device("cpu")))
    image = np.random.default_rng(0).integers(0, 256, (args.size, args.size, 3), dtype=np.uint8)
    names = np.array([str(i).encode() for i in range(args.n)])
    zeros = np.zeros(args.n, dtype=np.int64)
    pixels = np.broadcast_to(image, (args.n, *image.shape))
    session.train = ImageSet("one", "train", ("all",), names, zeros, zeros, pixels=pixels)
    return session


def measure(args: argparse.Namespace, objective: str, *, peers: bool) -> dict[str, Any]:
    """Seconds of a step, and the percentages of its parts."""
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(args, objective, Path(folder))
        config = session.config
        trainer = Trainer(session)
        if peers:
            dim, momentum = config.embedding_dim, config.bank_momentum
            trainer.bank = PeersBank(args.n, dim, momentum=momentum, seed=config.seed)
        transform = pretrain_transform(session.spec)
        samples = Samples(session.train, transform, session.spec, config.seed)
        plan = BatchPlan(args.n, args.batch, config.seed, num_steps=args.steps + 1)
        batches = iter(build_loader(samples, plan, workers=0))
        trainer.model.train()
        trainer.train_step(batches)  # not timed: allocates
        before, seconds = dict(trainer.clock.totals), []
        for _ in range(args.steps):
            started = time.perf_counter()
            trainer.train_step(batches)
            seconds.append(time.perf_counter() - started)
        shares = trainer.clock.shares(before)
    return {
        "seconds": statistics.median(seconds),
        "shares": shares,
        "objective_and_bank": shares["objective"] + shares["bank"],
    }


def draw_plot(report: dict[str, Any], target: Path) -> None:
    """Stacked bars: seconds of each part."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = report["steps"]
    figure, axis = pyplot.subplots(figsize=(8, 0.6 * len(rows) + 1.4))
    left = np.zeros(len(rows))
    for part in PARTS:
        spent = np.array([row["seconds"] * row["shares"][part] / 100 for row in rows.values()])
        axis.barh(list(rows), spent, left=left, label=part)
        left += spent
    axis.set(xlabel="seconds a step")
    axis.invert_yaxis()
    axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(target, dpi=120)


def main() -> None:
    """Measures, prints the table, writes JSON and a plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--n", type=int, default=50_000, help="training images")
    parser.add_argument("--batch", type=int, default=None, help="default: 256; 64 with --quick")
    parser.add_argument("--negatives", type=int, default=4096)
    parser.add_argument("--size", type=int, default=64, help="of the images, in pixels")
    parser.add_argument("--steps", type=int, default=None, help="default: 3; 1 with --quick")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--objectives", nargs="+", default=list(OBJECTIVES), choices=OBJECTIVES)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/pretrain_step.json")
    )
    args = parser.parse_args()
    args.batch = args.batch or (64 if args.quick else 256)
    args.steps = args.steps or (1 if args.quick else 3)
    torch.set_num_threads(args.threads)
    keys = ("n", "batch", "negatives", "size", "steps", "threads")
    report: dict[str, Any] = {"settings": {key: getattr(args, key) for key in keys}, "steps": {}}
    print(f"ResNet-18, {args.size} px, B = {args.batch}, n = {args.n:,}, m = {args.negatives}")
    print(f"{'':22}{'s a step':>9}" + "".join(f"{part:>11}" for part in PARTS))
    for objective in args.objectives:
        for peers in (False, True):
            row = measure(args, objective, peers=peers)
            name = f"{objective}, {'peers' if peers else 'ours'}"
            report["steps"][name] = row
            shares = "".join(f"{row['shares'][part]:>10.1f}%" for part in PARTS)
            print(f"{name:22}{row['seconds']:9.2f}{shares}", flush=True)
    report["provenance"] = provenance()
    write_json(args.output, report)
    draw_plot(report, args.output.with_suffix(".png"))
    print(f"written to {args.output} and .png")


if __name__ == "__main__":
    main()

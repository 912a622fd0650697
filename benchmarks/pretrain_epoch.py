"""Pretraining beside the authors' way: a step of the network, and an epoch with views and noise.

python benchmarks/pretrain_epoch.py [--quick] [--data DIR] [--parts steps epoch] [--amp off bf16]

`steps` trains a network on the same batch again and again: a plain torch loop (contiguous memory,
default SGD) beside ours (channels last, fused SGD, gradients of small maps as products, memory
kept). `epoch` runs over CIFAR-10 with a batch's views, network, NCE, update: the authors' way
(torchvision's views, noise gathered for each image, plain loop) beside the trainer's own step with
noise per image and shared. All on one thread, without loader processes; ways take turns, in rounds
of some steps. A ratio is the median over rounds, of the processor's times and of the clock's.

Each way is a process of its own, since memory that is kept stays kept. Without --data the images
are noise of CIFAR-10's size and number, which cost the same.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from instdisc.images.archives import read as read_archive
from instdisc.images.loading import BatchPlan, Samples, build_loader
from instdisc.images.sets import ImageSet
from instdisc.images.transforms import InputSpec, pretrain_transform
from instdisc.networks.backbones import Embedding, build_backbone
from instdisc.runs.folders import provenance, write_json
from instdisc.training import dist
from instdisc.training.amp import autocast
from instdisc.training.cpu import build_sgd, keep_memory
from instdisc.training.loop import prepare_device
from pretrain.config import PretrainConfig
from pretrain.session import Session
from pretrain.trainer import Trainer

CPU = torch.device("cpu")
NETWORKS = {"resnet18": 128, "resnet50": 32}  # images a step, at 32 pixels
NEGATIVES, TEMPERATURE, N = 4096, 0.1, 50_000
Step = Callable[[], object]


def cifar(folder: Path | None) -> ImageSet:
    """The training images of CIFAR-10, or as many of noise."""
    if folder is not None:
        pixels = read_archive("cifar10", folder, "train")[2]
    else:
        shape = (N, 32, 32, 3)
        pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    names = np.array([str(i).encode() for i in range(len(pixels))])
    zeros = np.zeros(len(pixels), dtype=np.int64)
    return ImageSet("cifar10", "train", ("all",), names, zeros, zeros, pixels=pixels)


def network_step(arch: str, way: str, amp: str) -> Step:
    """A step on one batch: forward, backward, SGD."""
    torch.manual_seed(0)
    model = Embedding(build_backbone(arch), 128).train()
    images = torch.randn(NETWORKS[arch], 3, 32, 32)
    ours = way == "ours"
    if ours:
        model = model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
        prepare_device(model, CPU)
        keep_memory(CPU)
    settings = {"lr": 0.03, "momentum": 0.9, "weight_decay": 5e-4}
    optimizer = (
        build_sgd(model.parameters(), CPU, **settings)
        if ours
        else torch.optim.SGD(model.parameters(), **settings)  # type: ignore[arg-type]
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with autocast(CPU, amp):
            features = model(images)
        (features.float() @ features.float().T).mean().backward()
        optimizer.step()

    return step


def authors_step(images: ImageSet, batch: int) -> Step:
    """Views, network, NCE and update as the authors' code has them, in a plain loop."""
    from input_pipeline import plain_transform  # beside this file

    torch.manual_seed(0)
    model = Embedding(build_backbone("resnet18"), 128).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=5e-4)
    n = len(images)
    bank = nn.functional.normalize(torch.randn(n, 128), dim=1)
    spec = InputSpec(size=32)
    loader = iter(
        build_loader(
            Samples(images, plain_transform(spec), spec, seed=0),
            BatchPlan(n, batch, 0, num_steps=10**6),
            workers=0,
        )
    )
    scale: list[float] = []

    def step() -> None:
        pixels, indices, _ = next(loader)
        features = model(pixels)
        chosen = torch.cat([indices[:, None], torch.randint(n, (batch, NEGATIVES))], dim=1)
        rows = bank.index_select(0, chosen.view(-1)).view(batch, NEGATIVES + 1, 128)
        scores = torch.exp(torch.bmm(rows, features[:, :, None]).squeeze(2) / TEMPERATURE)
        if not scale:
            scale.append(float(scores.detach().mean()) * n)
        p, noise = scores / scale[0], NEGATIVES / n
        loss = -(p[:, 0] / (p[:, 0] + noise)).log() - (noise / (p[:, 1:] + noise)).log().sum(1)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        with torch.no_grad():
            blended = 0.5 * bank[indices] + 0.5 * features
            bank[indices] = nn.functional.normalize(blended, dim=1)

    return step


def trainers_step(images: ImageSet, batch: int, negatives: str, amp: str, folder: Path) -> Step:
    """The trainer's own step."""
    config = PretrainConfig(
        arch="resnet18",
        image_size=32,
        batch_size=batch,
        num_negatives=NEGATIVES,
        negatives=negatives,  # type: ignore[arg-type]  # one of two words
        temperature=TEMPERATURE,
        weight_decay=5e-4,
        amp=amp,  # type: ignore[arg-type]  # one of three words
        epochs=1,
        workers=0,
        output=folder,
        device="cpu",
        tensorboard=False,
    )
    session = Session(config, dist.Process(0, 1, CPU))
    session.train = images
    trainer = Trainer(session)
    samples = Samples(images, pretrain_transform(session.spec), session.spec, config.seed)
    plan = BatchPlan(len(images), batch, config.seed, num_steps=10**6)
    batches = iter(build_loader(samples, plan, workers=0))
    keep_memory(CPU)
    trainer.model.train()
    return lambda: trainer.train_step(batches)


def build_step(case: str, data: Path | None, scratch: Path) -> tuple[Step, int]:
    """The step that a case names, and its images."""
    part, way, amp = case.split("/")
    if part in NETWORKS:
        return network_step(part, way, amp), NETWORKS[part]
    batch = NETWORKS["resnet18"]
    images = cifar(data)
    if way == "authors":
        return authors_step(images, batch), batch
    return trainers_step(images, batch, way, amp, scratch), batch


def serve(case: str, data: Path | None) -> None:
    """A process of one case: for each number that it reads, so many steps and their times."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        step, batch = build_step(case, data, Path(scratch))
        for line in sys.stdin:
            before, clock = os.times(), time.perf_counter()
            for _ in range(int(line)):
                step()
            after = os.times()
            row = {
                "images": int(line) * batch,
                "clock": time.perf_counter() - clock,
                "system": after.system - before.system,
                "processor": after.user - before.user + after.system - before.system,
            }
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()


class Served:
    """A case in a process of its own."""

    def __init__(self, case: str, data: Path | None) -> None:
        command = [sys.executable, __file__, "--serve", case]
        command += ["--data", str(data)] if data else []
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.rows: list[dict[str, float]] = []

    def run(self, steps: int, *, counted: bool = True) -> None:
        """Lets it do some steps."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        row = json.loads(self.process.stdout.readline())
        self.rows += [row] if counted else []

    def seconds(self, kind: str) -> list[float]:
        """Of an image, by rounds."""
        return [row[kind] / row["images"] for row in self.rows]


def compare(cases: list[str], args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each case; ratios are to the first."""
    served = [Served(case, args.data) for case in cases]
    try:
        for each in served:
            each.run(2, counted=False)  # allocates
        for _ in range(args.rounds):
            for each in served:
                each.run(args.steps)
    finally:
        for each in served:
            each.process.kill()
            each.process.wait()
    rows = []
    for each, case in zip(served, cases, strict=True):
        part, way, amp = case.split("/")
        row: dict[str, Any] = {"part": part, "way": way, "amp": amp}
        for kind in ("processor", "clock"):
            ours, first = each.seconds(kind), served[0].seconds(kind)
            ratios = [a / b for a, b in zip(first, ours, strict=True)]
            row[f"{kind}_ratio"] = round(statistics.median(ratios), 3)
            row[f"{kind}_images_per_second"] = round(1 / statistics.median(ours), 1)
        total = sum(each.seconds("processor"))
        row["system_percent"] = round(100 * sum(each.seconds("system")) / total, 2)
        rows.append(row)
        print(
            f"{part:10}{way:12}{amp:6}{row['processor_images_per_second']:9.1f}"
            f"{row['processor_ratio']:7.2f}{row['clock_images_per_second']:9.1f}"
            f"{row['clock_ratio']:7.2f}{row['system_percent']:9.2f}%",
            flush=True,
        )
    return rows


def main() -> None:
    """Measures, prints the table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, help="folder of CIFAR-10's official files")
    parser.add_argument("--parts", nargs="+", default=["steps", "epoch"])
    parser.add_argument("--amp", nargs="+", default=["off", "bf16"], choices=["off", "bf16"])
    parser.add_argument("--rounds", type=int, default=None, help="default: 7; 2 with --quick")
    parser.add_argument("--steps", type=int, default=None, help="of a round; default: 4; or 1")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--serve", metavar="CASE", help="used by itself")
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/pretrain_epoch.json")
    )
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.data)
        return
    args.rounds = args.rounds or (2 if args.quick else 7)
    args.steps = args.steps or (1 if args.quick else 4)
    print(f"{'':28}{'images/s':>9}{'ratio':>7}{'clock':>9}{'ratio':>7}{'system':>10}")
    rows = []
    if "steps" in args.parts:
        for arch in NETWORKS:
            rows += compare([f"{arch}/plain/off", *(f"{arch}/ours/{a}" for a in args.amp)], args)
    if "epoch" in args.parts:
        ours = [f"epoch/{way}/{amp}" for amp in args.amp for way in ("per-image", "shared")]
        rows += compare(["epoch/authors/off", *ours], args)
    settings = {"rounds": args.rounds, "steps": args.steps, "negatives": NEGATIVES, "n": N}
    report = {"settings": settings, "rows": rows, "provenance": provenance()}
    write_json(args.output, report)
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()

"""Extraction, kNN and linear SVM of a network: the commands beside a plain script.

python benchmarks/readouts.py [--quick] [--data DIR] [--arch resnet18] [--size 64]

The plain script is what one writes in half an hour: ImageFolder, torchvision's transforms and the
default loader; the network in a loop; for kNN one product of all queries with all rows and topk;
for the SVM scikit-learn's StandardScaler and LinearSVC, C chosen on a tenth of the images. Ours is
transfer/knn.py and transfer/linear.py from images to result rows, features stored on disk on the
way. Both use the learned feature of the same network with random weights, k = 200, tau = 0.07, the
same values of C, one process, no loader processes; they take turns, and ours starts each round
without stored features. A ratio is the median over rounds, of the processor's times and of the
clock's. Without --data the embedded images are used.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from instdisc.images import demo
from instdisc.images.transforms import InputSpec
from instdisc.networks.backbones import backbone_payload
from instdisc.networks.weights import open_weights
from instdisc.runs.checkpoint import save_checkpoint
from instdisc.runs.folders import provenance, write_json
from transfer.nearest.knn import run_knn
from transfer.nearest.settings import PAPER_NUM_NEIGHBORS, KnnConfig
from transfer.probing.linear import run_linear
from transfer.probing.settings import LinearConfig

BATCH = 256


def plain_features(model: torch.nn.Module, folder: Path, size: int) -> tuple[Tensor, np.ndarray]:
    """The features of a split in a plain loop, and the labels."""
    spec = InputSpec(size=size)
    steps = [
        v2.Resize(round(size / spec.crop_ratio), antialias=True),
        v2.CenterCrop(size),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(mean=list(spec.mean), std=list(spec.std)),
    ]
    images = ImageFolder(folder, v2.Compose(steps))
    with torch.no_grad():
        rows = [model(pixels) for pixels, _ in DataLoader(images, batch_size=BATCH)]
    return torch.cat(rows), np.array(images.targets)


def run_plain(weights: Path, data: Path, size: int) -> dict[str, float]:
    """Top-1 of both readouts, in percent."""
    model = open_weights(weights).embedding
    assert model is not None
    train, labels = plain_features(model, data / "train", size)
    val, truth = plain_features(model, data / "val", size)
    k, classes = min(PAPER_NUM_NEIGHBORS, len(train)), torch.from_numpy(labels)
    similarities, nearest = (val @ train.T).topk(k)
    votes = torch.zeros(len(val), int(classes.max()) + 1)
    votes.scatter_add_(1, classes[nearest], (similarities / 0.07).exp())
    costs = LinearConfig().cost
    fitted, held = train_test_split(
        np.arange(len(labels)), test_size=LinearConfig().held_out, stratify=labels, random_state=0
    )
    rows = train.numpy()

    def fit(cost: float, chosen: np.ndarray) -> Any:
        svm = make_pipeline(StandardScaler(), LinearSVC(C=cost, random_state=0))
        return svm.fit(rows[chosen], labels[chosen])

    best = max(costs, key=lambda cost: fit(cost, fitted).score(rows[held], labels[held]))
    svm = fit(best, np.arange(len(labels)))
    knn = float(np.mean(votes.argmax(1).numpy() == truth))
    return {"knn": 100 * knn, "linear": 100 * svm.score(val.numpy(), truth)}


def run_ours(weights: Path, data: Path, _: int) -> dict[str, float]:
    """The same numbers by the commands, in a runs folder without stored features."""
    with tempfile.TemporaryDirectory() as runs:
        os.environ["INSTDISC_RUNS"] = runs
        common: dict[str, Any] = {
            "weights": str(weights),
            "data": str(data),
            "workers": 0,
            "device": "cpu",
            "threads": torch.get_num_threads(),
        }
        (score,) = run_knn(KnnConfig(**common))
        rows = run_linear(LinearConfig(stage=("embedding",), **common))
        return {"knn": score.top[1], "linear": rows[0].value}


def measure(weights: Path, data: Path, size: int, rounds: int) -> dict[str, Any]:
    """Both ways in turn: seconds of the processor and of the clock, accuracies, ratios."""
    ways: dict[str, Callable[[Path, Path, int], dict[str, float]]]
    ways = {"plain": run_plain, "ours": run_ours}
    clocks = {"processor": time.process_time, "clock": time.perf_counter}
    spent: dict[str, dict[str, list[float]]]
    spent = {name: {clock: [] for clock in clocks} for name in ways}
    top1: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            started = {clock: read() for clock, read in clocks.items()}
            top1[name] = way(weights, data, size)
            for clock, read in clocks.items():
                spent[name][clock].append(read() - started[clock])
    ratios = {
        clock: statistics.median(
            a / b for a, b in zip(spent["plain"][clock], spent["ours"][clock], strict=True)
        )
        for clock in clocks
    }
    return {"seconds": spent, "ratio": ratios, "top1": top1}


def link_part(data: Path, target: Path, per_class: int) -> Path:
    """A folder of links to the first images of each class."""
    for folder in sorted(data.glob("*/*/")):
        chosen = target / folder.parent.name / folder.name
        chosen.mkdir(parents=True)
        for file in sorted(folder.iterdir())[:per_class]:
            (chosen / file.name).symlink_to(file)
    return target


def main() -> None:
    """Measures, prints the table, writes JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, help="folder with train/ and val/ of class folders")
    parser.add_argument("--arch", default="resnet18")
    parser.add_argument("--size", type=int, default=64, help="image side")
    parser.add_argument("--rounds", type=int, default=None, help="default: 3; 1 with --quick")
    parser.add_argument("--threads", type=int, default=1, help="of either way")
    parser.add_argument("--quick", action="store_true", help="20 images a class")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/readouts.json"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = args.data.resolve() if args.data else demo.write_classification(folder / "demo")
        if args.quick:
            data = link_part(data, folder / "part", 20)
        weights, model = folder / "random.pt", open_weights(f"random:{args.arch}").embedding
        assert model is not None
        facts = {"input": InputSpec(size=args.size).to_dict(), "pretraining": {}}
        save_checkpoint(weights, "backbone", {**backbone_payload(model), **facts})
        count = {split: sum(1 for _ in data.glob(f"{split}/*/*")) for split in ("train", "val")}
        report = measure(weights, data, args.size, args.rounds or (1 if args.quick else 3))
    report |= {"arch": args.arch, "size": args.size, "threads": args.threads, "images": count}
    report["provenance"] = provenance()
    write_json(args.output, report)
    print(f"{count['train']} training and {count['val']} validation images, {args.size} pixels")
    print(f"{'':8}{'processor s':>12}{'clock s':>9}{'kNN':>7}{'linear':>8}")
    for name, spent in report["seconds"].items():
        seconds = [statistics.median(spent[clock]) for clock in ("processor", "clock")]
        top1 = report["top1"][name]
        print(f"{name:8}{seconds[0]:12.2f}{seconds[1]:9.2f}{top1['knn']:7.1f}{top1['linear']:8.1f}")
    ratio = report["ratio"]
    print(f"ratio   {ratio['processor']:12.2f}{ratio['clock']:9.2f}")
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()

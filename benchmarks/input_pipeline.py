"""Augmented images per second and core: ours against the plain torchvision pipeline.

python benchmarks/input_pipeline.py [--quick] [--data DIR]

The plain pipeline decodes a file with ImageFolder's loader (Pillow), applies torchvision's
v2 RandomResizedCrop, RandomGrayscale, ColorJitter, RandomHorizontalFlip, ToImage, ToDtype,
Normalize, and collates by default; ours is what training uses. Both come in batches from a loader
without worker processes, on one thread, from the same files (in the page cache after a first pass),
in turn, several rounds. Times are those of the processor, which other work on the machine
stretches; it stretches both, and a ratio is the median over rounds.

Photographs are those of --data, else of the VOC2007 sample beside the checkout, else the embedded
images, enlarged and written as JPEG of 500x375; the report says which.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

from instdisc.images import demo
from instdisc.images.loading import EpochOrder, Samples, build_loader
from instdisc.images.sets import ImageSet
from instdisc.images.transforms import InputSpec, Transform, pretrain_transform
from instdisc.runs.folders import provenance, write_json

VOC = Path(__file__).resolve().parents[2] / "shared" / "data" / "voc2007-mini"
BATCH = 64


def plain_transform(spec: InputSpec) -> Transform:
    """The same augmentation, by torchvision."""
    steps = [
        v2.RandomResizedCrop(spec.size, scale=(0.2, 1.0), antialias=True),
        v2.RandomGrayscale(p=0.2),
        v2.ColorJitter(0.4, 0.4, 0.4, 0.4),
        v2.RandomHorizontalFlip(),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(mean=list(spec.mean), std=list(spec.std)),
    ]
    return v2.Compose(steps)


def image_set(files: list[Path]) -> ImageSet:
    """Files as a data set."""
    names = np.array([str(file).encode() for file in files])
    zeros = np.zeros(len(files), dtype=np.int64)
    return ImageSet("photographs", "train", ("all",), names, zeros, zeros, root=Path("/"))


def find_photographs(folder: Path | None, scratch: Path, count: int) -> tuple[ImageSet, str]:
    """Up to `count` JPEG files, and what they are."""
    chosen = folder or (VOC if VOC.is_dir() else None)
    if chosen is not None:
        found = [f for f in sorted(chosen.rglob("*")) if f.suffix.lower() in (".jpg", ".jpeg")]
        if found:
            files = [file.resolve() for file in found[:: max(1, len(found) // count)][:count]]
            with_sizes = [Image.open(file).size for file in files]
            width, height = np.mean(with_sizes, axis=0)
            kind = "photographs of --data" if folder else "VOC2007 photographs"
            return image_set(files), f"{kind}, {width:.0f}x{height:.0f} on average"
    root = demo.write_classification(scratch / "demo")
    files = []
    for file in sorted(root.rglob("*.png"))[:count] or sorted(root.rglob("*.jpg"))[:count]:
        target = scratch / f"{len(files)}.jpg"
        with Image.open(file) as image:
            large = image.convert("RGB").resize((500, 375), Image.Resampling.BICUBIC)
        large.save(target, quality=90)
        files.append(target)
    return image_set(files), "embedded images, enlarged to 500x375"


def small_images(count: int) -> ImageSet:
    """An archive of 32-pixel images in memory, as CIFAR is; their content costs nothing."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    names = np.array([str(i).encode() for i in range(count)])
    zeros = np.zeros(count, dtype=np.int64)
    return ImageSet("small", "train", ("all",), names, zeros, zeros, pixels=pixels)


class Plain(Dataset[tuple[Tensor, int]]):
    """Images as ImageFolder and torchvision's CIFAR10 read them."""

    def __init__(self, images: ImageSet, transform: Transform) -> None:
        self.images, self.transform = images, transform

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.images.pixels is not None:
            image = Image.fromarray(self.images.pixels[index])
        else:
            image = default_loader(self.images.name(index))
        return self.transform(image), int(self.images.labels[index])


def compare(images: ImageSet, size: int, rounds: int) -> dict[str, Any]:
    """Images per second of both, and how many times faster ours is."""
    spec = InputSpec(size=size)
    plain = Plain(images, plain_transform(spec))
    ours = Samples(images, pretrain_transform(spec), spec, seed=0)
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    for epoch in range(rounds + 1):  # the first is not counted: it fills the page cache
        order = EpochOrder(len(images), 0, epoch).images_at(range(len(images)))
        batches = [order[first : first + BATCH] for first in range(0, len(order), BATCH)]
        keys = [[(epoch, index) for index in batch] for batch in batches]
        loaders: dict[str, DataLoader[Any]] = {
            "plain": DataLoader(plain, batch_sampler=batches),
            "ours": build_loader(ours, keys, workers=0),
        }
        for name, loader in loaders.items():
            started = time.process_time()
            count = sum(len(batch[1]) for batch in loader)
            if epoch:
                seconds[name].append((time.process_time() - started) / count)
    ratios = [a / b for a, b in zip(seconds["plain"], seconds["ours"], strict=True)]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "size": size,
        "images_per_second": {name: 1 / value for name, value in medians.items()},
        "ms_per_image": {name: 1e3 * value for name, value in medians.items()},
        "ratio": statistics.median(ratios),
        "rounds": seconds,
    }


def draw_plot(report: dict[str, Any], target: Path) -> None:
    """Bars of milliseconds an image."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = report["cases"]
    places = np.arange(len(cases))
    figure, axis = pyplot.subplots(figsize=(6.5, 3.6))
    for shift, name in ((-0.2, "plain"), (0.2, "ours")):
        axis.bar(places + shift, [c["ms_per_image"][name] for c in cases.values()], 0.4, label=name)
    axis.set_xticks(places, list(cases))
    axis.set(ylabel="ms an image, one core", title="Input pipeline")
    axis.legend()
    figure.tight_layout()
    figure.savefig(target, dpi=120)


def main() -> None:
    """Measures, prints the table, writes JSON and a plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, help="folder with JPEG photographs")
    parser.add_argument("--num-images", type=int, default=None, help="default: 200; 40 if quick")
    parser.add_argument("--rounds", type=int, default=None, help="default: 5; 2 with --quick")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--output", type=Path, default=Path("benchmarks/results/input_pipeline.json")
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    count = args.num_images or (40 if args.quick else 200)
    rounds = args.rounds or (2 if args.quick else 5)
    with tempfile.TemporaryDirectory() as scratch:
        photographs, described = find_photographs(args.data, Path(scratch), count)
        cases = {
            "224 px, photographs": compare(photographs, 224, rounds),
            "64 px, photographs": compare(photographs, 64, rounds),
            "32 px, in memory": compare(small_images(5 * count), 32, rounds),
        }
    report = {"photographs": described, "num_images": len(photographs), "cases": cases}
    report["provenance"] = provenance()
    write_json(args.output, report)
    draw_plot(report, args.output.with_suffix(".png"))
    print(f"{len(photographs)} {described}; images a second and core")
    print(f"{'':24}{'plain':>8}{'ours':>8}{'ratio':>8}")
    for name, case in cases.items():
        rate = case["images_per_second"]
        print(f"{name:24}{rate['plain']:8.0f}{rate['ours']:8.0f}{case['ratio']:8.2f}")
    print(f"written to {args.output} and .png")


if __name__ == "__main__":
    main()

"""PretrainConfig: the paper's numbers as defaults, and recipes for other data. Imports no torch."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from instdisc.cli import CommandConfig, option
from instdisc.errors import UserError
from instdisc.images.locations import locate_data
from instdisc.names import ARCH_CHOICES, TIMM, Stem

ObjectiveName = Literal["parametric", "softmax", "nce", "sampled-softmax"]

# One kind of option per heading of --help.
_model = functools.partial(option, group="model")
_data = functools.partial(option, group="data (with none named, the embedded demo images are used)")
_loss = functools.partial(option, group="objective and memory bank (paper, section 3)")
_optim = functools.partial(option, group="optimisation (paper, section 4.2)")
_run = functools.partial(option, group="run", volatile=True)

# What differs from the paper's ImageNet numbers, by kind of data. Flags win over these.
RECIPES: dict[str, dict[str, Any]] = {
    "imagenet": {},
    # The authors' code for CIFAR-10.
    "cifar": {
        "stem": "small",
        "image_size": 32,
        "crop_ratio": 1.0,
        "flip": False,
        "temperature": 0.1,
        "batch_size": 128,
        "weight_decay": 5e-4,
    },
    # Minutes on two cores. Chosen by experiment: docs/protocols.md, "The demo recipe".
    "demo": {
        "image_size": 32,
        "crop_ratio": 1.0,
        "objective": "softmax",
        "temperature": 0.1,
        "batch_size": 32,
        "lr": 0.01,
        "epochs": 6,
        "lr_milestones": (),
        "warmup_epochs": 2.0,
        "monitor_every": 4,
        "workers": 0,
    },
}
# Networks differ in cost and in the smallest image that they take.
DEMO_OF_ARCH: dict[str, dict[str, Any]] = {
    "alexnet": {"image_size": 64},
    "vgg16": {"epochs": 2},
    "resnet18": {"epochs": 12},
    # Without standardisation its features drift together. Larger batches and crops: more epochs in
    # the same minutes, and an easier task, for the loss to pass guessing in them.
    "resnet50": {
        "epochs": 12,
        "standardize_projection": True,
        "min_crop_scale": 0.5,
        "batch_size": 64,
        "lr": 0.02,
    },
}
# For any network of timm's: most end in a map of 1/32 of the image, and transformers want adamw.
DEMO_OF_TIMM: dict[str, Any] = {"image_size": 64, "optimizer": "adamw", "lr": 0.001}
RECIPE_OF_KIND = {
    "folder": "imagenet",
    "list": "imagenet",
    "tar": "imagenet",
    "cifar10": "cifar",
    "cifar100": "cifar",
    "fashion-mnist": "cifar",
    "demo": "demo",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig(CommandConfig):
    """One pretraining run."""

    PROG = "pretrain/run.py"
    DESCRIPTION = """
    Trains a backbone so that every image is recognised as itself among all others
    (Wu, Xiong, Yu, Lin: Unsupervised Feature Learning via Non-Parametric Instance
    Discrimination, CVPR 2018). Defaults are the paper's for ImageNet; CIFAR and
    Fashion-MNIST get the authors' CIFAR recipe; with no data named, the embedded
    demo images and a recipe of minutes are used.
    """
    EPILOG = """
    examples:
      python pretrain/run.py --arch resnet50                        demo images, minutes on a laptop
      python pretrain/run.py -a resnet50 --data /data/imagenet      the paper's run
      python pretrain/run.py -a resnet18 --data cifar-10-batches-bin --objective softmax
      python pretrain/run.py -a timm:convnext_tiny --data /data/imagenet --optimizer adamw
      torchrun --nproc-per-node 8 pretrain/run.py --data /data/imagenet --amp bf16
    The same command again goes on where a stopped run was. A run folder holds
    config.json, log.txt, metrics.jsonl, last.pt (to go on), backbone.pt (the result).
    """

    arch: str = _model(
        "resnet50",
        "backbone; the paper reports four; timm:NAME is any of timm's, from random weights",
        aliases=["-a"],
        choices=ARCH_CHOICES,
    )
    stem: Stem = _model("imagenet", "first layers: for 224 pixels, or 3x3 without pooling for 32")
    embedding_dim: int = _model(
        128,
        "size of the L2-normalised output; 128 is the paper's trade-off",
        aliases=["--low-dim"],
    )
    standardize_projection: bool = _model(
        False,
        "standardise each dimension of the projection over the batch, before the L2 norm: features "
        "cannot drift all together, so that runs of few steps learn sooner; not in the paper",
    )

    data: str | None = _data(
        None,
        "ImageFolder tree (<data>/train/<class>/<image>, and val/ for the kNN monitor), any "
        "folder of images, a list of them (.txt, .csv), tar archives, or the folder of CIFAR's or "
        "Fashion-MNIST's official files; else $INSTDISC_DATA; else the embedded images",
        metavar="PATH",
        volatile=True,
    )
    recipe: Literal["imagenet", "cifar", "demo"] | None = _data(
        None, "defaults for a kind of data; found from the data if not given"
    )
    train_fraction: float = _data(
        1.0, "random part of the training images (paper, section 4.2: 0.001 to 1)"
    )
    image_size: int = _data(224, "side of the training crop")
    crop_ratio: float = _data(
        0.875, "centre crop over resized short side in evaluation: 224 of 256"
    )
    min_crop_scale: float = _data(0.2, "smallest area of a random crop (authors' code)")
    flip: bool = _data(True, "random horizontal flips")
    skip_bad_images: bool = _data(
        False, "record unreadable images in bad_images.txt and go on without them"
    )
    workers: int = _data(
        4,
        "loader processes; results do not depend on it",
        aliases=["-j"],
        volatile=True,
    )

    objective: ObjectiveName = _loss(
        "nce",
        "nce is the paper's; softmax is exact over all images, streamed; parametric is the "
        "baseline with learned class weights; sampled-softmax is the authors' later update",
    )
    temperature: float = _loss(0.07, "tau, concentration of the softmax", aliases=["--nce-t"])
    num_negatives: int = _loss(
        4096,
        "m, noise samples per image for nce and sampled-softmax",
        aliases=["--nce-k"],
    )
    negatives: Literal["per-image", "shared"] = _loss(
        "per-image",
        "draw noise for each image (authors' code), or one set per batch: one "
        "matrix product, much faster",
    )
    normalizer: str = _loss(
        "first-batches:1",
        "Z of nce: first-batches:N (Monte Carlo over the first N batches, then "
        "constant), ema (0.99), fixed:VALUE, or exact (every step, over all images)",
        metavar="MODE",
    )
    proximal_weight: float = _loss(
        0.0,
        "lambda of the proximal term ||f - v||^2 that slows drift between visits; the paper gives "
        "no value and the authors' code has no such term",
    )
    bank_momentum: float = _loss(
        0.5,
        "weight of the old row in a bank update: 0.5 blends (authors' code); 0 replaces the row "
        "(paper's text), and nce with a constant Z then runs away (docs/protocols.md)",
        aliases=["--nce-m"],
    )
    bank_placement: Literal["replicated", "sharded", "cpu"] = _loss(
        "replicated",
        "where bank rows lie: all on every process, n/W on each of W, or in host memory beside "
        "a GPU; changes results by rounding only (docs/performance.md)",
        volatile=True,
    )
    bank_dtype: Literal["float32", "float16"] = _loss(
        "float32", "how bank rows are stored; sums over them are always float32"
    )

    epochs: int = _optim(200, "passes over the images", volatile=True)
    batch_size: int = _optim(256, "images per step, over all processes", aliases=["-b"])
    lr: float = _optim(0.03, "learning rate for this batch size")
    lr_milestones: tuple[int, ...] = _optim(
        (120, 160), "epochs at which the learning rate is divided by ten"
    )
    warmup_epochs: float = _optim(
        0.0, "epochs over which the learning rate rises from zero; the paper has none"
    )
    optimizer: Literal["sgd", "adamw"] = _optim(
        "sgd", "sgd is the paper's; adamw learns faster in few steps, and suits transformers"
    )
    momentum: float = _optim(0.9, "of sgd")
    weight_decay: float = _optim(1e-4, "of the optimizer", aliases=["--wd"])
    accumulate: int = _optim(
        1, "micro-batches per step, for little memory; batch norm sees one at a time"
    )
    amp: Literal["off", "bf16", "fp16"] = _optim(
        "off", "autocast of the network; the objective is always float32"
    )
    channels_last: bool = _optim(True, "memory layout of images and weights")

    output: Path | None = _run(
        None,
        "run folder; runs/pretrain/<arch> if not given",
        metavar="DIR",
    )
    resume: str = _run(
        "auto",
        "auto goes on from the run folder's last.pt if there is one; never refuses "
        "to; or a checkpoint file",
        metavar="HOW",
    )
    overwrite: bool = _run(False, "delete the run in the run folder and start again")
    seed: int = _run(0, "of weights, bank, order, augmentation and noise", volatile=False)
    device: Literal["auto", "cpu", "cuda"] = _run("auto", "where to compute")
    threads: int | None = _run(
        None,
        "threads of this process on a CPU; one for each core if not given, which is slow for small "
        "images: two runs of one thread train twice as much as one of two (docs/performance.md)",
    )
    monitor_every: int = _run(
        5,
        "epochs between measurements of the features, the first before training: kNN accuracy on "
        "val/ (bank and recomputed features; the vote's tau is --temperature), RankMe; 0 for none",
    )
    num_neighbors: int = _run(200, "k of the kNN monitor")
    log_every: int = _run(10, "steps between rows of metrics.jsonl")
    save_minutes: float = _run(
        10.0,
        "longest time between checkpoints; one more at the end of each epoch; 0 saves every step",
    )
    on_nan: tuple[str, ...] = _run(
        ("stop",),
        "when the loss is NaN or infinite: stop, or `skip N`: leave out up to N such batches",
        metavar="HOW",
    )
    tensorboard: bool = _run(True, "write TensorBoard events")
    compile: bool = _run(
        False,
        "train the network through torch.compile: faster on GPUs after a minute; moves rounding",
    )

    def __post_init__(self) -> None:
        """Refuses values that make no sense, with the fix."""
        checks = (
            (self.embedding_dim >= 2, "--embedding-dim must be at least 2"),
            (0 < self.train_fraction <= 1, "--train-fraction must be in (0, 1]"),
            (self.image_size >= 8, "--image-size must be at least 8"),
            (
                self.arch != "alexnet" or self.stem == "small" or self.image_size >= 63,
                "alexnet needs --image-size of at least 63, or --stem small",
            ),
            (
                not self.is_timm or self.stem == "imagenet",
                f"--stem small is for the paper's networks: {self.arch} has its own stem",
            ),
            (self.arch != "vgg16" or self.image_size >= 32, "vgg16 needs --image-size 32 or more"),
            (0 < self.crop_ratio <= 1, "--crop-ratio must be in (0, 1]"),
            (0 < self.min_crop_scale <= 1, "--min-crop-scale must be in (0, 1]"),
            (self.workers >= 0, "--workers must not be negative"),
            (
                0.025 <= self.temperature <= 10,
                "--temperature must be in [0.025, 10]: below, exp(1/tau) leaves float32",
            ),
            (self.num_negatives >= 1, "--num-negatives must be at least 1"),
            (self.proximal_weight >= 0, "--proximal-weight must not be negative"),
            (0 <= self.bank_momentum < 1, "--bank-momentum must be in [0, 1): 0 replaces the row"),
            (self.epochs >= 1, "--epochs must be at least 1"),
            (self.batch_size >= 2, "--batch-size must be at least 2: batch norm needs two images"),
            (self.lr > 0, "--lr must be positive"),
            (self.warmup_epochs >= 0, "--warmup-epochs must not be negative"),
            (0 <= self.momentum < 1, "--momentum must be in [0, 1)"),
            (self.weight_decay >= 0, "--weight-decay must not be negative"),
            (self.accumulate >= 1, "--accumulate must be at least 1"),
            (self.seed >= 0, "--seed must not be negative"),
            (self.threads is None or self.threads >= 1, "--threads must be at least 1"),
            (self.monitor_every >= 0, "--monitor-every must not be negative"),
            (self.num_neighbors >= 1, "--num-neighbors must be at least 1"),
            (self.log_every >= 1, "--log-every must be at least 1"),
            (self.save_minutes >= 0, "--save-minutes must not be negative"),
        )
        for holds, message in checks:
            if not holds:
                raise UserError(message)
        parse_normalizer(self.normalizer)
        parse_on_nan(self.on_nan)

    @classmethod
    def recipe_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults for the data that was named; the demo recipe where none was."""
        location = locate_data(given.get("data"))
        recipe = given.get("recipe") or RECIPE_OF_KIND[location.kind]
        data = "demo" if location.root is None else str(Path(location.root).resolve())
        defaults = {"recipe": recipe, "data": data, **RECIPES[recipe]}
        arch = str(given.get("arch", cls.arch))
        if recipe == "demo":
            defaults.update(DEMO_OF_ARCH.get(arch, DEMO_OF_TIMM))
        if arch.startswith(TIMM):
            defaults.pop("stem", None)
        return defaults

    @property
    def is_timm(self) -> bool:
        """Whether the network is one of timm's."""
        return self.arch.startswith(TIMM)


def parse_normalizer(text: str) -> tuple[str, float]:
    """Splits `first-batches:N`, `ema`, `fixed:VALUE`, `exact` into mode and number."""
    mode, _, number = text.partition(":")
    try:
        if mode == "first-batches" and int(number) >= 1:
            return mode, int(number)
        if mode == "fixed" and float(number) > 0:
            return mode, float(number)
    except ValueError:
        pass
    if text in ("ema", "exact"):
        return text, 0.0
    raise UserError(
        f"--normalizer {text}: write first-batches:N, ema, fixed:VALUE (Z, positive) or exact"
    )


def parse_on_nan(words: tuple[str, ...]) -> int:
    """How many batches may be left out: 0 for `stop`, N for `skip N`."""
    if words == ("stop",):
        return 0
    if len(words) == 2 and words[0] == "skip" and re.fullmatch("[1-9][0-9]{0,8}", words[1]):
        return int(words[1])
    raise UserError(f"--on-nan {' '.join(words)}: write stop, or skip N with N at least 1")

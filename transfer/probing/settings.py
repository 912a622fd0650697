"""Flags of transfer/linear.py and voc_svm.py, and named recipes. Imports no torch.

A recipe is a published protocol as data: each value is what the source's own configuration states.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from instdisc.names import FEATURE_CHOICES, VOC_VARIABLE, Precision
from transfer.config import TransferConfig, check, data_option, protocol_option, run_option

# Those of the public benchmark code, in its order: of equal ones the first is taken.
VOC_COSTS = (0.01, 0.1, *(0.5**power for power in range(4, 20)))
VOC_SHOTS = (1, 2, 4, 8, 16, 32, 64, 96)
NUM_SAMPLES = 5

RecipeName = Literal["paper", "moco", "vissl", "openselfsup"]

# Cross entropy and weight decay instead of an SVM and its C; random crops in every epoch.
_TRAINED: dict[str, Any] = {"loss": "softmax", "cost": (), "augment": "crops"}
# A layer behind batch norm on each stage, all of them trained together.
_STAGES: dict[str, Any] = {**_TRAINED, "pooling": "vissl", "lr": (0.01,)}
RECIPES: dict[str, dict[str, Any]] = {
    # Section 4.2: linear SVMs. The defaults.
    "paper": {},
    # moco, main_lincls.py: one layer on the pooled features, batches of 256, SGD momentum 0.9.
    "moco": {
        **_TRAINED,
        "stage": ("backbone",),
        "lr": (30.0,),
        "nesterov": False,
        "weight_decay": 0.0,
        "epochs": 100,
    },
    # VISSL, configs/config/benchmark/linear_image_classification/imagenet1k/
    # eval_resnet_8gpu_transfer_in1k_linear.yaml: batches of 8x32, nesterov momentum 0.9, synced
    # batch norm whose scale and shift are trained without decay.
    "vissl": {
        **_STAGES,
        "batch_norm": "affine",
        "head_init": "uniform",
        "weight_decay": 5e-4,
        "epochs": 28,
    },
    # OpenSelfSup, configs/benchmarks/linear_classification/imagenet/r50_multihead.py: batches of
    # 8x32, nesterov momentum 0.9, synced batch norm without scale and shift.
    "openselfsup": {
        **_STAGES,
        "augment": "colors",
        "batch_norm": "plain",
        "weight_decay": 1e-4,
        "epochs": 90,
    },
}
# Epochs at which the sources divide the learning rate by ten.
MILESTONES: dict[str, tuple[int, ...]] = {
    "paper": (17, 24),
    "moco": (60, 80),
    "vissl": (8, 16, 24),
    "openselfsup": (30, 60),
}


class Candidate(NamedTuple):
    """What tells the probes of one stage apart; cost is None where there is no SVM."""

    cost: float | None
    lr: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig(TransferConfig):
    """Linear classifiers on a frozen network (paper, section 4.2)."""

    PROG = "transfer/linear.py"
    DESCRIPTION = """
    Trains a linear SVM on each stage of a frozen network, pooled to about 10,000
    dimensions, and reports top-1 and top-5 on the validation images; or the linear
    layers of a published protocol (--recipe). All of them share one pass over the
    images. C, and the learning rate if several are given, is chosen on held-out
    training images. The network is proved unchanged afterwards, batch-norm
    statistics included.
    """
    EPILOG = """
    examples:
      python transfer/linear.py                                       newest run, its own data
      python transfer/linear.py --stage embedding                     SVM on the learned feature
      python transfer/linear.py --weights timm:resnet50.a1_in1k --data /data/imagenet
      python transfer/linear.py --recipe moco --lr 0.3 3 30           three layers, one pass
      torchrun --nproc-per-node 8 transfer/linear.py --recipe vissl --data /data/imagenet
      python transfer/linear.py --data /data/places205 --cache off    no features on disk
      python transfer/linear.py --solver liblinear --stage conv5      scikit-learn's LinearSVC
    Features are stored in runs/features and used again, but for those of random
    crops. The same command again goes on where a stopped one was.
    """

    recipe: RecipeName = protocol_option(
        "paper",
        "named settings for the options below: the paper's SVMs; one linear layer on the pooled "
        "features (moco); batch norm and a linear layer on each stage (vissl, openselfsup)",
    )
    stage: tuple[str, ...] | None = protocol_option(
        None,
        "what to probe: feature maps pooled to about 10,000 dimensions, backbone (pooled), or "
        "embedding, the learned feature of the paper's first table; if not given backbone for "
        "moco, else all feature maps: conv1..conv5, or what a timm network has",
        choices=FEATURE_CHOICES,
    )
    pooling: Literal["grid", "vissl"] = protocol_option(
        "grid",
        "of feature maps: even parts; or the windows of VISSL and OpenSelfSup where they are "
        "published (ResNet-50 at 224 pixels), with conv1 read before its max pooling",
    )
    solver: Literal["sgd", "liblinear"] = protocol_option(
        "sgd", "of the SVM: streaming, all stages at once; or scikit-learn's, in memory"
    )
    loss: Literal["hinge", "softmax"] = protocol_option(
        "hinge", "squared hinge, one class against the rest: an SVM; or logistic regression (sgd)"
    )
    cost: tuple[float, ...] = protocol_option(
        (0.01, 0.1, 1.0, 10.0),
        "values of the SVM's C to choose from; it has standardised features, and weights that "
        "decay by 1 / (C n) of n images",
        aliases=["-C"],
        metavar="C",
    )
    weight_decay: float | None = protocol_option(
        None, "of a recipe's linear layers, instead of C", aliases=["--wd"]
    )
    batch_norm: Literal["off", "plain", "affine"] = protocol_option(
        "off",
        "what a recipe's layers have in front of them: statistics over the batch of all "
        "processes; affine trains a scale and a shift of each channel too",
    )
    head_init: Literal["normal", "uniform"] = protocol_option(
        "normal", "where a recipe's layers start: deviation 0.01, or torch's own"
    )
    held_out: float = protocol_option(
        0.1, "part of the training images, 10,000 at most, on which C and --lr are chosen"
    )
    epochs: int = protocol_option(28, "passes of sgd over the images")
    batch_size: int = protocol_option(
        256, "images per step, over all processes, and per pass of the network", aliases=["-b"]
    )
    lr: tuple[float, ...] = protocol_option(
        (0.8,),
        "learning rates, the best of which is chosen like C; for SVMs over what plain gradient "
        "descent could take",
    )
    lr_milestones: tuple[float, ...] | None = protocol_option(
        None, "epochs at which --lr falls to a tenth; if not given at the recipe's parts of all"
    )
    momentum: float = protocol_option(0.9, "of sgd")
    nesterov: bool = protocol_option(True, "whether momentum is Nesterov's")
    augment: Literal["off", "crops", "colors"] = protocol_option(
        "off",
        "training images: the centre crop; random crops and flips; with colour jitter and "
        "lighting noise too. Nothing is stored if they are random",
    )
    cache: Literal["auto", "on", "off"] = run_option(
        "auto", "keep pooled features on disk: auto does if they take less than --cache-gb"
    )
    cache_gb: float = run_option(50.0, "most disk space for them")
    memory_gb: float = run_option(4.0, "most memory for liblinear")
    precision: Precision | None = run_option(
        None, "of the stored features: half for feature maps, else float32", volatile=False
    )
    save_minutes: float = run_option(10.0, "time between checkpoints; 0 saves every step")

    def __post_init__(self) -> None:
        """Checks the protocol too."""
        super().__post_init__()
        check(
            (
                self.stage is None or 0 < len(set(self.stage)) == len(self.stage),
                "--stage: each once",
            ),
            (min(self.cost, default=1) > 0, "--cost must be positive, one at least"),
            (
                bool(self.cost) == (self.weight_decay is None),
                "--cost is of SVMs, --weight-decay of the layers of --recipe moco, vissl, "
                "openselfsup: give one of them",
            ),
            (
                not self.cost or (self.batch_norm, self.head_init) == ("off", "normal"),
                "--batch-norm and --head-init are of linear layers: add --recipe vissl",
            ),
            (
                self.weight_decay is None or self.weight_decay >= 0,
                "--weight-decay must not be negative",
            ),
            (0 < self.held_out < 1, "--held-out must be in (0, 1)"),
            (self.epochs >= 1, "--epochs must be at least 1"),
            (self.batch_size >= 2, "--batch-size must be at least 2"),
            (bool(self.lr) and min(self.lr) > 0, "--lr must be positive, one at least"),
            (len(set(self.lr)) == len(self.lr), "--lr: each once"),
            (
                0 <= self.momentum < 1 and (self.momentum > 0 or not self.nesterov),
                "--momentum must be in [0, 1), and above 0 for --nesterov",
            ),
            (
                self.solver == "sgd"
                or (self.loss == "hinge" and self.cache != "off" and self.recipe == "paper"),
                "--solver liblinear has --loss hinge only, needs stored features, and no recipe",
            ),
            (
                self.augment == "off" or (self.solver == "sgd" and self.cache != "on"),
                "--augment makes new images in every pass: needs --solver sgd, not --cache on",
            ),
            (self.save_minutes >= 0, "--save-minutes must not be negative"),
        )

    @classmethod
    def recipe_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the recipe that was named."""
        return RECIPES[given.get("recipe", "paper")]

    @property
    def candidates(self) -> list[Candidate]:
        """What is tried for each stage."""
        costs: tuple[float | None, ...] = self.cost or (None,)
        return [Candidate(cost, lr) for cost, lr in itertools.product(costs, self.lr)]

    @property
    def milestones(self) -> tuple[float, ...]:
        """Epochs at which the learning rate falls; a shorter training keeps their parts of it."""
        if self.lr_milestones is not None:
            return self.lr_milestones
        published = RECIPES[self.recipe].get("epochs", type(self).epochs)
        return tuple(place * self.epochs / published for place in MILESTONES[self.recipe])


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocSvmConfig(TransferConfig):
    """VOC07 classification by linear SVMs (Goyal et al. 2019), full and low-shot."""

    PROG = "transfer/voc_svm.py"
    DESCRIPTION = """
    Classification of VOC2007 by linear SVMs on the frozen stages of a network, as
    Goyal et al. (2019) define it: one SVM for each class on trainval, C chosen by
    cross-validation, mAP on test. All stages share one pass over the images; the
    best one is named at the end, as published tables show it.
    """
    EPILOG = f"""
    examples:
      python transfer/voc_svm.py --voc-root VOCdevkit                   newest run, all stages
      python transfer/voc_svm.py --voc-root VOCdevkit --low-shot        1 to 96 images a class too
      python transfer/voc_svm.py --voc-root VOCdevkit --stage conv5 --weights timm:resnet50.a1_in1k
    Any folder in VOC layout will do: its annotations name the classes. With none named, by
    flag or {VOC_VARIABLE}, the embedded images are used. Features are kept in runs/features
    and finished stages in the run folder: the same command again goes on with the others.
    """
    REAL_DATA = f"--voc-root DIR or {VOC_VARIABLE}"

    data: str | None = data_option(
        None,
        "VOCdevkit, its parent, or a folder in VOC layout with the lists trainval and test; else "
        f"${VOC_VARIABLE}, else the embedded images",
        aliases=("--voc-root",),
        metavar="DIR",
    )
    stage: tuple[str, ...] | None = protocol_option(
        None,
        "feature maps pooled to about 10,000 dimensions, backbone (pooled) or embedding; all "
        "feature maps if not given",
        choices=FEATURE_CHOICES,
    )
    low_shot: bool = protocol_option(False, "learn from few images as well")
    shots: tuple[int, ...] | None = protocol_option(
        None,
        f"positive images of a class in --low-shot; {', '.join(map(str, VOC_SHOTS))} if not given, "
        "as far as the images go",
        aliases=["-k", "--k"],
        metavar="K",
    )
    samples: int = protocol_option(NUM_SAMPLES, "independent draws of those images in --low-shot")
    cost: tuple[float, ...] = protocol_option(
        VOC_COSTS, "values of C to choose from", aliases=["-C"], metavar="C"
    )
    difficult: Literal["ignore", "negative"] = protocol_option(
        "ignore",
        "training images whose objects of a class are all difficult: leave them out, as in the "
        "test, or take them for negatives, as the public code does but in low-shot",
    )
    precision: Precision = run_option(
        "float32", "of the stored features; half takes half the space", volatile=False
    )

    def __post_init__(self) -> None:
        """Checks the protocol too."""
        super().__post_init__()
        stage, shots = self.stage, self.shots
        check(
            (stage is None or 0 < len(set(stage)) == len(stage), "--stage: each once"),
            (
                shots is None or 0 < len(set(shots)) == len(shots),
                "--shots: name at least one, and each once",
            ),
            (shots is None or min(shots) >= 1, "--shots must be at least 1"),
            (self.samples >= 1, "--samples must be at least 1"),
            (self.low_shot or shots is None, "--shots needs --low-shot"),
            (self.low_shot or self.samples == NUM_SAMPLES, "--samples needs --low-shot"),
            (bool(self.cost) and min(self.cost) > 0, "--cost must be positive, one at least"),
            (len(set(self.cost)) == len(self.cost), "--cost: name each one once"),
        )

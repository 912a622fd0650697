"""One dataclass per transfer command, the paper's numbers as defaults. Imports no torch."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from instdisc.cli import option
from instdisc.errors import UserError
from instdisc.names import STAGES, Precision, SubsetMode
from transfer.finetuning.recipes import RecipeName, finetune_defaults

INIT = re.compile(r"pretrained|scratch|supervised:.+")
PAPER_NUM_NEIGHBORS = 200  # section 3.4: k of the weighted kNN
FeatureName = Literal["embedding", "bank", "backbone", "conv1", "conv2", "conv3", "conv4", "conv5"]
StageName = Literal["embedding", "backbone", "conv1", "conv2", "conv3", "conv4", "conv5"]

# One kind of option per heading of --help. What is volatile changes no result.
network_option = functools.partial(option, group="network")
data_option = functools.partial(option, group="data", volatile=True)
protocol_option = functools.partial(option, group="protocol")
run_option = functools.partial(option, group="run", volatile=True)
STORED = (
    "of the stored features; half takes half the space. It did not move the accuracy of trained "
    "networks, and did that of an untrained one, whose features are nearly parallel, by 0.8 points"
)


def check(*conditions: tuple[bool, str]) -> None:
    """Refuses a configuration with the message of the first condition that does not hold."""
    for holds, message in conditions:
        if not holds:
            raise UserError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """What every transfer command takes; a command's own dataclass adds its protocol."""

    weights: str | None = network_option(
        None,
        "a run folder, a backbone.pt, untrained:RUN (what the run started from), "
        "random:ARCH[:SEED], data-init:ARCH[:SEED] or timm:NAME; the newest pretraining run if "
        "not given",
        metavar="NAME",
    )
    data: str | None = data_option(
        None,
        "ImageFolder tree (<data>/train/<class>/<image> and val/), the folder of CIFAR's or "
        "Fashion-MNIST's official files, or `demo`; else $INSTDISC_DATA, else the images that "
        "the network was pretrained on",
        metavar="DIR",
    )
    skip_bad_images: bool = data_option(
        False, "leave out files that are no readable images, and say so", volatile=False
    )
    workers: int = data_option(4, "loader processes; results do not depend on it", aliases=["-j"])
    batch_size: int = run_option(256, "images per forward pass", aliases=["-b"])
    device: Literal["auto", "cpu", "cuda"] = run_option("auto", "where to compute")
    seed: int = run_option(0, "of everything that is drawn at random", volatile=False)
    output: Path | None = run_option(
        None, "folder of this run; runs/<command>/<network> if not given", metavar="DIR"
    )

    def __post_init__(self) -> None:
        """Refuses values that make no sense, with the fix; commands extend it."""
        check(
            (self.workers >= 0, "--workers must not be negative"),
            (self.batch_size >= 1, "--batch-size must be at least 1"),
            (self.seed >= 0, "--seed must not be negative"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnnConfig(TransferConfig):
    """Weighted k-nearest-neighbour classification (paper, sections 3.4 and 4.2)."""

    features: tuple[FeatureName, ...] | None = protocol_option(
        None,
        "embedding: the output, recomputed for all training images, the paper's choice and the "
        "default; bank: the memory bank at the end of training; backbone: pooled features before "
        "the projection, the default where there is no projection; conv1..conv5: averaged maps",
    )
    num_neighbors: tuple[int, ...] | None = protocol_option(
        None,
        f"one or several; none given is the paper's {PAPER_NUM_NEIGHBORS}, or all training "
        "images where there are fewer",
        aliases=["-k", "--k"],
        metavar="K",
    )
    temperature: float = protocol_option(
        0.07, "tau of the weights exp(similarity / tau)", aliases=["--tau"]
    )
    precision: Precision = run_option("float32", STORED, volatile=False)

    def __post_init__(self) -> None:
        """Checks the protocol too."""
        super().__post_init__()
        features, ks = self.features, self.num_neighbors
        check(
            (features is None or len(features) > 0, "--features: name at least one"),
            (features is None or len(set(features)) == len(features), "--features: each once"),
            (ks is None or len(ks) > 0, "--k: name at least one"),
            (ks is None or all(k >= 1 for k in ks), "--k must be at least 1"),
            (ks is None or len(set(ks)) == len(ks), "--k: name each one once"),
            (
                0.01 <= self.temperature <= 100,
                "--temperature must be in [0.01, 100]: below, one neighbour decides alone",
            ),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RetrieveConfig(TransferConfig):
    """Nearest training images (paper, section 4.2, the retrieval figure)."""

    query: tuple[str, ...] = protocol_option(
        (),
        "image files to find neighbours of, in any folder of images named by --data; without it, "
        "the validation images are the queries and the figure shows the best and worst of them",
        metavar="FILE",
    )
    features: StageName | None = protocol_option(
        None, "embedding if the network has one, else backbone; or a stage, averaged"
    )
    num_neighbors: int = protocol_option(
        10, "images shown for a query; the paper's figure has ten", aliases=["-k", "--k"]
    )
    num_cases: int = protocol_option(5, "best cases, and as many worst cases, in the figure")
    precision: Precision = run_option("float32", STORED, volatile=False)

    def __post_init__(self) -> None:
        """Checks the protocol too."""
        super().__post_init__()
        check(
            (1 <= self.num_neighbors <= 100, "--num-neighbors must be in 1 to 100"),
            (1 <= self.num_cases <= 100, "--num-cases must be in 1 to 100"),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SemisupConfig(TransferConfig):
    """Fine-tuning with a part of the labels (paper, section 4.3)."""

    labeled: tuple[float, ...] = protocol_option(
        (0.01,),
        "fractions of the training images that keep their labels, 0.001 to 1; the paper: "
        "0.01 0.02 0.04 0.1 0.2",
        metavar="FRACTION",
    )
    subset: SubsetMode = protocol_option(
        "random", "how they are drawn: over all images (paper), or the same number of each class"
    )
    label_lists: tuple[str, ...] = protocol_option(
        (),
        "files that name the labelled images instead, such as the published 1% and 10% lists",
        aliases=["--list"],
        metavar="FILE",
    )
    init: tuple[str, ...] = protocol_option(
        ("pretrained",),
        "one or several of: pretrained (--weights), scratch (the paper's baseline: the same "
        "network, random), supervised:FILE (a backbone trained with labels)",
        metavar="HOW",
    )
    recipe: RecipeName | None = protocol_option(
        None, "named settings for the options below: the paper's, or demo on the embedded images"
    )
    epochs: int = protocol_option(70, "passes over the labelled images")
    batch_size: int = protocol_option(
        256, "images per step, over all processes, or all labelled ones", aliases=["-b"]
    )
    lr: float = protocol_option(0.01, "learning rate of the backbone")
    head_lr_scale: float = protocol_option(1.0, "learning rate of the classifier over --lr")
    lr_milestones: tuple[int, ...] = protocol_option((30, 60), "epochs at which --lr falls")
    lr_factor: float = protocol_option(0.1, "what it is multiplied by there")
    momentum: float = protocol_option(0.9, "of SGD")
    weight_decay: float = protocol_option(1e-4, "of SGD", aliases=["--wd"])
    amp: Literal["off", "bf16", "fp16"] = protocol_option("off", "autocast of the network")
    sweep: bool = protocol_option(
        False,
        "choose lr and head lr on held-out labelled images of the first trial, then train on all",
    )
    sweep_lr: tuple[float, ...] = protocol_option((0.1, 0.01, 0.001), "values of --lr to try")
    sweep_head_lr_scale: tuple[float, ...] = protocol_option(
        (1.0, 10.0, 100.0), "values of --head-lr-scale to try"
    )
    held_out: float = protocol_option(0.2, "part of the labelled images that --sweep holds out")
    trials: int = run_option(
        1, "repetitions with seeds seed, seed + 1, ...: new labels, order and classifier"
    )
    overwrite: bool = run_option(False, "measure again what this folder has measured")
    keep_checkpoint: bool = run_option(False, "keep last.pt, the fine-tuned network, of each trial")
    save_minutes: float = run_option(5.0, "time between checkpoints; 0 saves every step")
    log_every: int = run_option(10, "steps between rows of metrics.jsonl")

    def __post_init__(self) -> None:
        """Checks the protocol too."""
        super().__post_init__()
        check(
            (bool(self.labeled or self.label_lists), "--labeled: name at least one fraction"),
            (
                all(0.001 <= fraction <= 1 for fraction in self.labeled),
                "--labeled must be fractions from 0.001 to 1: write 0.01 for 1%",
            ),
            (len(set(self.labeled)) == len(self.labeled), "--labeled: name each fraction once"),
            (
                bool(self.init) and all(map(INIT.fullmatch, self.init)),
                "--init must be of: pretrained, scratch, supervised:FILE",
            ),
            (len(set(self.init)) == len(self.init), "--init: name each one once"),
            (self.epochs >= 1, "--epochs must be at least 1"),
            (self.batch_size >= 2, "--batch-size must be at least 2: batch norm needs two images"),
            (self.lr > 0 and self.head_lr_scale > 0, "--lr and --head-lr-scale must be positive"),
            (0 < self.lr_factor <= 1, "--lr-factor must be in (0, 1]"),
            (0 <= self.momentum < 1, "--momentum must be in [0, 1)"),
            (self.weight_decay >= 0, "--weight-decay must not be negative"),
            (
                bool(self.sweep_lr and self.sweep_head_lr_scale)
                and min(*self.sweep_lr, *self.sweep_head_lr_scale) > 0,
                "--sweep-lr and --sweep-head-lr-scale must be positive, one value at least",
            ),
            (0 < self.held_out < 1, "--held-out must be in (0, 1)"),
            (self.trials >= 1, "--trials must be at least 1"),
            (self.save_minutes >= 0, "--save-minutes must not be negative"),
            (self.log_every >= 1, "--log-every must be at least 1"),
        )

    @classmethod
    def recipe_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults of the recipe; a list of labels stands in place of fractions."""
        if given.get("label_lists") and given.get("labeled"):
            raise UserError("--labeled and --list say the same thing: give one of them")
        fractions = {"labeled": ()} if given.get("label_lists") else {}
        return {**finetune_defaults(given), **fractions}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig(TransferConfig):
    """Linear SVMs on a frozen network (paper, section 4.2)."""

    stage: tuple[StageName, ...] = protocol_option(
        STAGES,
        "what to probe: feature maps pooled to about 10,000 dimensions, backbone (pooled), or "
        "embedding, the learned feature of the paper's first table",
    )
    solver: Literal["sgd", "liblinear"] = protocol_option(
        "sgd", "of the SVM: streaming, all stages at once; or scikit-learn's, in memory"
    )
    loss: Literal["hinge", "softmax"] = protocol_option(
        "hinge", "squared hinge, one class against the rest: an SVM; or logistic regression (sgd)"
    )
    cost: tuple[float, ...] = protocol_option(
        (0.01, 0.1, 1.0, 10.0), "values of C to choose from", aliases=["-C"], metavar="C"
    )
    held_out: float = protocol_option(
        0.1, "part of the training images, 10,000 at most, on which C is chosen"
    )
    epochs: int | None = protocol_option(
        None, "passes of sgd; 12 over 2,000 images, fewer over more: one over ImageNet"
    )
    batch_size: int = protocol_option(256, "images per pass and per step", aliases=["-b"])
    lr: float = protocol_option(0.8, "of sgd, over what plain gradient descent could take")
    augment: bool = protocol_option(
        False, "random crops and flips instead of the centre crop; nothing is stored then"
    )
    cache: Literal["auto", "on", "off"] = run_option(
        "auto", "keep pooled features on disk: auto does if they take less than --cache-gb"
    )
    cache_gb: float = run_option(50.0, "most disk space for them")
    memory_gb: float = run_option(4.0, "most memory for liblinear")
    precision: Precision | None = run_option(
        None, "of the stored features: half for conv1..conv5, else float32", volatile=False
    )
    save_minutes: float = run_option(10.0, "time between checkpoints; 0 saves every step")

    def __post_init__(self) -> None:
        """Checks the protocol too."""
        super().__post_init__()
        check(
            (bool(self.stage) and len(set(self.stage)) == len(self.stage), "--stage: each once"),
            (bool(self.cost) and min(self.cost) > 0, "--cost must be positive, one at least"),
            (0 < self.held_out < 1, "--held-out must be in (0, 1)"),
            (self.epochs is None or self.epochs >= 1, "--epochs must be at least 1"),
            (self.batch_size >= 2 and self.lr > 0, "--batch-size from 2, --lr from above 0"),
            (
                self.solver == "sgd" or (self.loss == "hinge" and self.cache != "off"),
                "--solver liblinear has --loss hinge only, and needs stored features",
            ),
            (
                not self.augment or (self.solver == "sgd" and self.cache != "on"),
                "--augment makes new images in every pass: needs --solver sgd, not --cache on",
            ),
            (self.save_minutes >= 0, "--save-minutes must not be negative"),
        )

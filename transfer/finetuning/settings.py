"""SemisupConfig: flags of transfer/semisup.py, and named recipes. Imports no torch until it must.

Recipes are published practice as data: each line is what its source states, and what a source
leaves open keeps the default.
"""

import dataclasses
import os
import re
from collections.abc import Mapping
from typing import Any, Literal

from instdisc.errors import UserError
from instdisc.images.locations import locate_data
from instdisc.names import DATA_VARIABLE, SubsetMode
from transfer.config import TransferConfig, check, protocol_option, run_option

INIT = re.compile(r"pretrained|scratch|supervised:.+")
RecipeName = Literal[
    "paper", "openselfsup", "mmselfsup", "swav-1", "swav-10", "vissl", "vissl-full", "demo"
]

_LATER: dict[str, Any] = {"epochs": 20, "lr_milestones": (12, 16), "lr_factor": 0.2}
_OPENSELFSUP = {**_LATER, "lr": 0.01, "head_lr_scale": 100.0, "weight_decay": 5e-4}
_VISSL: dict[str, Any] = {"nesterov": True, "weight_decay": 0.0, "head_init": "uniform"}
RECIPES: dict[str, dict[str, Any]] = {
    # Section 4.3: 70 epochs, lr 0.01, divided by ten every 30 epochs. The defaults.
    "paper": {},
    # OpenSelfSup, configs/benchmarks/semi_classification/imagenet_1percent and _10percent: batch
    # 4x64, a grid of lr 0.1, 0.01, 0.001 by head lr x1, x10, x100, of which the zoo reports the
    # best. Here r50_lr0_01_head100.py, the best for NPID at 1% and 10%; --sweep tries all nine.
    # MMSelfSup, configs/benchmarks/classification/imagenet/imagenet_1percent, has the same.
    "openselfsup": _OPENSELFSUP,
    "mmselfsup": _OPENSELFSUP,
    # SwAV, eval_semisup.py and its README: batch 8x32; 1% of the labels: lr 0.02, head 5;
    # 10%: lr 0.01, head 0.2; no weight decay.
    "swav-1": {**_LATER, "lr": 0.02, "head_lr_scale": 250.0, "weight_decay": 0.0},
    "swav-10": {**_LATER, "lr": 0.01, "head_lr_scale": 20.0, "weight_decay": 0.0},
    # VISSL, configs/config/benchmark/semi_supervised/imagenet1k/
    # eval_resnet_8gpu_transfer_in1k_semi_sup_fulltune.yaml, 1% and 10%: batch 8x32, 70 epochs.
    "vissl": {**_VISSL, "epochs": 70, "lr": 0.05, "lr_milestones": (30,)},
    # VISSL, configs/config/benchmark/fulltune/imagenet1k/
    # eval_resnet_8gpu_transfer_in1k_fulltune.yaml: all labels, batch 8x32.
    "vissl-full": {
        **_VISSL,
        "labeled": (1.0,),
        "epochs": 105,
        "lr": 0.1,
        "lr_milestones": (30, 60, 90, 100),
    },
    # The paper's schedule on the embedded images; so few that a random draw would miss a class.
    # The untrained network is fine-tuned beside the pretrained one.
    "demo": {"subset": "balanced", "workers": 0, "init": ("pretrained", "scratch")},
}


def is_demo(weights: str | None, data: str | None) -> bool:
    """Whether a transfer command with these arguments will work on the embedded images."""
    if data is not None or os.environ.get(DATA_VARIABLE):
        return locate_data(data).is_demo
    if str(weights or "").partition(":")[0] in ("random", "data-init", "timm"):
        return True
    # What a network was pretrained on is written in its file, which torch must read.
    from instdisc.networks.weights import open_weights

    return open_weights(weights).data in (None, "demo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SemisupConfig(TransferConfig):
    """Fine-tuning with a part of the labels (paper, section 4.3)."""

    PROG = "transfer/semisup.py"
    DESCRIPTION = """
    Fine-tunes a pretrained network with the labels of a part of its training
    images and reports top-1 and top-5 on the validation images, single centre
    crop. Defaults are the paper's: 70 epochs, lr 0.01 divided by ten every 30
    epochs, everything trained; on the embedded images the labels are drawn class
    by class. With --labeled 1 it fine-tunes with all labels.
    """
    EPILOG = """
    examples:
      python transfer/semisup.py --labeled 0.01                      newest run, its own data
      python transfer/semisup.py --labeled 0.01 0.02 0.04 --init pretrained scratch --trials 5
      python transfer/semisup.py --list 1percent.txt --recipe swav-1 --weights runs/pretrain/r50
      python transfer/semisup.py --recipe vissl-full --data /data/imagenet        all labels
      torchrun --nproc-per-node 8 transfer/semisup.py --labeled 0.1 --data /data/imagenet --amp bf16
    The same command again goes on where a stopped one was; trials that are measured
    stay measured. Each trial's folder keeps labels.txt, metrics.jsonl, result.json;
    the curve of all fractions so far is curve.png and curve.svg.
    """

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
        None,
        "named settings for the options below (docs/protocols.md): the paper's, or demo on the "
        "embedded images; vissl-full is fine-tuning with all labels",
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
    nesterov: bool = protocol_option(False, "whether momentum is Nesterov's")
    head_init: Literal["normal", "uniform"] = protocol_option(
        "normal", "where the classifier starts: deviation 0.01, or torch's own"
    )
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
    compile: bool = run_option(
        False, "train through torch.compile: faster on GPUs after a minute; moves rounding"
    )

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
            (
                0 <= self.momentum < 1 and (self.momentum > 0 or not self.nesterov),
                "--momentum must be in [0, 1), and above 0 for --nesterov",
            ),
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
        """Those of the recipe that was named, else of the demo recipe or the paper's."""
        if given.get("label_lists") and given.get("labeled"):
            raise UserError("--labeled and --list say the same thing: give one of them")
        recipe = given.get("recipe")
        if recipe is None:
            demo = is_demo(given.get("weights"), given.get("data"))
            recipe = "demo" if demo else "paper"
        fractions = {"labeled": ()} if given.get("label_lists") else {}
        return {"recipe": recipe, **RECIPES[recipe], **fractions}

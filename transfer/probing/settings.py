"""LinearConfig: flags of transfer/linear.py. Imports no torch."""

import dataclasses
from typing import Literal

from instdisc.names import STAGES, Precision
from transfer.config import StageName, TransferConfig, check, protocol_option, run_option


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig(TransferConfig):
    """Linear SVMs on a frozen network (paper, section 4.2)."""

    PROG = "transfer/linear.py"
    DESCRIPTION = """
    Trains a linear SVM on each stage of a frozen network, pooled to about 10,000
    dimensions, and reports top-1 and top-5 on the validation images. All stages
    share one pass over the images. C is chosen on held-out training images. The
    network is proved unchanged afterwards, batch-norm statistics included.
    """
    EPILOG = """
    examples:
      python transfer/linear.py                                       newest run, its own data
      python transfer/linear.py --stage embedding                     SVM on the learned feature
      python transfer/linear.py --weights timm:resnet50.a1_in1k --data /data/imagenet
      python transfer/linear.py --data /data/places205 --cache off    no features on disk
      python transfer/linear.py --solver liblinear --stage conv5      scikit-learn's LinearSVC
    Features are stored in runs/features and used again.
    """

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

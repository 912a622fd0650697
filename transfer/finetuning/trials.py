"""One fine-tuning (section 4.3): where it starts, how it is trained, what it reaches."""

import copy
import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from instdisc.errors import UserError
from instdisc.images.loading import Samples
from instdisc.images.sets import ImageSet
from instdisc.images.subsets import LabeledSubset
from instdisc.images.transforms import InputSpec, eval_transform, finetune_transform
from instdisc.names import TIMM
from instdisc.networks.backbones import AnyBackbone, Backbone, build_backbone
from instdisc.networks.timm_backbones import build_timm
from instdisc.networks.weights import Weights, open_weights
from instdisc.runs.checkpoint import remove_checkpoints, weights_hash
from instdisc.runs.folders import write_json, write_text
from instdisc.runs.log import LOGGER
from instdisc.runs.results import config_hash
from instdisc.training import dist
from instdisc.training.amp import check_amp
from instdisc.training.dist import Process
from instdisc.training.loop import prepare_device
from instdisc.training.seed import seeded
from transfer.finetuning.predictions import accuracy, predict
from transfer.finetuning.settings import SemisupConfig
from transfer.finetuning.supervised import LoopSettings, Problem, SupervisedTrainer, build_head


class Classifier(nn.Module):
    """A backbone and a linear classifier on its features; all of it is trained."""

    def __init__(
        self, backbone: AnyBackbone, num_classes: int, seed: int, init: str = "normal"
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = build_head(backbone.feature_dim, num_classes, init, seed, "head")

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """Logits, `(B, C)`, under the name of the only head."""
        return {"classifier": self.head(self.backbone(images))}


def cross_entropy(logits: dict[str, Tensor], labels: Tensor) -> Tensor:
    """Loss of each image, `(B,)`."""
    return nn.functional.cross_entropy(logits["classifier"], labels, reduction="none")


def reinitialized(backbone: AnyBackbone, seed: int) -> AnyBackbone:
    """The same architecture at a random initialisation."""
    with seeded(seed, "init"):
        if isinstance(backbone, Backbone):
            return build_backbone(backbone.arch, stem=backbone.stem, batch_norm=backbone.batch_norm)
        return build_timm(backbone.arch.removeprefix(TIMM), size=backbone.spec.size)


@dataclasses.dataclass(frozen=True)
class Start:
    """Where fine-tuning starts.

    Attributes:
        how: as `--init` has it.
        weights: what results call it.
        spec: how the network wants its images.
        build: seed -> a backbone of its own.
        hash: of the network's tensors; None if they depend on the seed.
    """

    how: str
    weights: str
    spec: InputSpec
    build: Callable[[int], AnyBackbone]
    hash: str | None


def open_start(how: str, weights: Weights) -> Start:
    """What a word of `--init` means, where `weights` are those of `--weights`."""
    if how == "scratch":
        backbone = weights.backbone
        return Start(how, how, weights.spec, lambda seed: reinitialized(backbone, seed), None)
    name = weights.name
    if how != "pretrained":
        expected = weights.backbone.arch
        weights = open_weights(how.removeprefix("supervised:"))
        name = f"supervised:{weights.name}"
        if weights.backbone.arch != expected:
            raise UserError(
                f"--init {how} is a {weights.backbone.arch}, --weights a {expected}: "
                "compare networks of one architecture"
            )
    return Start(
        how, name, weights.spec, lambda seed: copy.deepcopy(weights.backbone), weights.hash
    )


@dataclasses.dataclass(frozen=True)
class Trial:
    """One training: where it starts, on which labels, with which settings."""

    start: Start
    subset: LabeledSubset
    seed: int
    lr: float
    head_lr_scale: float

    @property
    def label(self) -> str:
        """What to call it in a path."""
        how = self.start.how.partition(":")[0]
        return f"{how}-{self.subset.mode}-{self.subset.fraction:.4g}-seed{self.seed}"


def loop_settings(config: SemisupConfig, trial: Trial) -> LoopSettings:
    """The loop's part of the configuration."""
    return LoopSettings(
        epochs=config.epochs,
        batch_size=config.batch_size,
        lr=trial.lr,
        lr_milestones=config.lr_milestones,
        lr_factor=config.lr_factor,
        momentum=config.momentum,
        nesterov=config.nesterov,
        amp=config.amp,
        skip_bad=config.skip_bad_images,
        seed=trial.seed,
        workers=config.workers,
        log_every=config.log_every,
        save_minutes=config.save_minutes,
        compile=config.compile,
    )


def build_problem(
    model: Classifier, trial: Trial, images: ImageSet, weight_decay: float, key: str
) -> Problem:
    """Everything is trained; the classifier has its own learning rate."""
    spec = trial.start.spec
    parts = ((model.backbone, 1.0), (model.head, trial.head_lr_scale))
    return Problem(
        model=model,
        groups=[
            {"params": list(part.parameters()), "lr_scale": scale, "weight_decay": weight_decay}
            for part, scale in parts
        ],
        loss=cross_entropy,
        samples=Samples(images, finetune_transform(spec), spec, trial.seed),
        labels=torch.from_numpy(images.labels),
        key=key,
    )


def run_trial(
    trial: Trial,
    config: SemisupConfig,
    process: Process,
    output: Path,
    *,
    train: ImageSet,
    test: ImageSet,
    prefix: str = "",
) -> dict[str, Any]:
    """Trains on `train`, and only then looks at `test`; a measured trial is not repeated.

    Returns:
        top1 and top5 in percent, the folder, its key, and the hash of the initial backbone.
    """
    spec, settings = trial.start.spec, loop_settings(config, trial)
    backbone = trial.start.build(trial.seed)
    model = Classifier(backbone, len(train.classes), trial.seed, config.head_init)
    prepare_device(model, process.device)
    check_amp(model, spec.size, process.device, config.amp)
    initial = weights_hash(model.backbone.state_dict())
    parts = repr((trial.head_lr_scale, config.weight_decay, config.head_init, spec, initial))
    sets = (train.fingerprint, test.fingerprint)
    key = config_hash({**settings.decisive, "parts": parts, "sets": sets})
    folder = output / f"{prefix}{trial.label}-{key[:8]}"
    if config.overwrite and process.is_main:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    if dist.agree((folder / "result.json").exists()):
        LOGGER.info(f"{folder.name}: measured before (--overwrite measures again)")
        return json.loads((folder / "result.json").read_text(encoding="utf-8"))
    if process.is_main:
        write_text(folder / "labels.txt", trial.subset.text)
    problem = build_problem(model, trial, train, config.weight_decay, key)
    trainer = SupervisedTrainer(problem, settings, process, folder)
    steps, batch = trainer.steps_per_epoch, min(config.batch_size, len(train))
    LOGGER.info(
        f"{folder.name}: {len(train):,} labelled images of {len(train.classes)} classes, "
        f"{config.epochs} epochs, {steps} step{'s' * (steps > 1)} each, up to {batch} images a step"
    )
    trainer.restore()
    trainer.train()
    ranked = predict(
        model,
        Samples(test, eval_transform(spec), spec, seed=0),
        len(test),
        process,
        batch_size=config.batch_size,
        workers=config.workers,
        skip_bad=config.skip_bad_images,
    )["classifier"]
    truth = torch.from_numpy(test.labels)
    done: dict[str, Any] = {f"top{k}": accuracy(ranked, truth, k) for k in (1, 5)}
    done |= {"key": key, "folder": folder.name, "initial_hash": initial}
    if process.is_main:
        write_json(folder / "result.json", done)
        if not config.keep_checkpoint:
            remove_checkpoints(trainer.last_checkpoint)
    dist.barrier()
    return done

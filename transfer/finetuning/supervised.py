"""The one supervised loop: fine-tuning trains everything with it, linear probes only their heads.

As in pretraining, all randomness is keyed by (seed, step), (seed, epoch) or (seed, epoch, image): a
checkpoint holds weights, optimiser and the number of steps done, and going on from it gives
the run that would have been, bit for bit on a CPU.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from instdisc.errors import UserError
from instdisc.images.loading import EvenBatches, build_loader, keep_valid, to_device
from instdisc.runs.checkpoint import load_last, save_checkpoint
from instdisc.runs.log import LOGGER, MetricsLog, StepBar
from instdisc.runs.signals import StopSignal
from instdisc.training import dist
from instdisc.training.amp import autocast, build_scaler
from instdisc.training.cpu import build_sgd, keep_memory
from instdisc.training.dist import Process
from instdisc.training.loop import LossMeter, SaveOrStop, share_buffers, wrap_parallel
from instdisc.training.schedules import step_decay
from instdisc.training.seed import seed_global, seeded


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopSettings:
    """How a problem is trained; at each milestone (in epochs) the lr falls by `lr_factor`."""

    epochs: int
    batch_size: int
    lr: float
    lr_milestones: tuple[float, ...] = ()
    lr_factor: float = 0.1
    momentum: float = 0.9
    nesterov: bool = False
    amp: str = "off"
    skip_bad: bool = False
    seed: int = 0
    workers: int = 0
    log_every: int = 10
    save_minutes: float = 10.0
    tensorboard: bool = False
    compile: bool = False

    @property
    def decisive(self) -> dict[str, Any]:
        """What a result depends on; the rest may change when a run is resumed."""
        of_the_machine = ("workers", "log_every", "save_minutes", "tensorboard", "compile")
        return {k: v for k, v in dataclasses.asdict(self).items() if k not in of_the_machine}


@dataclasses.dataclass(frozen=True)
class Problem:
    """What is trained.

    Attributes:
        model: inputs -> logits by the name of the head, each `(B, C)`.
        groups: parameters for the optimiser; `lr_scale` multiplies the learning rate.
        loss: (logits by name, labels `(B,)`) -> loss of each image, `(B,)`.
        samples: key (epoch, index) -> (input, index, error message or "").
        labels: class numbers, `(n,)`.
        key: says what all this is; a checkpoint of another key is refused.
    """

    model: nn.Module
    groups: list[dict[str, Any]]
    loss: Callable[[dict[str, Tensor], Tensor], Tensor]
    samples: Dataset[Any]
    labels: Tensor
    key: str


def build_head(width: int, num_classes: int, init: str, seed: int, *key: str) -> nn.Linear:
    """A linear classifier as its source starts it.

    Args:
        width: of its inputs.
        num_classes: of its outputs.
        init: `normal`, of deviation 0.01 without biases, or `uniform`, which is torch's own.
        seed: the run's.
        key: what the draw is for.
    """
    with seeded(seed, *key):
        layer = nn.Linear(width, num_classes)
    if init == "normal":
        with seeded(seed, *key):  # as if nothing else had been drawn
            nn.init.normal_(layer.weight, std=0.01)
        nn.init.zeros_(layer.bias)
    return layer


class SupervisedTrainer:
    """One run over a problem: model, optimiser, and the loop over steps."""

    def __init__(
        self, problem: Problem, settings: LoopSettings, process: Process, folder: Path
    ) -> None:
        self.problem, self.settings, self.process = problem, settings, process
        self.folder = folder
        self.last_checkpoint = folder / "last.pt"
        n = len(problem.labels)
        self.plan = EvenBatches(n, min(settings.batch_size, n), settings.seed, num_steps=0)
        self.steps_per_epoch = self.plan.steps_per_epoch
        self.num_steps = self.steps_per_epoch * settings.epochs
        smallest = n // self.steps_per_epoch
        if smallest < 2 * process.world_size:
            raise UserError(
                f"{n} labelled images give batches of {smallest} for {process.world_size} "
                "process(es), and each needs two for batch norm: more labels or fewer processes"
            )
        self.labels = problem.labels.to(process.device)
        self.model = problem.model.to(process.device).to(memory_format=torch.channels_last)
        self.optimizer = build_sgd(
            problem.groups,
            process.device,
            lr=settings.lr,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
        )
        self.scaler = build_scaler(process.device, settings.amp)
        self.parallel_model = wrap_parallel(self.model, process, compiled=settings.compile)
        self.step = 0
        self.losses = LossMeter(process.device)

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs."""
        return {
            "key": self.problem.key,
            "step": self.step,
            "epoch_loss": self.losses.total,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def restore(self) -> None:
        """Goes on from last.pt, if there is one; from the one before it, if it is damaged."""
        with dist.first_process_first(self.process):
            state = load_last(self.last_checkpoint, "train")
        if not dist.agree(state is not None):
            return
        if state is None:
            raise UserError(f"{self.last_checkpoint} is not seen by all processes: share its disk")
        if state["key"] != self.problem.key:
            raise UserError(f"{self.last_checkpoint} is of another run: remove it")
        self.step = state["step"]
        self.losses = LossMeter(self.process.device, state["epoch_loss"])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        if self.step < self.num_steps:
            LOGGER.info(f"going on after step {self.step} of {self.num_steps}")

    def train_step(self, batch: Any) -> Tensor:
        """One optimiser step; averaged over the processes, the mean loss over the batch."""
        settings, device = self.settings, self.process.device
        inputs, indices, errors = batch
        report = functools.partial(LOGGER.warning, "left out: %s") if settings.skip_bad else None
        valid = keep_valid(errors, device, report)
        for group in self.optimizer.param_groups:
            epoch = self.step / self.steps_per_epoch
            rate = step_decay(settings.lr, epoch, settings.lr_milestones, factor=settings.lr_factor)
            group["lr"] = rate * group["lr_scale"]
        # Dropout draws from torch's global generator: key it by the step, like everything else.
        seed_global(settings.seed, "step", self.step, self.process.rank)
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(device, settings.amp):
            outputs = self.parallel_model(to_device(inputs, device))
        labels = self.labels[indices.to(device, non_blocking=True)]
        first, last = self.plan.bounds(self.step)
        logits = {name: value.float() for name, value in outputs.items()}
        part = (self.problem.loss(logits, labels) * valid).sum() / (last - first)
        # The processes' gradients are averaged, and their shares of a batch may differ by one.
        loss = part * self.process.world_size
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        return loss.detach()

    def train(self) -> None:
        """Runs to the last epoch, or to the first signal."""
        settings, process = self.settings, self.process
        if self.step >= self.num_steps:
            return
        metrics = MetricsLog(
            self.folder, step=self.step, tensorboard=settings.tensorboard, enabled=process.is_main
        )
        plan = dataclasses.replace(
            self.plan,
            num_steps=self.num_steps,
            start=self.step,
            rank=process.rank,
            world_size=process.world_size,
        )
        on_gpu = process.device.type == "cuda"
        loader = build_loader(self.problem.samples, plan, settings.workers, pin_memory=on_gpu)
        bar = StepBar(self.num_steps, self.step, plan.batch_size, enabled=process.is_main)
        self.parallel_model.train()
        with contextlib.closing(metrics), contextlib.closing(bar), StopSignal() as stop:
            saves = SaveOrStop(stop, settings.save_minutes)
            batches = iter(loader)
            keep_memory(process.device)  # the loader processes have been started without it
            for batch in batches:
                self.losses.add(self.train_step(batch))
                self._log(metrics, bar)
                finished = self.step == self.num_steps
                if saves.is_due(ended=finished, failed=self.losses.failed_before()):
                    self.save()
                    saves.saved(self.step, self.last_checkpoint, finished=finished)

    def _read_loss(self) -> float:
        """The mean loss of the batch; all processes read it."""
        loss = self.losses.read()
        if not math.isfinite(self.losses.total):
            raise UserError(f"the loss is {loss} at step {self.step}: lower --lr")
        return loss

    def _log(self, metrics: MetricsLog, bar: StepBar) -> None:
        epoch, epochs = self.step / self.steps_per_epoch, self.settings.epochs
        is_told = self.step % self.settings.log_every == 0 or self.step == 1
        ended = self.step % self.steps_per_epoch == 0
        loss = self._read_loss() if is_told or ended else None
        bar.advance(loss, epoch)
        if is_told:
            rate = self.optimizer.param_groups[0]["lr"]
            metrics.write(self.step, epoch=epoch, loss=loss, lr=rate)
        if not ended:
            return
        mean = self.losses.end_epoch() / self.steps_per_epoch
        metrics.write(self.step, epoch=epoch, epoch_loss=mean)
        if epoch % max(1, epochs // 10) == 0 or epoch == epochs:
            LOGGER.info(f"epoch {epoch:.0f}/{epochs}  loss {mean:.4f}")

    def save(self) -> None:
        """Writes last.pt, by the first process, once all are found to have gone well."""
        self._read_loss()
        share_buffers([self.model])
        if self.process.is_main:
            save_checkpoint(self.last_checkpoint, "train", self.state(), keep_previous=True)
        dist.barrier()

"""The training loop, top to bottom: step, bank update, monitor, checkpoint, resume.

All randomness is keyed by (seed, step), (seed, epoch) or (seed, epoch, image); see
instdisc/training/seed.py. So a checkpoint holds only weights, bank, optimiser and the number of
steps done, and going on from it gives the run that would have been, bit for bit on a CPU with as
many threads.
"""

import contextlib
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from instdisc.cli import to_dict
from instdisc.errors import UserError
from instdisc.images.loading import BatchPlan, Samples, build_loader
from instdisc.images.transforms import pretrain_transform
from instdisc.networks.backbones import Embedding, backbone_payload
from instdisc.runs.checkpoint import save_checkpoint
from instdisc.runs.folders import provenance
from instdisc.runs.locks import lock_folder
from instdisc.runs.log import LOGGER, setup_logging
from instdisc.runs.signals import StopSignal
from instdisc.training import dist
from instdisc.training.amp import autocast, build_scaler, check_amp
from instdisc.training.cpu import prepare_cpu
from instdisc.training.schedules import step_decay
from instdisc.training.seed import seed_global
from instdisc.training.timing import StepClock
from pretrain.bank import build_bank
from pretrain.config import PretrainConfig
from pretrain.criterion import Criterion
from pretrain.journal import Journal
from pretrain.nan_guard import NanGuard
from pretrain.session import Session


class Trainer:
    """One pretraining run: model, bank, optimiser, and the loop over steps."""

    def __init__(self, session: Session) -> None:
        config, process = session.config, session.process
        self.session, self.config, self.process = session, config, process
        n = len(session.train)
        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        self.layout = layout
        self.model = session.build_model().to(process.device).to(memory_format=layout)
        prepare_cpu(self.model, process.device)
        check_amp(self.model, config.image_size, process.device, config.amp)
        self.bank = build_bank(config, n, process)
        self.criterion = Criterion(config, n).to(process.device)
        self.optimizer = build_optimizer(
            config, [*self.model.parameters(), *self.criterion.parameters()]
        )
        self.scaler = build_scaler(process.device, config.amp)
        self.parallel_model = self._parallel(self.model)
        self.parallel_criterion = self._parallel(self.criterion)
        self.steps_per_epoch = n // config.batch_size
        self.num_steps = self.steps_per_epoch * config.epochs
        self.clock = StepClock(process.device)
        self.step = 0
        self.epoch_loss = 0.0  # sum over the steps of this epoch so far
        self.bad_images: set[str] = set()
        self.nan_guard = NanGuard(session, (self.model, self.criterion))
        # Equation 1 has no normalisation; with unit rows and no temperature it cannot be learnt.
        self.unit_features = config.objective != "parametric"

    def _parallel(self, module: nn.Module) -> nn.Module:
        if self.process.world_size == 1 or not any(True for _ in module.parameters()):
            return module
        on_gpu = self.process.device.type == "cuda"
        return DistributedDataParallel(module, device_ids=[self.process.device] if on_gpu else None)

    def state(self, bank: Tensor) -> dict[str, Any]:
        """Everything a resumed run needs, with all rows of the bank."""
        return {
            "config": to_dict(self.config),
            "data_fingerprint": self.session.train.fingerprint,
            "step": self.step,
            "epoch_loss": self.epoch_loss,
            "num_skipped": self.nan_guard.num_skipped,
            "model": self.model.state_dict(),
            "criterion": self.criterion.state_dict(),
            "bank": bank,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over the state of a checkpoint, which Session has found to fit this run."""
        self.step = state["step"]
        self.epoch_loss = state["epoch_loss"]
        self.nan_guard.num_skipped = state.get("num_skipped", 0)
        self.model.load_state_dict(state["model"])
        self.criterion.load_state_dict(state["criterion"])
        self.bank.load(state["bank"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def _mean_over_processes(self, value: Tensor) -> Tensor:
        return dist.all_reduce_sum(value) / self.process.world_size

    def _keep_valid(self, indices: Tensor, errors: list[str]) -> Tensor:
        """1 for each image that could be read, 0 for the others, `(B,)`; stops unless skipping."""
        for error in filter(None, errors):
            if not self.config.skip_bad_images:
                raise UserError(f"{error}: remove or replace it, or pass --skip-bad-images")
            if error not in self.bad_images:
                self.bad_images.add(error)
                self.session.record_bad_image(error)
        valid = torch.tensor([float(not error) for error in errors])
        return valid.to(self.process.device, non_blocking=True)

    def train_step(self, batches: Any) -> Tensor:
        """One optimiser step and the bank update after it; the mean loss of the local images."""
        config, device = self.config, self.process.device
        self.clock.start()
        share = config.batch_size // self.process.world_size
        micro = share // config.accumulate
        for group in self.optimizer.param_groups:
            group["lr"] = step_decay(
                config.lr,
                self.step / self.steps_per_epoch,
                config.lr_milestones,
                warmup_epochs=config.warmup_epochs,
            )
        # Dropout draws from torch's global generator: key it by the step, like everything else.
        seed_global(config.seed, "step", self.step, self.process.rank)
        self.optimizer.zero_grad(set_to_none=True)
        self.nan_guard.before_step()
        mark = self.clock.mark
        seen: list[tuple[Tensor, Tensor, Tensor]] = []
        total = torch.zeros((), device=device)
        for part in range(config.accumulate):
            pixels, indices, errors = next(batches)
            valid = self._keep_valid(indices, errors)
            pixels = pixels.to(device, non_blocking=True, memory_format=self.layout)
            indices = indices.to(device, non_blocking=True)
            first = self.process.rank * share + part * micro
            mark("data")
            with self._sync_gradients(last=part == config.accumulate - 1):
                with autocast(device, config.amp):
                    features = self.parallel_model(pixels, normalized=self.unit_features)
                mark("forward")
                # The backward pass reaches the features when that of the objective is done.
                features.register_hook(lambda _: mark("objective"))
                losses = self.parallel_criterion(
                    features,
                    indices,
                    self.bank,
                    step=self.step,
                    rows=range(first, first + micro),
                    mean_over_processes=self._mean_over_processes,
                )
                loss = (losses * valid).sum() / share
                mark("objective")
                self.scaler.scale(loss).backward()
            mark("backward")
            total += loss.detach()
            rows = features.detach()
            rows = rows if self.unit_features else nn.functional.normalize(rows, dim=1)
            seen.append((indices, rows, valid))
        if self.nan_guard.accepts(total, self.step, (part[0] for part in seen)):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            mark("optimizer")
            self._update_bank(*(torch.cat(column) for column in zip(*seen, strict=True)))
            mark("bank")
        else:
            total = torch.zeros_like(total)
        self.step += 1
        return total

    def _update_bank(self, indices: Tensor, features: Tensor, valid: Tensor) -> None:
        """Every process applies the updates of all processes, in the same order."""
        indices, features, valid = (dist.all_gather_rows(t) for t in (indices, features, valid))
        kept = valid.bool()
        self.bank.update(indices[kept], features[kept])

    @contextlib.contextmanager
    def _sync_gradients(self, *, last: bool) -> Any:
        """Gradients are averaged over processes once a step, with the last micro-batch."""
        with contextlib.ExitStack() as stack:
            for module in (self.parallel_model, self.parallel_criterion):
                if isinstance(module, DistributedDataParallel) and not last:
                    stack.enter_context(module.no_sync())
            yield

    def train(self) -> None:
        """Runs to the last epoch, or to the first signal."""
        config, session = self.config, self.session
        journal = Journal(session, self.clock, step=self.step, steps_per_epoch=self.steps_per_epoch)
        plan = BatchPlan(
            num_images=len(session.train),
            batch_size=config.batch_size,
            seed=config.seed,
            num_steps=self.num_steps,
            start=self.step,
            rank=self.process.rank,
            world_size=self.process.world_size,
            accumulate=config.accumulate,
        )
        transform = pretrain_transform(
            session.spec, min_scale=config.min_crop_scale, flip=config.flip
        )
        samples = Samples(session.train, transform, session.spec, config.seed)
        loader = build_loader(
            samples, plan, config.workers, pin_memory=self.process.device.type == "cuda"
        )
        batches = iter(loader)
        saved = time.monotonic()
        self.parallel_model.train()
        with contextlib.closing(journal), StopSignal() as stop:
            if not self.step:
                journal.tell_untrained(self._measure())
            while self.step < self.num_steps:
                local = self.train_step(batches)
                loss, stopping = self._share(local, stop.raised)
                self.epoch_loss += loss
                lr = self.optimizer.param_groups[0]["lr"]
                journal.tell_step(self.step, loss, lr, self.criterion.normalizer)
                ended = self.step % self.steps_per_epoch == 0
                if ended:
                    self._end_epoch(journal)
                if ended or stopping or time.monotonic() - saved >= 60 * config.save_minutes:
                    self.save()
                    saved = time.monotonic()
                if stopping:
                    raise stop.interrupt(self.step, session.last_checkpoint)

    def _share(self, loss: Tensor, stopping: bool) -> tuple[float, bool]:
        """The mean loss over processes, and whether any of them was told to stop."""
        both = torch.stack([loss, torch.full_like(loss, float(stopping))])
        both = dist.all_reduce_sum(both)
        return both[0].item() / self.process.world_size, bool(both[1].item() > 0)

    def _end_epoch(self, journal: Journal) -> None:
        epoch, config = self.step // self.steps_per_epoch, self.config
        self.bank.compare_copies(self.process.device)
        due = config.monitor_every and epoch % config.monitor_every == 0
        measured = self._measure() if due or epoch == config.epochs else {}
        journal.tell_epoch(self.step, self.epoch_loss / self.steps_per_epoch, measured)
        self.epoch_loss = 0.0

    def _measure(self) -> dict[str, float]:
        """What the monitor finds, if the run has one."""
        monitor = self.session.monitor
        if monitor is None:
            return {}
        rows = self.bank.assemble(everywhere=True)
        assert rows is not None
        return monitor.measure(self.model, rows.float())

    def save(self) -> None:
        """Writes backbone.pt, then last.pt, by the first process; all of them take part."""
        self.nan_guard.check_weights(self.step)
        rows = self.bank.assemble()
        if self.session.is_main:
            assert rows is not None
            # In this order: who finds a finished last.pt has the backbone that belongs to it.
            save_backbone(self.session, self.model, self.step / self.steps_per_epoch)
            last, state = self.session.last_checkpoint, self.state(rows)
            save_checkpoint(last, "train", state, keep_previous=True)
        dist.barrier()


def build_optimizer(
    config: PretrainConfig, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer that the run names."""
    # fused: one pass over the weights, a fifth of the step for VGG16 on a CPU
    if config.optimizer == "adamw":
        return torch.optim.AdamW(
            parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True
        )
    return torch.optim.SGD(
        parameters,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        fused=True,
    )


def save_backbone(session: Session, model: Embedding, epoch: float) -> None:
    """Writes the interface to everything downstream."""
    pretraining = {
        "config": to_dict(session.config),
        "dataset": session.train.dataset,
        "data_fingerprint": session.train.fingerprint,
        "epoch": epoch,
        "provenance": provenance(),
    }
    payload = {
        **backbone_payload(model),
        "input": session.spec.to_dict(),
        "pretraining": pretraining,
    }
    save_checkpoint(session.output / "backbone.pt", "backbone", payload)


def pretrain(config: PretrainConfig) -> Path:
    """Trains, or goes on training, and returns the backbone's file."""
    process = dist.init_process(config.device)
    setup_logging(None, is_main=process.is_main)
    session = Session(config, process)
    backbone = session.output / "backbone.pt"
    try:
        with lock_folder(session.output) if process.is_main else contextlib.nullcontext():
            _train(session)
        return backbone
    finally:
        dist.close()


def _train(session: Session) -> None:
    config = session.config
    checkpoint = session.find_checkpoint()
    trainer = Trainer(session)
    if checkpoint is not None:
        trainer.restore(checkpoint)
    if trainer.step >= trainer.num_steps:
        LOGGER.info(f"{session.output} is finished ({config.epochs} epochs): nothing to do")
        return
    session.open_folder()
    LOGGER.info(session.describe(trainer.model))
    if trainer.step:
        LOGGER.info(f"going on after step {trainer.step} of {trainer.num_steps}")
    trainer.train()
    LOGGER.info(f"done: {session.output / 'backbone.pt'}")

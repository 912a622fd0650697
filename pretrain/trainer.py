"""The training loop, top to bottom: step, bank update, monitor, checkpoint, resume.

All randomness is keyed by (seed, step), (seed, epoch) or (seed, epoch, image); see
instdisc/training/seed.py. So a checkpoint holds only weights, bank, optimiser and the number of
steps done, and going on from it gives the run that would have been, bit for bit on a CPU with as
many threads.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from instdisc.cli import to_dict
from instdisc.images.loading import BatchPlan, Samples, build_loader, keep_valid, to_device
from instdisc.images.transforms import pretrain_transform
from instdisc.networks.backbones import backbone_payload
from instdisc.runs.checkpoint import copy_to_host, save_checkpoint
from instdisc.runs.folders import provenance, read_jsonl
from instdisc.runs.locks import lock_folder
from instdisc.runs.log import LOGGER, setup_logging
from instdisc.runs.row_files import remove_unnamed
from instdisc.runs.signals import StopSignal
from instdisc.training import dist
from instdisc.training.amp import autocast, build_scaler, check_amp
from instdisc.training.cpu import build_sgd, keep_memory
from instdisc.training.draws import draws_of
from instdisc.training.loop import (
    LossMeter,
    SaveOrStop,
    prepare_device,
    share_buffers,
    wrap_parallel,
)
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
        self.model = session.build_model().to(process.device).to(memory_format=layout)
        prepare_device(self.model, process.device)
        check_amp(self.model, config.image_size, process.device, config.amp)
        self.bank = build_bank(config, n, process)
        self.criterion = Criterion(config, n).to(process.device)
        self.optimizer = build_optimizer(
            config, [*self.model.parameters(), *self.criterion.parameters()], process.device
        )
        self.scaler = build_scaler(process.device, config.amp)
        self.parallel_model = wrap_parallel(self.model, process, compiled=config.compile)
        self.parallel_criterion = wrap_parallel(self.criterion, process)
        self.steps_per_epoch = n // config.batch_size
        self.num_steps = self.steps_per_epoch * config.epochs
        self.clock = StepClock(process.device)
        self.step = 0
        self.losses = LossMeter(process.device)
        self.lacks_row = False  # it went on from the end of an epoch that was not measured yet
        self._copied: dict[str, Any] = {}  # what was last saved, for its memory
        self.bad_images: set[str] = set()
        self.nan_guard = NanGuard(session, (self.model, self.criterion))
        # Equation 1 has no normalisation; with unit rows and no temperature it cannot be learnt.
        self.unit_features = config.objective != "parametric"

    def state(self) -> dict[str, Any]:
        """Everything a resumed run needs but the rows of the bank."""
        return {
            "config": to_dict(self.config),
            "data_fingerprint": self.session.train.fingerprint,
            "draws": draws_of(len(self.session.train)),
            "step": self.step,
            "epoch_loss": self.losses.total,
            "num_skipped": self.nan_guard.num_skipped,
            "model": self.model.state_dict(),
            "criterion": self.criterion.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Takes over the state of a checkpoint, which Session has found to fit this run."""
        self.step = state["step"]
        ended = 0 < self.step <= self.num_steps and self.step % self.steps_per_epoch == 0
        self.lacks_row = ended and self._lacks_row()
        total = 0.0 if ended and not self.lacks_row else state["epoch_loss"]
        self.losses = LossMeter(self.process.device, total)
        self.nan_guard.num_skipped = state.get("num_skipped", 0)
        self.model.load_state_dict(state["model"])
        self.criterion.load_state_dict(state["criterion"])
        self.bank.load(state["bank"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def _lacks_row(self) -> bool:
        """Whether metrics.jsonl has no row of the epoch that ends with this step."""
        if not self.session.is_main:
            return dist.agree(False)
        rows = read_jsonl(self.session.output / "metrics.jsonl")
        return dist.agree(not any(r["step"] == self.step and "epoch_loss" in r for r in rows))

    def _mean_over_processes(self, value: Tensor) -> Tensor:
        return dist.all_reduce_sum(value) / self.process.world_size

    def _record_bad_image(self, error: str) -> None:
        if error not in self.bad_images:
            self.bad_images.add(error)
            self.session.record_bad_image(error)

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
        report = self._record_bad_image if config.skip_bad_images else None
        mark = self.clock.mark
        seen: list[tuple[Tensor, Tensor, Tensor]] = []
        total = torch.zeros((), device=device)
        for part in range(config.accumulate):
            pixels, indices, errors = next(batches)
            valid = keep_valid(errors, device, report)
            pixels = to_device(pixels, device, channels_last=config.channels_last)
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
        indices, rows, valid = (torch.cat(column) for column in zip(*seen, strict=True))
        indices, rows, valid, losses = self._gather(indices, rows, valid, total)
        mark("bank")
        if self.nan_guard.accepts(losses, self.step, indices):
            self.scaler.step(self.optimizer)
            self.scaler.update()
            mark("optimizer")
            self.bank.update(indices, rows, valid)
            mark("bank")
        else:
            total = torch.zeros_like(total)
        self.step += 1
        return total

    def _gather(
        self, indices: Tensor, features: Tensor, valid: Tensor, loss: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Images, features and flags of all processes in order, and the loss of each, `(W,)`.

        Every process applies the bank updates of all, in the same order.
        """
        count, world_size = len(indices), self.process.world_size
        if world_size == 1:
            return indices, features, valid > 0, loss[None]
        # Bits of four columns in one, for one collective.
        parts = (indices[:, None], features.float(), valid[:, None], loss.expand(count, 1))
        packed = dist.all_gather_rows(torch.cat([part.view(torch.int32) for part in parts], dim=1))
        place, rows, flags, losses = packed.split([2, features.shape[1], 1, 1], dim=1)
        return (
            place.contiguous().view(torch.int64).squeeze(1),
            rows.contiguous().view(torch.float32),
            flags.squeeze(1).contiguous().view(torch.float32) > 0,
            losses[::count, 0].contiguous().view(torch.float32),
        )

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
        keep_memory(self.process.device)  # the loader processes have been started without it
        self.parallel_model.train()
        with contextlib.closing(journal), StopSignal() as stop, session.writer:
            saves = SaveOrStop(stop, config.save_minutes)
            if not self.step:
                journal.tell_untrained(self._measure(stop))
            elif self.lacks_row:
                self._tell_epoch(journal, stop)
            while self.step < self.num_steps:
                self.losses.add(self.train_step(batches))
                lr = self.optimizer.param_groups[0]["lr"]
                journal.tell_step(self.step, self._read_loss, lr, self.criterion.normalizer)
                ended = self.step % self.steps_per_epoch == 0
                if saves.is_due(ended=ended):
                    self._settle()
                    self.save()
                    if ended:
                        self._tell_epoch(journal, stop)
                    finished = self.step == self.num_steps
                    saves.saved(self.step, session.last_checkpoint, finished=finished)

    def _read_loss(self) -> float:
        """The mean loss of the latest step over all processes, which all read it."""
        self.nan_guard.check_latest()
        return self.losses.read()

    def _settle(self) -> None:
        """Before anything is evaluated or saved: losses are finite, processes have one state."""
        self._read_loss()
        share_buffers([self.model, self.criterion])

    def _tell_epoch(self, journal: Journal, stop: StopSignal) -> None:
        """Measures an epoch that is saved, and writes its row; a resumed run does what is left."""
        epoch, config = self.step // self.steps_per_epoch, self.config
        due = config.monitor_every and epoch % config.monitor_every == 0
        measured = self._measure(stop) if due or epoch == config.epochs else {}
        journal.tell_epoch(self.step, self.losses.end_epoch() / self.steps_per_epoch, measured)

    def _measure(self, stop: StopSignal) -> dict[str, float]:
        """What the monitor finds, if the run has one; a stop signal ends it between two batches."""
        monitor = self.session.monitor
        if monitor is None:
            return {}

        def check() -> None:
            if dist.agree(stop.raised):
                raise stop.interrupt(self.step, self.session.last_checkpoint)

        dist.barrier()  # one of the processes may have taken long to list the validation images
        rows = self.bank.assemble().float() if monitor.val is not None else None
        return monitor.measure(self.model, rows, check)

    def save(self) -> None:
        """Copies the state to host memory; a thread of the first process writes it meanwhile.

        Of a sharded bank nothing is copied: each process has a thread that writes its rows.
        """
        self.nan_guard.check_weights(self.step)
        if self.step % self.steps_per_epoch == 0:
            self.bank.compare_copies(self.process.device)
        with dist.first_process_first(self.process):
            self.session.writer.wait()  # one copy at a time in memory
        write_rows = self.bank.start_saving(self.session.last_checkpoint)
        if self.session.is_main:
            rows = {"bank": self.bank.vectors} if write_rows is None else {}
            content = {"backbone": backbone_content(self), "state": {**self.state(), **rows}}
            self._copied = copied = copy_to_host(content, self._copied)
            backbone, state = copied["backbone"], copied["state"]
            self.session.writer.start(lambda: _write(self.session, backbone, state, write_rows))
        elif write_rows is not None:
            self.session.writer.start(write_rows)


def build_optimizer(
    config: PretrainConfig, parameters: list[nn.Parameter], device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer that the run names."""
    if config.optimizer == "adamw":
        return torch.optim.AdamW(
            parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True
        )
    return build_sgd(
        parameters,
        device,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
    )


def backbone_content(trainer: Trainer) -> dict[str, Any]:
    """The interface to everything downstream."""
    session = trainer.session
    pretraining = {
        "config": to_dict(session.config),
        "dataset": session.train.dataset,
        "data_fingerprint": session.train.fingerprint,
        "epoch": trainer.step / trainer.steps_per_epoch,
    }
    return {
        **backbone_payload(trainer.model),
        "input": session.spec.to_dict(),
        "pretraining": pretraining,
    }


def _write(
    session: Session,
    backbone: dict[str, Any],
    state: dict[str, Any],
    write_rows: Callable[[], dict[str, Any]] | None,
) -> None:
    """In this order: who finds a finished last.pt has the rows and backbone that belong to it."""
    if write_rows is not None:
        state = {**state, "bank": write_rows()}
    backbone["pretraining"]["provenance"] = provenance()
    save_checkpoint(session.output / "backbone.pt", "backbone", backbone)
    save_checkpoint(session.last_checkpoint, "train", state, keep_previous=True)
    remove_unnamed(session.last_checkpoint)


def pretrain(config: PretrainConfig) -> Path:
    """Trains, or goes on training, and returns the backbone's file."""
    with dist.joined(config.device, config.threads) as process:
        setup_logging(None, is_main=process.is_main)
        session = Session(config, process)
        with contextlib.ExitStack() as stack:
            with dist.first_process_first(process):
                if process.is_main:
                    stack.enter_context(lock_folder(session.output))
            _train(session)
        return session.output / "backbone.pt"


def _train(session: Session) -> None:
    trainer = _build_trainer(session)
    if trainer.step >= trainer.num_steps and not trainer.lacks_row:
        LOGGER.info(f"{session.output} is finished ({session.config.epochs} epochs): nothing to do")
        return
    session.open_folder()
    LOGGER.info(session.describe(trainer.model))
    if trainer.step:
        LOGGER.info(f"going on after step {trainer.step} of {trainer.num_steps}")
    trainer.train()
    LOGGER.info(f"done: {session.output / 'backbone.pt'}")


def _build_trainer(session: Session) -> Trainer:
    """A trainer at the step to go on from; the checkpoint is not kept in memory."""
    checkpoint = session.find_checkpoint()
    trainer = Trainer(session)
    if checkpoint is not None:
        trainer.restore(checkpoint)
    return trainer

"""The training loop: Detectron2's own, with keyed randomness, atomic checkpoints and a way to stop.

Every draw of an iteration (order, augmentation, which regions are sampled) is a function of the
seed and the iteration, so that a run which was killed and resumed goes where it would have gone.
"""

import json
import time
from pathlib import Path
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.engine import HookBase, SimpleTrainer, hooks
from detectron2.modeling import build_model
from detectron2.solver import build_lr_scheduler, build_optimizer
from detectron2.utils.events import JSONWriter, TensorboardXWriter
from fvcore.nn.precise_bn import get_bn_modules

from instdisc.errors import UserError
from instdisc.runs.checkpoint import DamagedFile, load_file, set_aside, torch_file
from instdisc.runs.folders import read_jsonl, write_text
from instdisc.runs.log import LOGGER, StepBar
from instdisc.runs.signals import StopSignal
from instdisc.training.amp import autocast
from instdisc.training.dist import Process
from instdisc.training.loop import SaveOrStop, share_buffers, wrap_parallel
from instdisc.training.seed import seed_global, seeded
from transfer.detection.data import DetectionData, build_train_loader, check_readable
from transfer.detection.evaluation import detect, measure, summarise
from transfer.detection.roi_heads import add_dropout  # registers TransferRes5ROIHeads too

WRITE_PERIOD = 20
KEPT = 2  # checkpoints beside model_final.pth


class DetectionTrainer(SimpleTrainer):
    """SimpleTrainer for one run folder.

    Attributes:
        cfg: the whole recipe.
        detector: the model without the wrapper of several processes.
        checkpointer: of the run folder.
    """

    def __init__(self, cfg: CfgNode, data: DetectionData, seed: int, process: Process) -> None:
        with seeded(seed, "detector"):
            model = build_model(cfg)
            add_dropout(model, cfg.TRANSFER.FC_DROPOUT)
        self.detector = model
        optimizer = build_optimizer(cfg, model)
        super().__init__(wrap_parallel(model, process), None, optimizer)
        self._batches: Any = None
        self.cfg, self.data, self.seed, self.process = cfg, data, seed, process
        self.scheduler = build_lr_scheduler(cfg, optimizer)
        self.checkpointer = AtomicCheckpointer(self.detector, cfg.OUTPUT_DIR, trainer=self)
        self.register_hooks([hooks.LRScheduler(optimizer, self.scheduler)])

    def restore(self) -> int:
        """Goes back to the last checkpoint of the folder; the iteration to go on with."""
        last = self.checkpointer.last()
        if last is None:
            return 0
        self.checkpointer.load(str(last))
        return self.iter + 1

    def fit(self, start: int) -> None:
        """Trains from an iteration to the end; leaves model_final.pth."""
        folder = Path(self.cfg.OUTPUT_DIR)
        rank, world_size = self.process.rank, self.process.world_size
        end = self.cfg.SOLVER.MAX_ITER
        loader = build_train_loader(self.cfg, self.data, self.seed, start, end, rank, world_size)
        self._batches = map(check_readable, iter(loader))
        with StopSignal() as stop:
            own: list[HookBase] = [hooks.IterationTimer()]
            if self.cfg.TEST.PRECISE_BN.ENABLED and get_bn_modules(self.detector):
                count = self.cfg.TEST.PRECISE_BN.NUM_ITER
                batches = build_train_loader(
                    self.cfg, self.data, self.seed, 0, count, rank, world_size
                )
                own.append(hooks.PreciseBN(0, self.model, batches, count))
            if self.cfg.TEST.EVAL_PERIOD:
                period = self.cfg.TEST.EVAL_PERIOD
                own.append(hooks.EvalHook(period, self._measure, eval_after_train=False))
            if self.process.is_main:
                _drop_rows_from(folder / "metrics.json", start)
                writers = [
                    JSONWriter(str(folder / "metrics.json")),
                    TensorboardXWriter(str(folder)),
                ]
                own += [hooks.PeriodicWriter(writers, period=WRITE_PERIOD), _Progress(self)]
            self.register_hooks([*own, _SaveHook(self, SaveOrStop(stop))])
            try:
                self.train(start, end)
            except FloatingPointError:
                raise UserError(
                    f"the loss became infinite or NaN at iteration {self.iter}: lower "
                    "SOLVER.BASE_LR or raise SOLVER.WARMUP_ITERS; the last good checkpoint is "
                    f"{self.checkpointer.last() or 'none'}"
                ) from None

    def run_step(self) -> None:
        """One iteration; which regions are sampled is keyed by it.

        As Detectron2's SimpleTrainer, with its AMP in bf16, which needs no loss scaling and runs
        on a CPU too.
        """
        seed_global(self.seed, "step", self.iter, self.process.rank)
        start = time.perf_counter()
        batch = next(self._batches)
        waited = time.perf_counter() - start
        with autocast(self.process.device, "bf16" if self.cfg.SOLVER.AMP.ENABLED else "off"):
            losses = self.model(batch)
        self.optimizer.zero_grad()
        sum(losses.values()).backward()
        self.after_backward()
        self._write_metrics(losses, waited)  # before the step: it raises if they are not finite
        self.optimizer.step()

    def _measure(self) -> dict[str, float]:
        """TEST.EVAL_PERIOD: the APs of the detector as it is, for log and metrics."""
        share_buffers([self.detector])
        found = detect(self.detector, self.cfg, self.data, self.process)
        self.model.train()
        if not self.process.is_main:
            return {}
        values = measure(found, self.data).values
        LOGGER.info(f"{summarise(values)} after iteration {self.iter}")
        return values


class AtomicCheckpointer(DetectionCheckpointer):
    """Detectron2's files (model_0000999.pth, last_checkpoint); each appears complete, synced.

    The last `KEPT` and model_final.pth stay.
    """

    def save(self, name: str, **kwargs: Any) -> None:
        """Writes model, trainer state and `kwargs`, then makes it the last checkpoint."""
        if not (self.save_dir and self.save_to_disk):
            return
        content: dict[str, Any] = {"model": self.model.state_dict()}
        content.update((key, part.state_dict()) for key, part in self.checkpointables.items())
        content.update(kwargs)
        folder = Path(self.save_dir)
        with torch_file(folder / f"{name}.pth") as file:
            torch.save(content, file)
        self.tag_last_checkpoint(f"{name}.pth")
        for old in sorted(folder.glob("model_[0-9]*.pth"))[:-KEPT]:
            old.unlink()

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Names the file to go on from."""
        write_text(Path(self.save_dir) / "last_checkpoint", last_filename_basename)

    def last(self) -> Path | None:
        """The newest checkpoint that loads; a damaged one is set aside with its end `.damaged`.

        Raises:
            UserError: there are checkpoints and none loads.
        """
        folder = Path(self.save_dir)
        found = [
            path
            for path in (*sorted(folder.glob("model_[0-9]*.pth")), folder / "model_final.pth")
            if path.is_file()
        ]
        for path in reversed(found):
            try:
                load_file(path, mapped=True)
                return path
            except DamagedFile as error:
                self.logger.warning(f"{error}; it is set aside ({set_aside(path).name})")
            except UserError:
                if path.exists():  # else another process has set it aside
                    raise
        if found:
            raise UserError(f"no checkpoint in {folder} loads: start again with --no-resume")
        return None


def _drop_rows_from(path: Path, start: int) -> None:
    """Leaves out the rows of iterations that are about to be repeated."""
    kept = [row for row in read_jsonl(path) if row.get("iteration", -1) < start]
    write_text(path, "".join(json.dumps(row) + "\n" for row in kept))


class _Progress(HookBase):
    """Rate, loss and time left, on a terminal as a bar and elsewhere as lines."""

    def __init__(self, trainer: DetectionTrainer) -> None:
        self.batch_size = trainer.cfg.SOLVER.IMS_PER_BATCH
        self.num_images = len(trainer.data.train)

    def before_train(self) -> None:
        """Opens the bar."""
        self.bar = StepBar(self.trainer.max_iter, self.trainer.start_iter, self.batch_size)

    def after_step(self) -> None:
        """Counts one iteration."""
        loss = self.trainer.storage.history("total_loss").latest()
        self.bar.advance(loss, (self.trainer.iter + 1) * self.batch_size / self.num_images)

    def after_train(self) -> None:
        """Takes the bar away."""
        self.bar.close()


class _SaveHook(HookBase):
    """Saves every CHECKPOINT_PERIOD and at the end; on a signal saves and ends the run."""

    def __init__(self, trainer: DetectionTrainer, saves: SaveOrStop) -> None:
        self.saves, self.detector = saves, trainer.detector
        self.period = trainer.cfg.SOLVER.CHECKPOINT_PERIOD
        self.checkpointer = trainer.checkpointer

    def after_step(self) -> None:
        """After the learning rate's hook, so that its state is the next iteration's."""
        iteration = self.trainer.iter
        done = iteration + 1
        finished = done >= self.trainer.max_iter
        if not self.saves.is_due(ended=finished or done % self.period == 0):
            return
        # The hook before may have measured batch norm's statistics, on other images each.
        share_buffers([self.detector])
        name = "model_final" if finished else f"model_{iteration:07d}"
        self.checkpointer.save(name, iteration=iteration)
        checkpoint = Path(self.checkpointer.save_dir) / f"{name}.pth"
        self.saves.saved(done, checkpoint, finished=finished)

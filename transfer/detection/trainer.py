"""The training loop: Detectron2's own, with keyed randomness, atomic checkpoints and a way to stop.

Every draw of an iteration (order, augmentation, which regions are sampled) is a function of the
seed and the iteration, so that a run which was killed and resumed goes where it would have gone.
"""

import json
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.engine import HookBase, SimpleTrainer, hooks
from detectron2.modeling import build_model
from detectron2.solver import build_lr_scheduler, build_optimizer
from detectron2.utils.events import JSONWriter, TensorboardXWriter
from fvcore.nn.precise_bn import get_bn_modules
from torch.nn.parallel import DistributedDataParallel

from instdisc.errors import UserError
from instdisc.runs.folders import read_jsonl, write_text
from instdisc.runs.log import LOGGER, StepBar
from instdisc.runs.signals import StopSignal
from instdisc.training import dist
from instdisc.training.dist import Process
from instdisc.training.seed import seed_global, seeded
from transfer.detection import roi_heads  # noqa: F401 # registers TransferRes5ROIHeads
from transfer.detection.checkpoints import AtomicCheckpointer
from transfer.detection.data import VocData, build_train_loader, check_readable

WRITE_PERIOD = 20


class DetectionTrainer(SimpleTrainer):
    """SimpleTrainer for one run folder.

    Attributes:
        cfg: the whole recipe.
        detector: the model without the wrapper of several processes.
        checkpointer: of the run folder.
    """

    def __init__(self, cfg: CfgNode, data: VocData, seed: int, process: Process) -> None:
        with seeded(seed, "detector"):
            model = build_model(cfg)
        self.detector = model
        optimizer = build_optimizer(cfg, model)
        if process.world_size > 1:
            on_gpu = process.device.type == "cuda"
            model = DistributedDataParallel(
                model,
                device_ids=[process.device.index] if on_gpu else None,
                broadcast_buffers=False,
            )
        super().__init__(model, None, optimizer)
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
        loader = build_train_loader(self.cfg, self.data, self.seed, start, rank, world_size)
        # Opened here: a loader that is opened draws from torch's generator, and in the first
        # iteration that would be one draw more than in an undisturbed run.
        self._batches = map(check_readable, iter(loader))
        with StopSignal() as stop:
            own: list[HookBase] = [hooks.IterationTimer()]
            if self.cfg.TEST.PRECISE_BN.ENABLED and get_bn_modules(self.detector):
                batches = build_train_loader(self.cfg, self.data, self.seed, 0, rank, world_size)
                own.append(
                    hooks.PreciseBN(0, self.model, batches, self.cfg.TEST.PRECISE_BN.NUM_ITER)
                )
            if self.process.is_main:
                _drop_rows_from(folder / "metrics.json", start)
                writers = [
                    JSONWriter(str(folder / "metrics.json")),
                    TensorboardXWriter(str(folder)),
                ]
                own += [hooks.PeriodicWriter(writers, period=WRITE_PERIOD), _Progress(self)]
            self.register_hooks([*own, _SaveOrStop(self, stop)])
            try:
                self.train(start, self.cfg.SOLVER.MAX_ITER)
            except FloatingPointError:
                raise UserError(
                    f"the loss became infinite or NaN at iteration {self.iter}: lower "
                    "SOLVER.BASE_LR or raise SOLVER.WARMUP_ITERS; the last good checkpoint is "
                    f"{self.checkpointer.last() or 'none'}"
                ) from None

    def run_step(self) -> None:
        """One iteration; which regions are sampled is keyed by it."""
        seed_global(self.seed, "step", self.iter, self.process.rank)
        super().run_step()

    @property
    def _data_loader_iter(self) -> Any:
        """The batches, with unreadable images told in one line."""
        return self._batches


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


class _SaveOrStop(HookBase):
    """Saves every CHECKPOINT_PERIOD and at the end; on a signal saves and ends the run."""

    def __init__(self, trainer: DetectionTrainer, stop: StopSignal) -> None:
        self.stop = stop
        self.period = trainer.cfg.SOLVER.CHECKPOINT_PERIOD
        self.checkpointer = trainer.checkpointer
        self.device = trainer.process.device

    def after_step(self) -> None:
        """After the learning rate's hook, so that its state is the next iteration's."""
        iteration = self.trainer.iter
        done = iteration + 1
        # One process may be told to stop and the others not: they must leave the same step.
        stop = dist.any_rank(self.stop.raised, self.device)
        last = done >= self.trainer.max_iter
        if last:
            self.checkpointer.save("model_final", iteration=iteration)
        elif stop or done % self.period == 0:
            self.checkpointer.save(f"model_{iteration:07d}", iteration=iteration)
        if stop and not last:
            folder = Path(self.checkpointer.save_dir)
            LOGGER.info(f"stopping after iteration {iteration}")
            raise self.stop.interrupt(done, folder / f"model_{iteration:07d}.pth")

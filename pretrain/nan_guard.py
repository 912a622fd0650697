"""What happens when a loss is NaN or infinite: stop and name the images, or skip the batch."""

import json
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from instdisc.errors import UserError, some_of
from instdisc.runs.log import LOGGER
from instdisc.training.loop import HostCopy
from pretrain.config import parse_on_nan
from pretrain.session import Session


class NanGuard:
    """Watches the loss of every step and the weights of every checkpoint.

    To stop, losses are read when they have reached the host, a step later or before a save; to
    leave a batch out, at once, which waits for the device. Such a batch changes nothing: neither
    weights nor bank nor the statistics that the forward pass has taken in, which are put back.

    Attributes:
        num_skipped: batches left out so far, over all starts of the run.
    """

    def __init__(self, session: Session, modules: Iterable[nn.Module]) -> None:
        self.session = session
        self.limit = parse_on_nan(session.config.on_nan)
        self.modules = list(modules)
        self.num_skipped = 0
        self._kept: list[dict[str, Tensor]] = []
        self._latest: tuple[HostCopy, int, Tensor] | None = None

    def before_step(self) -> None:
        """Keeps what a forward pass changes, if a batch may be left out."""
        if self.limit:
            self._kept = [
                {name: buffer.clone() for name, buffer in each.named_buffers()}
                for each in self.modules
            ]

    def accepts(self, losses: Tensor, step: int, indices: Tensor) -> bool:
        """Whether the step may be taken; False for a batch to leave out, the same on all processes.

        Args:
            losses: of every process, `(W,)`.
            step: the optimiser step.
            indices: the images of every process in order, `(WB,)`.

        Raises:
            UserError: it may not, or the one before might not, and no more may be left out.
        """
        if not self.limit:
            earlier, self._latest = self._latest, (HostCopy(losses), step, indices)
            self._check(earlier)
            return True
        if self._is_good(losses.tolist(), step, indices):
            return True
        for module, kept in zip(self.modules, self._kept, strict=True):
            module.load_state_dict(kept, strict=False)
        return False

    def check_latest(self) -> None:
        """Checks the losses of the latest step, if not done yet: before any evaluation or save."""
        latest, self._latest = self._latest, None
        self._check(latest)

    def _check(self, seen: tuple[HostCopy, int, Tensor] | None) -> None:
        if seen is not None:
            losses, step, indices = seen
            self._is_good(losses.read(), step, indices)

    def _is_good(self, losses: list[float], step: int, indices: Tensor) -> bool:
        """Whether all losses are finite; tells the images of the processes whose are not."""
        bad = [rank for rank, loss in enumerate(losses) if not math.isfinite(loss)]
        if not bad:
            return True
        session, value = self.session, losses[bad[0]]
        images = indices.view(len(losses), -1)[bad].flatten().tolist()
        names = [session.train.name(index) for index in images]
        self.num_skipped += 1
        report = session.output / "nan_batches.jsonl"
        if session.is_main:
            with report.open("a", encoding="utf-8") as file:
                row = {"step": step, "loss": str(value), "images": names}
                file.write(json.dumps(row) + "\n")
        what = f"the loss is {value} at step {step} (images {some_of(names)}; all in {report})"
        if self.num_skipped > self.limit:
            raise UserError(
                f"{what}: lower --lr, or leave such batches out with --on-nan skip N, and "
                f"{self._way_back()}"
            )
        LOGGER.warning(f"{what}: left out, {self.num_skipped} of at most {self.limit}")
        return False

    def check_weights(self, step: int) -> None:
        """Refuses to save NaN or infinite weights: the existing checkpoint stays."""
        weights = [weight for each in self.modules for weight in each.parameters()]
        if not all(bool(torch.isfinite(weight).all()) for weight in weights):
            raise UserError(
                f"the weights are NaN or infinite after step {step} and are not saved: lower "
                f"--lr and {self._way_back()}"
            )

    def _way_back(self) -> str:
        self.session.writer.wait()  # it may be written just now
        last = self.session.last_checkpoint
        return f"resume from {last}" if last.exists() else "start again (nothing was saved yet)"

"""What happens when a loss is no number: stop with all that is known, or leave the batch out."""

import json
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from instdisc.errors import UserError
from instdisc.runs.log import LOGGER
from instdisc.training import dist
from pretrain.config import parse_on_nan
from pretrain.session import Session

NUM_SHOWN = 3


class NanGuard:
    """Watches the loss of every step and the weights of every checkpoint.

    A batch that is left out changes nothing: neither weights nor bank nor the statistics that the
    forward pass has already taken in, which are put back.

    Attributes:
        num_skipped: batches left out so far, over all starts of the run.
    """

    def __init__(self, session: Session, modules: Iterable[nn.Module]) -> None:
        self.session = session
        self.limit = parse_on_nan(session.config.on_nan)
        self.modules = list(modules)
        self.num_skipped = 0
        self._kept: list[Tensor] = []

    def before_step(self) -> None:
        """Keeps what a forward pass changes, if a batch may be left out."""
        if self.limit:
            self._kept = [buffer.clone() for each in self.modules for buffer in each.buffers()]

    def accepts(self, loss: Tensor, step: int, indices: Iterable[Tensor]) -> bool:
        """Whether the step may be taken; False for a batch to leave out, the same on all processes.

        Raises:
            UserError: it may not, and no more batches may be left out.
        """
        value = loss.item()
        if not dist.any_rank(not math.isfinite(value), loss.device):
            return True
        session = self.session
        names = [session.train.name(int(i)) for part in indices for i in part]
        self.num_skipped += 1
        report = session.output / "nan_batches.jsonl"
        if session.is_main:
            with report.open("a", encoding="utf-8") as file:
                row = {"step": step, "loss": str(value), "images": names}
                file.write(json.dumps(row) + "\n")
        shown = ", ".join(names[:NUM_SHOWN]) + ", ..." * (len(names) > NUM_SHOWN)
        what = f"the loss is {value} at step {step} (images {shown}; all in {report})"
        if self.num_skipped > self.limit:
            raise UserError(
                f"{what}: lower --lr, or leave such batches out with --on-nan skip N, and "
                f"{self._way_back()}"
            )
        LOGGER.warning(f"{what}: left out, {self.num_skipped} of at most {self.limit}")
        buffers = [buffer for each in self.modules for buffer in each.buffers()]
        for buffer, kept in zip(buffers, self._kept, strict=True):
            buffer.copy_(kept)
        return False

    def check_weights(self, step: int) -> None:
        """Refuses to save weights that are no numbers: the checkpoint that is there is good."""
        weights = [weight for each in self.modules for weight in each.parameters()]
        if not all(bool(torch.isfinite(weight).all()) for weight in weights):
            raise UserError(
                f"the weights are NaN or infinite after step {step} and are not saved: lower "
                f"--lr and {self._way_back()}"
            )

    def _way_back(self) -> str:
        last = self.session.last_checkpoint
        return f"resume from {last}" if last.exists() else "start again (nothing was saved yet)"

"""What a pretraining run tells while it trains: progress, metrics.jsonl, where its time goes."""

from instdisc.runs.log import LOGGER, MetricsLog, StepBar
from instdisc.training.timing import StepClock, describe_shares
from pretrain.criterion import Normalizer, initial_ratio
from pretrain.session import Session


class Journal:
    """Rows and lines about the steps and epochs of one run; silent but on the first process."""

    def __init__(
        self, session: Session, clock: StepClock, *, step: int, steps_per_epoch: int
    ) -> None:
        config = session.config
        self.config, self.clock, self.steps_per_epoch = config, clock, steps_per_epoch
        self.metrics = MetricsLog(
            session.output, step=step, tensorboard=config.tensorboard, enabled=session.is_main
        )
        self.bar = StepBar(
            steps_per_epoch * config.epochs, step, config.batch_size, enabled=session.is_main
        )
        self._at_row = self._at_epoch = dict(clock.totals)

    def close(self) -> None:
        """Flushes everything to disk."""
        self.bar.close()
        self.metrics.close()

    def tell_step(self, step: int, loss: float, lr: float, normalizer: Normalizer) -> None:
        """Counts a step; writes a row for every `log_every`-th."""
        self.clock.finish()
        self.bar.advance(loss, step / self.steps_per_epoch)
        is_nce = self.config.objective == "nce"
        if step == 1 and is_nce:
            self._check_normalizer(normalizer)
        if step % self.config.log_every and step != 1:
            return
        values: dict[str, float] = {
            "epoch": step / self.steps_per_epoch,
            "loss": loss,
            "lr": lr,
            "images_per_second": self.bar.images_per_second,
        }
        if is_nce:
            values["normalizer_over_n"] = normalizer.ratio
        shares = self.clock.shares(self._at_row)
        self._at_row = dict(self.clock.totals)
        self.metrics.write(step, **values, **{f"time_{k}": v for k, v in shares.items()})

    def _check_normalizer(self, normalizer: Normalizer) -> None:
        """Says Z/n beside its analytic value, and warns when they are far apart."""
        found = normalizer.ratio
        expected = initial_ratio(self.config.embedding_dim, self.config.temperature)
        LOGGER.info(f"Z/n is {found:.3f} after the first batch, {expected:.3f} in theory")
        if not expected / 2 < found < expected * 2:
            LOGGER.warning(f"Z/n is off by more than 2x: expected about {expected:.3f}")

    def tell_epoch(self, step: int, loss: float, accuracies: dict[str, float]) -> None:
        """Writes the row and the line of an epoch that has ended."""
        epoch = step // self.steps_per_epoch
        shares = self.clock.shares(self._at_epoch)
        self._at_epoch = dict(self.clock.totals)
        timing = {f"epoch_time_{part}": share for part, share in shares.items()}
        self.metrics.write(step, epoch=float(epoch), epoch_loss=loss, **timing, **accuracies)
        knn = "".join(
            f"  {name} {accuracies[key]:.2f}%"
            for name, key in (("kNN bank", "knn_bank"), ("recomputed", "knn_recomputed"))
            if key in accuracies
        )
        spent = f"  ({describe_shares(shares)})" if shares else ""
        LOGGER.info(f"epoch {epoch}/{self.config.epochs}  loss {loss:.4f}{knn}{spent}")

"""What a pretraining run tells while it trains: progress, metrics.jsonl, where its time goes."""

from collections.abc import Callable

from instdisc.runs.log import LOGGER, MetricsLog, StepBar
from instdisc.training.timing import StepClock, describe_shares
from pretrain.criterion import Normalizer, initial_ratio
from pretrain.session import Session

MAX_DRIFT = 10.0  # true Z over the Z in use, either way, before a run says so
MAX_COSINE = 0.99  # mean cosine of two images beyond which features have collapsed
SHOWN = {
    "knn_bank": "kNN bank {:.2f}%",
    "knn_recomputed": "recomputed {:.2f}%",
    "rankme": "RankMe {:.1f}",
}


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
        self._warned: set[str] = set()
        before = [row for row in self.metrics.kept if row["step"] == 0]
        self._untrained: dict[str, float] = before[0] if before else {}

    def close(self) -> None:
        """Flushes everything to disk."""
        self.bar.close()
        self.metrics.close()

    def tell_step(
        self, step: int, read_loss: Callable[[], float], lr: float, normalizer: Normalizer
    ) -> None:
        """Counts a step; reads its loss and writes a row for every `log_every`-th."""
        is_told = step == 1 or step % self.config.log_every == 0
        loss = read_loss() if is_told else None
        self.bar.advance(loss, step / self.steps_per_epoch)
        if loss is None:
            return
        self.clock.finish()
        is_nce = self.config.objective == "nce"
        if step == 1 and is_nce:
            self._check_normalizer(normalizer)
        values: dict[str, float] = {
            "epoch": step / self.steps_per_epoch,
            "loss": loss,
            "lr": lr,
            "images_per_second": self.bar.images_per_second,
        }
        if is_nce:
            values["normalizer_over_n"] = normalizer.ratio
            values["normalizer_drift"] = normalizer.drift
            self._check_drift(step, normalizer)
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

    def _warn_once(self, about: str, message: str) -> None:
        if about not in self._warned:
            self._warned.add(about)
            LOGGER.warning(message)

    def _check_drift(self, step: int, normalizer: Normalizer) -> None:
        """Warns when the true Z has left the one in use: see docs/protocols.md."""
        drift = normalizer.drift
        if 1 / MAX_DRIFT < drift < MAX_DRIFT:
            return
        self._warn_once(
            "Z",
            f"step {step}: Z is {drift:.3g} times the constant that --normalizer "
            f"{self.config.normalizer} uses, so noise is weighted {drift:.3g} times too high and "
            "training may run away: start again with --normalizer exact (or ema)",
        )

    def _check_spread(self, epoch: int, measured: dict[str, float]) -> None:
        if measured.get("mean_cosine", 0.0) > MAX_COSINE:
            self._warn_once(
                "collapse",
                f"epoch {epoch}: two images have a mean cosine similarity of "
                f"{measured['mean_cosine']:.4f}, so the features have collapsed: lower --lr, or "
                "warm up longer (--warmup-epochs)",
            )

    def tell_untrained(self, measured: dict[str, float]) -> None:
        """Writes what the network is worth before its first step."""
        self._untrained = measured
        if measured:
            self.metrics.write(0, epoch=0.0, **measured)
            LOGGER.info(f"untrained{_describe(measured)}")

    def tell_epoch(self, step: int, loss: float, measured: dict[str, float]) -> None:
        """Writes the row and the line of an epoch that has ended."""
        epoch = step // self.steps_per_epoch
        self.clock.finish()
        shares = self.clock.shares(self._at_epoch)
        self._at_epoch = dict(self.clock.totals)
        timing = {f"epoch_time_{part}": share for part, share in shares.items()}
        self.metrics.write(step, epoch=float(epoch), epoch_loss=loss, **timing, **measured)
        spent = f"  ({describe_shares(shares)})" if shares else ""
        found = _describe(measured, self._untrained)
        LOGGER.info(f"epoch {epoch}/{self.config.epochs}  loss {loss:.4f}{found}{spent}")
        self._check_spread(epoch, measured)


def _describe(measured: dict[str, float], untrained: dict[str, float] | None = None) -> str:
    """What the monitor found, each beside the untrained network's."""
    texts = []
    for key, text in SHOWN.items():
        if key not in measured or (key == "knn_bank" and untrained is None):
            continue  # the bank is random before training
        beside = (untrained or {}).get(key) if key != "knn_bank" else None
        texts.append("  " + text.format(measured[key]))
        texts.append("" if beside is None else f" (untrained {beside:.2f})")
    return "".join(texts)

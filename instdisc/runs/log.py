"""What a run says while it works: log file, progress bar, metrics.jsonl, TensorBoard."""

import json
import logging
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from instdisc.runs.folders import read_jsonl, write_text

LOGGER = logging.getLogger("instdisc")
Item = TypeVar("Item")


class _AboveProgressBar(logging.StreamHandler):
    """Writes log lines so that they do not tear a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line above the bar, at once: tqdm leaves it in the buffer of a log file."""
        tqdm.write(self.format(record), file=sys.stdout)
        sys.stdout.flush()


class _LogFile(logging.FileHandler):
    """A log file that a full disk ends the run for, like every other file of it."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Called in the handler of what went wrong."""
        if isinstance(sys.exc_info()[1], OSError):
            raise
        super().handleError(record)


def setup_logging(log_file: Path | None, *, is_main: bool = True) -> logging.Logger:
    """Logs to the terminal and to a file; other processes than the first only warn."""
    for handler in LOGGER.handlers:
        handler.close()
    LOGGER.handlers.clear()
    LOGGER.propagate = False
    LOGGER.setLevel(logging.INFO if is_main else logging.WARNING)
    screen = _AboveProgressBar()
    screen.setFormatter(logging.Formatter("%(message)s"))
    LOGGER.addHandler(screen)
    if log_file is not None and is_main:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        file = _LogFile(log_file, encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        LOGGER.addHandler(file)
    return LOGGER


def boxed(text: str, width: int = 72) -> str:
    """A paragraph in a frame of stars, for what must not be overlooked."""
    lines = textwrap.wrap(text, width - 6)
    body = [f"*  {line:<{width - 6}}  *" for line in lines]
    return "\n".join(["", "*" * width, *body, "*" * width])


def open_bar(
    title: str,
    total: int | None = None,
    *,
    done: int = 0,
    unit: str = "it",
    enabled: bool = True,
) -> tqdm:
    """The one kind of bar: rate and time left on a terminal; silent where output is none.

    Args:
        title: what is being done.
        total: how many there are; None if unknown.
        done: how many were finished before.
        unit: what is counted.
        enabled: whether this process shows it.
    """
    hidden = not (enabled and sys.stderr.isatty())
    return tqdm(
        total=total,
        initial=done,
        desc=title,
        unit=f" {unit}",
        disable=hidden,
        leave=False,
        dynamic_ncols=True,
        file=sys.stderr,
    )


def progress(
    items: Iterable[Item],
    *,
    title: str,
    enabled: bool = True,
    total: int | None = None,
    unit: str = "it",
) -> Iterator[Item]:
    """The items, with a bar on a terminal; silent in a log file, where lines tell instead."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    with open_bar(title, total, unit=unit, enabled=enabled) as bar:
        for item in items:
            yield item
            bar.update()


class Countdown:
    """Progress of what takes hours: a bar on a terminal, a line now and then in a log."""

    SECONDS_BETWEEN_LINES = 30

    def __init__(
        self,
        title: str,
        total: int,
        *,
        done: int = 0,
        enabled: bool = True,
        tell: Callable[[str], object] = LOGGER.info,
    ) -> None:
        self.title, self.total, self.first, self.done = title, total, done, done
        self.started = self.told = time.monotonic()
        self.enabled, self.tell = enabled, tell
        self._bar = open_bar(title, total, done=done, unit="images", enabled=enabled)
        if done and enabled and self._bar.disable:
            tell(f"{title}: goes on at {done:,}/{total:,}")

    def advance(self) -> None:
        """Counts one."""
        self.done += 1
        self._bar.update()
        now = time.monotonic()
        if self._bar.disable and self.enabled and now - self.told > self.SECONDS_BETWEEN_LINES:
            self.told = now
            rate = (self.done - self.first) / (now - self.started)
            left = tqdm.format_interval((self.total - self.done) / rate)
            self.tell(f"{self.title}: {self.done:,}/{self.total:,}  {rate:.1f}/s  {left} left")

    def __enter__(self) -> "Countdown":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()


class MetricsLog:
    """metrics.jsonl, a row per event; and the same numbers for TensorBoard.

    On resume the rows after the checkpoint are dropped, as those steps are about to be repeated;
    `kept` holds the others.
    """

    def __init__(
        self, folder: Path, *, step: int, tensorboard: bool = True, enabled: bool = True
    ) -> None:
        self._file: Any = None
        self._writer: Any = None
        self.kept: list[dict[str, Any]] = []
        if not enabled:
            return
        self.path = folder / "metrics.jsonl"
        # What a run of no saved step wrote, it will write again.
        self.kept = [row for row in read_jsonl(self.path) if row["step"] <= step] if step else []
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in self.kept))
        self._file = self.path.open("a", encoding="utf-8")
        if tensorboard:
            # Heavy to import, and not needed by anything else.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, **values: float | int | str | None) -> None:
        """Appends one row."""
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flushes everything to disk."""
        if self._file is not None:
            self._file.close()
        if self._writer is not None:
            self._writer.close()


class StepBar:
    """Progress of a run over its steps: a bar on a terminal, a line now and then in a log."""

    SECONDS_BETWEEN_LINES = 30

    def __init__(self, total: int, done: int, batch_size: int, *, enabled: bool = True) -> None:
        self.batch_size = batch_size
        self.total, self.first, self.done = total, done, done
        self.started = self.told = time.monotonic()
        self.enabled = enabled
        self.loss: float | None = None  # as last told
        self._bar = open_bar("training", total, done=done, unit="steps", enabled=enabled)

    @property
    def images_per_second(self) -> float:
        """The mean rate since this process started."""
        elapsed = max(time.monotonic() - self.started, 1e-9)
        return (self.done - self.first) * self.batch_size / elapsed

    def advance(self, loss: float | None, epoch: float) -> None:
        """Counts one step; None leaves the loss that is shown as it is."""
        self.done += 1
        self.loss = self.loss if loss is None else loss
        shown = "" if self.loss is None else f"loss {self.loss:.4f}  "
        self._bar.set_postfix_str(f"{shown}{self.images_per_second:.0f} images/s")
        self._bar.update()
        now = time.monotonic()
        if self._bar.disable and self.enabled and now - self.told > self.SECONDS_BETWEEN_LINES:
            self.told = now
            left = (self.total - self.done) * self.batch_size / self.images_per_second
            LOGGER.info(
                f"step {self.done}/{self.total} (epoch {epoch:.2f})  {shown}"
                f"{self.images_per_second:.0f} images/s  {tqdm.format_interval(left)} left"
            )

    def close(self) -> None:
        """Takes the bar off the screen."""
        self._bar.close()

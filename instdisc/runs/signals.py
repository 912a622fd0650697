"""Stopping between two steps, so that a preempted job loses seconds. Imports no torch."""

import multiprocessing
import signal
from pathlib import Path
from types import FrameType
from typing import Any

from instdisc.errors import Interrupted
from instdisc.names import STOP_SIGNALS


class StopSignal:
    """Turns the signals that ask for an end into a flag that a loop reads between two steps."""

    SIGNALS = STOP_SIGNALS

    def __init__(self) -> None:
        self.raised = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignal":
        for number in self.SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A person who asks twice means now. A scheduler repeats itself, and must not spoil a save.
        if self.raised and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.raised = True

    def interrupt(self, step: int, checkpoint: Path) -> Interrupted:
        """The exception that ends the run once its work is saved."""
        saved = f", saved in {checkpoint}" if step else ""
        return Interrupted(f"stopped after step {step}{saved}: run again to go on")


def leave_signals_to_parent(worker: int = 0) -> None:
    """Makes a loader process ignore the signals that a scheduler sends to all processes of a job.

    The training process hears them too, and needs its loaders until the step is done.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def kill_loaders() -> None:
    """Ends the loader processes that are left when the training process exits: after an error.

    Python would send them SIGTERM, which they ignore, and then wait for them forever.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would complain of their end
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()

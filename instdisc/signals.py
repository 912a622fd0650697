"""Stopping between two steps, so that a preempted job loses seconds. Imports no torch."""

import signal
from pathlib import Path
from types import FrameType
from typing import Any

from instdisc.cli import Interrupted


class StopSignal:
    """Turns SIGTERM, SIGINT and SIGUSR1 into a flag that a loop reads between two steps."""

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

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
        if self.raised:  # asked twice: now
            raise KeyboardInterrupt
        self.raised = True

    def interrupt(self, step: int, checkpoint: Path) -> Interrupted:
        """The exception that ends the run once its work is saved."""
        return Interrupted(f"stopped after step {step}, saved in {checkpoint}: run again to go on")

"""Where the time of a step goes: data, forward, objective, backward, optimizer, bank."""

import time
from collections.abc import Mapping

import torch


class StepClock:
    """Adds up the time between marks, by the name of the mark that ends it.

    On a CPU the clock is read. On a GPU an event is recorded, without a synchronisation, and
    read by `finish`, which is best called when a loss has been read anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.totals: dict[str, float] = {}
        self._last = 0.0
        self._events: list[tuple[str, torch.cuda.Event]] = []

    def start(self) -> None:
        """Begins a step; what happened since the last mark is not attributed."""
        if self.on_gpu:
            self.mark("")
        else:
            self._last = time.perf_counter()

    def mark(self, part: str) -> None:
        """Ends a part of the step."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append((part, event))
            return
        now = time.perf_counter()
        self.totals[part] = self.totals.get(part, 0.0) + now - self._last
        self._last = now

    def finish(self) -> None:
        """Takes the events of all steps since it was last called into account."""
        if not self._events:
            return
        self._events[-1][1].synchronize()
        for (_, before), (part, after) in zip(self._events, self._events[1:], strict=False):
            if part:
                self.totals[part] = self.totals.get(part, 0.0) + before.elapsed_time(after) / 1e3
        self._events.clear()

    def shares(self, since: Mapping[str, float] | None = None) -> dict[str, float]:
        """Percentages of the parts, of all time or since an earlier copy of `totals`."""
        spent = {part: t - (since or {}).get(part, 0.0) for part, t in self.totals.items()}
        whole = sum(spent.values())
        return {part: 100 * t / whole for part, t in spent.items()} if whole > 0 else {}


def describe_shares(shares: Mapping[str, float]) -> str:
    """`data 12%, forward 30%, ...` for a log line."""
    return ", ".join(f"{part} {share:.0f}%" for part, share in shares.items())

"""The step clock: times belong to the mark that ends them, and shares add up."""

import pytest
import torch

from instdisc.training import timing
from instdisc.training.timing import StepClock, describe_shares


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that stands still until a test moves it."""
    time = [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: time[0])
    return time


def step(clock: StepClock, now: list[float], **seconds: float) -> None:
    clock.start()
    for part, duration in seconds.items():
        now[0] += duration
        clock.mark(part)
    clock.finish()
    now[0] += 50  # between steps: nobody's


def test_shares_are_of_the_marked_time(now: list[float]) -> None:
    clock = StepClock(torch.device("cpu"))
    assert clock.shares() == {}
    step(clock, now, data=1, forward=2, objective=1)
    step(clock, now, data=2, forward=2, objective=2)
    assert clock.shares() == pytest.approx({"data": 30, "forward": 40, "objective": 30})
    before = dict(clock.totals)
    step(clock, now, data=3, forward=1)
    since = clock.shares(before)
    assert since == pytest.approx({"data": 75, "forward": 25, "objective": 0})
    assert describe_shares(since) == "data 75%, forward 25%, objective 0%"


def test_a_part_may_be_marked_several_times_a_step(now: list[float]) -> None:
    clock = StepClock(torch.device("cpu"))
    clock.start()
    for part in ("objective", "backward", "objective", "backward"):
        now[0] += 1 if part == "objective" else 4
        clock.mark(part)
    assert clock.totals == {"objective": 2, "backward": 8}

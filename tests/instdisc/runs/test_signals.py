import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import Dataset

from instdisc.images.loading import build_loader
from instdisc.names import STOP_SIGNALS
from instdisc.runs.signals import StopSignal


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_a_flag(number: int) -> None:
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.raised
        os.kill(os.getpid(), number)
        assert stop.raised
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", set(STOP_SIGNALS) - {signal.SIGINT})
def test_a_scheduler_may_repeat_itself(number: int) -> None:
    with StopSignal() as stop:
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert stop.raised


def test_a_person_who_asks_twice_means_now() -> None:
    with StopSignal():
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


class Pids(Dataset[int]):
    """The process that loads each item."""

    collate = staticmethod(list)

    def __getitem__(self, index: int) -> int:
        return os.getpid()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_loader_processes_outlive_signals_to_the_whole_job(number: int) -> None:
    """Slurm signals every process of a step; the step must be finished before the save."""
    samples: Any = Pids()
    batches: Iterator[Any] = iter(build_loader(samples, [[0]] * 40, workers=1))
    worker = next(batches)[0]
    assert worker != os.getpid()
    os.kill(worker, number)
    assert [batch[0] for batch in batches] == [worker] * 39


CRASH = """
from instdisc.images.loading import build_loader

class Numbers:
    collate = staticmethod(list)

    def __getitem__(self, index):
        return 1 // index

batches = iter(build_loader(Numbers(), [[3], [2], [{last}], *[[1]] * 40], workers=2))
next(batches), next(batches)
{bug}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("last", "bug"), [(1, "1 / 0"), (0, "next(batches)")])
def test_an_error_ends_the_loader_processes_too(last: int, bug: str) -> None:
    """In the training process or in a loader; its traceback keeps the loader's iterator alive."""
    program = CRASH.format(last=last, bug=bug)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().splitlines()[-1].startswith("ZeroDivisionError")

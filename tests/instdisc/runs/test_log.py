"""metrics.jsonl survives a resume without repeated or lost rows; lines and bars of a run."""

import io
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from instdisc.runs.folders import read_jsonl
from instdisc.runs.log import Countdown, MetricsLog, StepBar, progress


def test_rows_after_the_checkpoint_are_dropped_on_resume(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, step=0, tensorboard=False)
    for step in (1, 2, 3):
        log.write(step, loss=float(step))
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed in mid-line
    log = MetricsLog(tmp_path, step=2, tensorboard=False)
    log.write(3, loss=30.0)
    log.close()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, step=0, enabled=False)
    log.write(1, loss=1.0)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_events_are_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, step=0, tensorboard=True)
    log.write(1, loss=1.0, note="text is not a scalar")
    log.close()
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_the_rate_counts_only_this_process() -> None:
    bar = StepBar(100, 90, batch_size=10, enabled=False)
    bar.started -= 5.0
    bar.advance(1.0, 0.91)
    assert 1.5 < bar.images_per_second < 2.0
    bar.close()


class Screen(io.StringIO):
    """A terminal, or a file."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def test_bars_have_title_rate_and_time_left_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for is_terminal in (True, False):
        screen = Screen(is_terminal)
        monkeypatch.setattr(sys, "stderr", screen)
        assert [*progress(range(3), title="listing", unit="folders")] == [0, 1, 2]
        shown = screen.getvalue()
        assert ("listing" in shown and "folders/s" in shown and "0/3" in shown) == is_terminal
        assert is_terminal or not shown


def test_hours_of_work_leave_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", Screen(False))
    monkeypatch.setattr(Countdown, "SECONDS_BETWEEN_LINES", -1)
    said: list[str] = []
    with Countdown("selective search", 10, done=7, tell=said.append) as bar:
        for _ in range(3):
            bar.advance()
    assert [line.partition("  ")[0] for line in said] == [
        "selective search: goes on at 7/10",
        *(f"selective search: {number}/10" for number in (8, 9, 10)),
    ]
    assert said[-1].endswith("00:00 left")


def test_a_line_reaches_a_pipe_at_once() -> None:
    program = (
        "import sys\n"
        "from instdisc.runs.log import LOGGER, setup_logging\n"
        "setup_logging(None)\n"
        "LOGGER.info('begun')\n"
        "sys.stdin.read()\n"  # at work until it is told to end
    )
    environ = {name: v for name, v in os.environ.items() if name != "PYTHONUNBUFFERED"}
    argv = [sys.executable, "-c", program]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        ready, _, _ = select.select([child.stdout], [], [], 60)
        assert ready, "the line stays in the buffer"
        assert child.stdout.readline() == "begun\n"
        child.stdin.close()

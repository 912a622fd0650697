"""The graph on one machine: order, bound, failures, signals; and a real study of it."""

import collections
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from slurm import local
from slurm.jobs import Job, command_line, read_status, write_status
from slurm.resources import Resources

RESOURCES = {"pretrain": Resources(), "knn": Resources()}


class FakeJob:
    """Ends after some polls, with the outcome that its name says."""

    events: ClassVar[list[tuple[str, str]]] = []
    running = most = 0

    def __init__(
        self, job: Job, folder: Path, resources: Resources, number: int, cores: list[int]
    ) -> None:
        self.job, self.folder, self.number, self.cores = job, folder, number, cores
        self.polls = 3
        FakeJob.running += 1
        FakeJob.most = max(FakeJob.most, FakeJob.running)
        FakeJob.events.append(("start", job.name))

    def stop(self) -> None:
        self.polls = 1

    def poll(self) -> str | None:
        self.polls -= 1
        if self.polls > 0:
            return None
        FakeJob.running -= 1
        outcome = "failed" if "bad" in self.job.name else "done"
        if "twice" in self.job.name and self.number == 0:
            outcome = "interrupted"
        write_status(self.folder, {"state": outcome, "attempts": [], "error": "boom"})
        FakeJob.events.append((outcome, self.job.name))
        return outcome


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeJob]:
    monkeypatch.setattr(local, "LocalJob", FakeJob)
    monkeypatch.setattr(local, "POLL", 0.001)
    FakeJob.events, FakeJob.running, FakeJob.most = [], 0, 0
    return FakeJob


def job(name: str, *after: str) -> Job:
    return Job(name=name, task="pretrain", argv=(), run="", after=after)


def run(jobs: list[Job], root: Path, parallel: int = 2) -> tuple[int, list[str]]:
    lines: list[str] = []
    code = local.run_local(jobs, RESOURCES, root, parallel=parallel, say=lines.append)
    return code, lines


@pytest.mark.parametrize("parallel", [1, 2, 3])
def test_at_most_n_jobs_run_and_parents_come_first(
    fake: type[FakeJob], tmp_path: Path, parallel: int
) -> None:
    runs = [job(f"run{i}") for i in range(4)]
    jobs = [*runs, *(job(f"read{i}", f"run{i}") for i in range(4)), job("all", "read0", "read3")]
    assert run(jobs, tmp_path, parallel)[0] == 0
    assert fake.most == parallel
    place = {event: number for number, event in enumerate(fake.events)}
    for each in jobs:
        for parent in each.after:
            assert place["done", parent] < place["start", each.name]
    assert collections.Counter(what for what, _ in fake.events) == {"start": 9, "done": 9}


@pytest.mark.parametrize(
    ("num_cores", "parts", "expected"),
    [
        (2, 1, [[0, 1]]),
        (2, 2, [[0], [1]]),
        (5, 2, [[0, 1], [2, 3, 4]]),
        (1, 2, [[0], [0]]),
        (2, 5, [[0], [1], [0], [1], [1]]),
    ],
)
def test_jobs_at_a_time_share_the_cores(
    num_cores: int, parts: int, expected: list[list[int]]
) -> None:
    cores = list(range(num_cores))
    assert [local.share_cores(cores, number, parts) for number in range(parts)] == expected


def test_what_is_started_on_a_core_has_one_thread_and_this_process_keeps_its_cores() -> None:
    before = os.sched_getaffinity(0)
    core = min(before)
    code = "import os, torch; print(os.sched_getaffinity(0), torch.get_num_threads())"
    free = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    with local._pinned([core]):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=free)
    assert done.stdout.decode().strip() == f"{{{core}}} 1", done.stderr
    assert os.sched_getaffinity(0) == before


def test_a_failure_stops_what_waits_for_it_and_nothing_else(
    fake: type[FakeJob], tmp_path: Path
) -> None:
    jobs = [job("bad"), job("good"), job("child", "bad")]
    jobs += [job("grandchild", "child"), job("x", "good")]
    code, lines = run(jobs, tmp_path)
    assert code == 1
    assert {name for what, name in fake.events if what == "start"} == {"bad", "good", "x"}
    assert "child: not started: bad failed" in lines
    assert "bad: failed: boom" in lines
    assert read_status(tmp_path / "grandchild")["error"] == "not started: child failed"


def test_a_job_that_somebody_stopped_is_run_again(fake: type[FakeJob], tmp_path: Path) -> None:
    assert run([job("twice"), job("child", "twice")], tmp_path)[0] == 0
    names = [name for what, name in fake.events if what == "start"]
    assert names == ["twice", "twice", "child"]


def test_a_signal_stops_everything_and_can_be_repeated(
    fake: type[FakeJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(self: FakeJob) -> str | None:
        if self.polls > 1:
            os.kill(os.getpid(), signal.SIGTERM)
            return None
        FakeJob.running -= 1
        return "interrupted"

    monkeypatch.setattr(FakeJob, "poll", slow)
    code, lines = run([job("a"), job("b"), job("c")], tmp_path)
    assert code == 75
    assert "run the same command again" in lines[-1]
    assert len([event for event in fake.events if event[0] == "start"]) == 2


@pytest.fixture
def submit() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Starts `slurm/submit.py --cluster local ...`; nothing outlives the test."""
    started: list[subprocess.Popen[str]] = []

    def start(*argv: str, **kwargs: Any) -> "subprocess.Popen[str]":
        words = [sys.executable, "-m", "slurm.submit", "--cluster", "local", *argv]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(subprocess.Popen(words, text=True, **pipe, **kwargs))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.terminate()  # it ends its jobs first
            process.wait(timeout=90)


@pytest.mark.slow
def test_a_study_without_slurm(
    tmp_path: Path, submit: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """The whole demo study, stopped once, with no Slurm on the PATH."""
    environment = {**os.environ, "PATH": str(tmp_path / "empty")}
    command = ["--parallel", "2", "study", "demo", "--scale", "quick", "--skip", "report", "detect"]
    first = submit(*command, env=environment)
    runs = Path(os.environ["INSTDISC_RUNS"])
    steps = runs / "studies" / "seed0" / "demo-resnet18" / "metrics.jsonl"
    end = time.monotonic() + 240
    # Before its first step, when the untrained network is measured, there is nothing to save.
    while not (steps.exists() and '"step": 1,' in steps.read_text()) and time.monotonic() < end:
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    shown, _ = first.communicate(timeout=120)
    assert first.returncode == 75, shown
    second = submit(*command, env=environment)
    shown, _ = second.communicate(timeout=600)
    assert second.returncode == 0, shown
    rows = [json.loads(line) for line in (runs / "results.jsonl").read_text().splitlines()]
    assert {row["task"] for row in rows} == {"knn", "semisup"}
    assert "going on after step" in (steps.parent / "log.txt").read_text()
    third = submit(*command, env=environment)
    shown, _ = third.communicate(timeout=120)
    assert "4 jobs: 4 done" in shown
    assert "nothing to do" in shown


@pytest.mark.slow
def test_two_processes_on_this_machine(
    tmp_path: Path, submit: Callable[..., "subprocess.Popen[str]"]
) -> None:
    flags = "--arch resnet18 --data demo --train-fraction 0.02 --batch-size 16 --epochs 1"
    more = ["--monitor-every", "0", "--no-tensorboard", "--output", str(tmp_path / "run")]
    done = submit("--tasks", "2", "--name", "two", "pretrain", *flags.split(), *more)
    shown, _ = done.communicate(timeout=300)
    assert done.returncode == 0, shown
    assert "2 process(es) on cpu" in (tmp_path / "run" / "log.txt").read_text()


def test_a_job_that_names_what_failed_is_run_after_a_failure(
    fake: type[FakeJob], tmp_path: Path
) -> None:
    last = dataclasses.replace(job("last", "bad", "child", "good"), failed_flag="--missing")
    code, _ = run([job("bad"), job("good"), job("child", "bad"), last], tmp_path)
    assert code == 1
    assert fake.events[-1] == ("done", "last")
    assert command_line(tmp_path / "last") == ["--missing", "bad", "child"]

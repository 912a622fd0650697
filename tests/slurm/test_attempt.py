"""Outcomes: what finish makes of exit codes and of what the processes left."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from instdisc.errors import UserError
from slurm import attempt
from slurm.jobs import Job, progress_of, read_status, save_job, write_record

NAME = "job"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "run"
    run.mkdir()
    return save_job(Job(name=NAME, task="pretrain", argv=(), run=str(run)), tmp_path / "jobs")


def record(folder: Path, rank: int, outcome: str, message: str = "") -> None:
    write_record(folder, 0, rank, {"outcome": outcome, "message": message, "rank": rank})


def begin(folder: Path, number: int = 0) -> None:
    attempt.begin(folder, number=number, job_id="7", log="")


def test_ranks_come_from_slurm_and_one_process_is_alone() -> None:
    environ = {
        "SLURM_NTASKS": "4",
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS_PER_NODE": "2",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "20001",
    }
    assert attempt.torchrun_variables(environ) == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "20001",
    }
    assert attempt.torchrun_variables({**environ, "SLURM_NTASKS": "1"}) == {}


def test_every_attempt_meets_at_another_port() -> None:
    ports = {attempt.choose_port(job, number) for job in range(50, 60) for number in range(10)}
    assert len(ports) == 100
    assert all(20_000 <= port < 32_000 for port in ports)


def test_a_port_that_is_taken_is_not_chosen() -> None:
    wanted = attempt.choose_port(1234, 0)
    with socket.socket() as taken:
        taken.bind(("", wanted))
        taken.listen()
        assert attempt.choose_port(1234, 0) != wanted


def test_nodes_meet_at_a_name_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attempt.choose_address(1) == "127.0.0.1"
    monkeypatch.setattr(socket, "gethostname", lambda: "no.such.host.invalid")
    assert attempt.choose_address(2, {"SLURMD_NODENAME": "localhost"}) == "localhost"
    with pytest.raises(UserError, match="does not know its own name"):
        attempt.choose_address(2, {})


DONE, STOP, FAIL = ("done", ""), ("interrupted", "after step 5"), ("failed", "bad data")


@pytest.mark.parametrize(
    ("code", "ends", "outcome", "message"),
    [
        (0, [(0, *DONE), (1, *DONE)], "done", ""),
        (75, [(0, *STOP), (1, *STOP)], "interrupted", "after step 5"),
        # Who goes first decides: the other only lost its peer, or was told to go by srun.
        (75, [(1, *STOP), (0, "failed", "connection closed")], "interrupted", "after step 5"),
        (75, [(0, *FAIL), (1, *STOP)], "failed", "bad data"),
        (2, [(0, *FAIL), (1, *FAIL)], "failed", "bad data"),
        # A process that says nothing was killed, whatever the others made of it.
        (137, [(0, "failed", "connection closed")], "failed", "process 1 of 2 was killed"),
        (137, [(0, *STOP)], "failed", "process 1 of 2 was killed"),
        (137, [], "failed", "process 0, 1 of 2 was killed"),
        (143, [(0, *STOP)], "interrupted", "after step 5"),  # the other had not begun to listen
        # Signals before Python listens.
        (140, [], "interrupted", "before it began"),
        (143, [], "interrupted", "before it began"),
        (9, [], "failed", "killed"),
    ],
)
def test_outcome(
    folder: Path, code: int, ends: list[tuple[int, str, str]], outcome: str, message: str
) -> None:
    begin(folder)
    for rank, how, what in ends:
        record(folder, rank, how, what)
    assert attempt.finish(folder, number=0, code=code, num_processes=2) == outcome
    status = read_status(folder)
    assert status["state"] == outcome
    assert message in status["attempts"][0]["message"]
    if outcome == "failed":
        assert message in status["error"]


def stop_once(folder: Path, number: int, message: str = "after step 5") -> str:
    begin(folder, number)
    ended = {"outcome": "interrupted", "message": message, "rank": 0}
    write_record(folder, number, 0, ended)
    return attempt.finish(folder, number=number, code=75, num_processes=1)


def test_stopped_twice_at_the_same_step_is_the_end(folder: Path) -> None:
    assert stop_once(folder, 0) == "interrupted"
    assert stop_once(folder, 1) == "failed"
    assert "twice in a row at the same step" in read_status(folder)["error"]


def test_a_job_that_gets_on_may_be_stopped_for_ever(folder: Path, tmp_path: Path) -> None:
    for number in range(6):
        begin(folder, number)
        (tmp_path / "run" / "last.pt").write_text(str(number))
        os.utime(tmp_path / "run" / "last.pt", ns=(0, 1000 + number))
        ended = {"outcome": "interrupted", "message": "same words", "rank": 0}
        write_record(folder, number, 0, ended)
        assert attempt.finish(folder, number=number, code=75, num_processes=1) == "interrupted"


def test_progress_that_only_the_message_tells_counts(folder: Path) -> None:
    outcomes = [stop_once(folder, number, f"{number} of 9 kept") for number in range(4)]
    assert outcomes == ["interrupted"] * 4


def test_killed_twice_without_a_word_is_not_started_a_third_time(folder: Path) -> None:
    begin(folder, 0)
    begin(folder, 1)
    with pytest.raises(UserError, match="twice in a row"):
        begin(folder, 2)
    assert read_status(folder)["state"] == "failed"


def test_logs_are_no_progress(tmp_path: Path) -> None:
    for name in ("log.txt", "metrics.jsonl", "config.json", "labels.txt"):
        (tmp_path / name).write_text("x")
    assert progress_of(tmp_path) == 0
    (tmp_path / "trial").mkdir()
    (tmp_path / "trial" / "last.pt").write_text("x")
    assert progress_of(tmp_path) > 0


RUN = """
import sys, time, types
from pathlib import Path
from slurm import attempt, tasks

def main(argv):
    {body}

sys.modules["fake_command"] = types.ModuleType("fake_command")
sys.modules["fake_command"].main = main
tasks.TASKS["pretrain"] = tasks.Task("fake_command", "")
attempt.TASKS = tasks.TASKS
attempt.run_process(Path(sys.argv[1]), number=0, rank=0)
"""


def run_body(folder: Path, body: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", RUN.format(body=body), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("body", "code", "outcome", "message"),
    [
        ("return 0", 0, "done", ""),
        ("sys.stderr.write('x: error: no data\\n'); return 2", 2, "failed", "x: error: no data"),
        ("raise RuntimeError('boom\\nand more')", 1, "failed", "RuntimeError: boom"),
        ("sys.exit('no')", 1, "failed", ""),
        ("sys.stderr.write('stopped after step 3\\n'); return 75", 75, "interrupted", "step 3"),
    ],
)
def test_how_a_process_ends_is_kept(
    folder: Path, body: str, code: int, outcome: str, message: str
) -> None:
    process = run_body(folder, body)
    process.communicate(timeout=30)
    assert process.returncode == code
    (found,) = [json.loads(path.read_text()) for path in folder.glob("rank-0-0.json")]
    assert found["outcome"] == outcome
    assert message in found["message"]
    assert (folder / "cause-0.json").exists() == (code != 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_outside_any_loop_ends_the_process_at_once(folder: Path, number: int) -> None:
    process = run_body(folder, "print('here', flush=True); time.sleep(30)")
    assert process.stdout is not None
    process.stdout.readline()
    started = time.monotonic()
    process.send_signal(number)
    assert process.wait(timeout=20) == 75
    assert time.monotonic() - started < 10
    assert json.loads((folder / "rank-0-0.json").read_text())["outcome"] == "interrupted"


IN_A_PRINT = """
import io, os, signal
class Raw(io.FileIO):
    def write(self, data):
        os.kill(os.getpid(), signal.SIGTERM)
        return super().write(data)
sys.stdout = io.TextIOWrapper(io.BufferedWriter(Raw(1, "w")))
print("text", flush=True)
time.sleep(30)
"""


def test_a_signal_in_the_middle_of_a_print(folder: Path) -> None:
    process = run_body(folder, f"exec({IN_A_PRINT!r}, globals())")
    process.communicate(timeout=20)
    assert process.returncode == 75
    assert json.loads((folder / "rank-0-0.json").read_text())["outcome"] == "interrupted"


def fake_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, code: int) -> Path:
    log = tmp_path / "asked"
    script = tmp_path / "bin" / "scontrol"
    script.parent.mkdir()
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n[ "$1" = show ] && echo JobState={state} && exit 0\n'
        f"echo disabled >&2; exit {code}\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    return log


@pytest.mark.parametrize(
    ("state", "asked"), [("RUNNING", True), ("COMPLETING", False), ("CANCELLED", False)]
)
def test_only_a_running_job_is_requeued(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, asked: bool
) -> None:
    log = fake_scontrol(tmp_path, monkeypatch, state, 0)
    attempt.requeue(folder, "7")
    assert ("requeue 7" in log.read_text()) == asked


def test_a_requeue_that_is_refused_is_a_failure(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_scontrol(tmp_path, monkeypatch, "RUNNING", 1)
    attempt.requeue(folder, "7")
    status: dict[str, Any] = read_status(folder)
    assert status["state"] == "failed"
    assert "could not be requeued (disabled)" in status["error"]

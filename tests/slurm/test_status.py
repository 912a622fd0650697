import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slurm import progress, status
from slurm.cluster import Queued, find_state, read_queue
from slurm.jobs import Job, save_job, write_status, write_submission

ATTEMPT = {"number": 0, "host": socket.gethostname(), "progress": 0}
ON_SLURM = {"cluster": "slurm", "job_id": "7"}


def queued(state: str, reason: str = "") -> Queued:
    return Queued(state, reason, "0:12", "n1")


@pytest.mark.parametrize(
    ("own", "attempts", "in_queue", "state", "reason"),
    [
        ("waiting", 0, queued("PENDING", "Priority"), "waiting", "Priority"),
        ("waiting", 0, queued("PENDING", "Dependency"), "waiting", "Dependency"),
        ("waiting", 0, queued("PENDING", "DependencyNeverSatisfied"), "stopped", "failed"),
        ("waiting", 0, None, "stopped", "no longer in the queue"),
        ("waiting", 0, queued("CANCELLED"), "stopped", "CANCELLED"),
        ("running", 1, queued("RUNNING"), "running", "0:12 on n1"),
        ("running", 1, None, "stopped", "no longer"),
        ("running", 1, queued("TIMEOUT", "TimeLimit"), "stopped", "TIMEOUT (TimeLimit)"),
        ("running", 1, queued("PENDING", "BeginTime"), "waiting", "again, BeginTime"),
        ("interrupted", 1, queued("PENDING", "BeginTime"), "waiting", "again, BeginTime"),
        ("interrupted", 1, None, "stopped", "no longer"),
        ("done", 1, None, "done", ""),
        ("done", 1, queued("COMPLETED"), "done", ""),
        ("done", 1, queued("COMPLETING"), "done", ""),
        ("done", 1, queued("PENDING", "BeginTime"), "waiting", "again, BeginTime"),
        ("failed", 1, queued("FAILED", "NonZeroExitCode"), "failed", "boom"),
        ("failed", 1, queued("RUNNING"), "failed", "boom"),
        ("failed", 1, queued("PENDING", "JobHeldAdmin"), "waiting", "again, JobHeldAdmin"),
        ("failed", 1, None, "failed", "boom"),
    ],
)
def test_state_of_a_job_on_slurm(
    own: str, attempts: int, in_queue: Queued | None, state: str, reason: str
) -> None:
    told: dict[str, Any] = {"state": own, "attempts": [ATTEMPT] * attempts, "error": "boom"}
    found = find_state(told, ON_SLURM, in_queue)
    assert found[0] == state
    assert reason in found[1]


def test_a_job_that_slurm_has_not_looked_at_waits_for_no_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "squeue"
    program.write_text("#!/bin/sh\necho '7|PENDING|None|0:00|'\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for attempts, reason in (([], ""), ([ATTEMPT], "again")):
        told = {"state": "waiting", "attempts": attempts}
        assert find_state(told, ON_SLURM, read_queue(["7"])["7"]) == ("waiting", reason)


def test_a_local_job_whose_process_is_gone_is_not_running() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    told = {"state": "running", "attempts": [ATTEMPT]}
    assert find_state(told, {"cluster": "local", "job_id": str(gone.pid)}, None)[0] == "stopped"
    alive = {"cluster": "local", "job_id": str(os.getpid())}
    assert find_state(told, alive, None)[0] == "running"


def write_run(run: Path, *rows: dict[str, float]) -> None:
    run.mkdir(parents=True)
    (run / "config.json").write_text('{"epochs": 12}')
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_progress_is_the_latest_of_each_number(tmp_path: Path) -> None:
    write_run(
        tmp_path / "run",
        {"step": 10, "epoch": 1.0, "loss": 7.0},
        {"step": 10, "epoch": 1.0, "epoch_loss": 7.5, "knn_recomputed": 31.25},
        {"step": 15, "epoch": 1.5, "loss": 6.25},
    )
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "epo')  # being written
    found = progress.describe_progress(progress.read_progress(tmp_path / "run"))
    assert found == "epoch 1.5/12, loss 6.25, kNN 31.25%"
    below = progress.describe_progress(progress.read_progress(tmp_path))  # a trial's own folder
    assert below == "epoch 1.5, loss 6.25, kNN 31.25%"
    assert progress.read_progress(tmp_path / "none") == {}


def test_progress_of_a_detector(tmp_path: Path) -> None:
    (tmp_path / "trial-0").mkdir()
    (tmp_path / "trial-0" / "metrics.json").write_text('{"iteration": 19, "total_loss": 1.25}\n')
    found = progress.describe_progress(progress.read_progress(tmp_path))
    assert found == "iteration 19, loss 1.25"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished and a failed job, on a machine without Slurm."""
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    root = tmp_path / "runs" / "slurm"
    for name, state, error in (("good", "done", {}), ("bad", "failed", {"error": "no data"})):
        job = Job(name=name, task="pretrain", argv=(), run=str(tmp_path / name))
        folder = save_job(job, root)
        log = str(folder / "log")
        (folder / "log.err").write_text("one\ntwo\nthree\n")
        write_status(folder, {"state": state, "attempts": [ATTEMPT] * 2, "log": log, **error})
        write_submission(folder, cluster="slurm", job_id="7")
    write_run(tmp_path / "good", {"step": 1, "epoch": 12.0, "loss": 5.0})
    return root


def test_the_table(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([]) == 0
    first, bad, good = capsys.readouterr().out.splitlines()
    assert "0 running, 0 waiting, 1 failed, 0 stopped, 1 done" in first
    assert bad.split()[:3] == ["failed", "7", "bad"]
    assert "no data" in bad
    assert "epoch 12/12, loss 5" in good
    assert "(attempt 2)" in good


def test_errors_and_words_and_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status.main(["--errors", "2", "bad"])
    shown = capsys.readouterr().out
    assert "| two" in shown
    assert "| three" in shown
    assert "| one" not in shown
    assert "good" not in shown
    status.main(["--json"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["state"] for row in rows] == ["failed", "done"]


def test_no_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([]) == 2
    assert "submit one with slurm/submit.py" in capsys.readouterr().err

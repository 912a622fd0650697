"""One run per folder: refusals name the owner, locks of the dead are taken over."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from instdisc.errors import UserError
from instdisc.runs import locks
from instdisc.runs.locks import NAME, empty_folder, lock_folder

HOLD = """
import sys, time
from pathlib import Path
from instdisc.runs.locks import lock_folder

with lock_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def write_lock(folder: Path, **changes: object) -> Path:
    owner = {**locks._ourselves(), **changes}
    folder.mkdir(exist_ok=True)
    (folder / NAME).write_text(json.dumps(owner))
    return folder / NAME


def test_a_second_process_is_told_the_owner_and_may_follow_when_it_is_killed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"process {owner.pid} on .*--output"):
            lock_folder(folder).__enter__()
        (folder / f".last.pt.{owner.pid}.tmp").write_text("half")
        (folder / ".last.pt.1.tmp").write_text("of somebody else")
        owner.kill()
    with lock_folder(folder):
        assert json.loads((folder / NAME).read_text())["pid"] == os.getpid()
        assert sorted(p.name for p in folder.iterdir()) == [".last.pt.1.tmp", NAME]
    assert not (folder / NAME).exists()


def test_folders_that_were_made_for_the_lock_go_with_it_unless_used(tmp_path: Path) -> None:
    with lock_folder(tmp_path / "a" / "b"):
        pass
    assert not (tmp_path / "a").exists()
    with lock_folder(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "config.json").touch()
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[]", b'{"host": 1, "pid": 2}', b'{"host": "x", "pid": -1}']
)
def test_a_lock_that_cannot_be_read_is_taken_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    with lock_folder(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_a_process_number_that_is_used_again_is_not_the_owner(tmp_path: Path) -> None:
    write_lock(tmp_path, started="1")
    with lock_folder(tmp_path):
        pass
    write_lock(tmp_path)
    with pytest.raises(UserError, match="in use"):
        lock_folder(tmp_path).__enter__()


def test_an_owner_on_another_host_counts_as_dead_when_it_stops_renewing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "BEAT", 0.05)
    monkeypatch.setattr(locks, "STALE", 1.0)
    lock = write_lock(tmp_path, host="elsewhere", pid=7)
    started = time.monotonic()
    with lock_folder(tmp_path):
        assert time.monotonic() - started > 0.8
    lock = write_lock(tmp_path, host="elsewhere", pid=7)
    alive = threading.Timer(0.3, lambda: os.utime(lock, (time.time() + 1, time.time() + 1)))
    alive.start()
    with pytest.raises(UserError, match="process 7 on elsewhere"):
        lock_folder(tmp_path).__enter__()
    alive.join()
    assert json.loads(lock.read_text())["host"] == "elsewhere"


def test_a_requeued_slurm_job_does_not_wait_for_its_former_self(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lock(tmp_path, host="elsewhere", job="12", restart="0")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    started = time.monotonic()
    with lock_folder(tmp_path):
        pass
    assert time.monotonic() - started < 5


def test_a_held_lock_is_renewed_and_a_lost_one_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "BEAT", 0.02)
    with lock_folder(tmp_path):
        os.utime(tmp_path / NAME, (1, 1))
        deadline = time.monotonic() + 10
        while (tmp_path / NAME).stat().st_mtime == 1:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        write_lock(tmp_path, host="elsewhere", token="other")
    assert json.loads((tmp_path / NAME).read_text())["host"] == "elsewhere"


def test_emptying_a_folder_keeps_its_lock(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    run = tmp_path / "run"
    with lock_folder(run):
        (run / "trial").mkdir()
        (run / "trial" / "last.pt").touch()
        (run / "link").symlink_to(outside)
        empty_folder(run)
        assert [p.name for p in run.iterdir()] == [NAME]
    assert (outside / "kept").exists()

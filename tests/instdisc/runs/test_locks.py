"""One run per folder: refusals name the owner, locks of the dead are taken over."""

import errno
import fcntl
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
from instdisc.runs.folders import LOST, temporary_path, write_text
from instdisc.runs.locks import NAME, empty_folder, lock_folder, open_locked

HOLD = """
import sys, time
from pathlib import Path
from instdisc.runs import locks

locks.BEAT = 0.1
try:
    with locks.lock_folder(Path(sys.argv[1])):
        print("held", flush=True)
        time.sleep(60)
except locks.FolderInUse as error:
    print(error)
"""
# In a PID namespace of its own, with the /proc that belongs to it: as in a container.
CONTAINER = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.fixture(scope="session")
def container() -> list[str]:
    try:
        subprocess.run([*CONTAINER, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not make PID namespaces")
    return CONTAINER


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
        name = temporary_path(folder / "last.pt").name
        (folder / name.replace(str(os.getpid()), str(owner.pid))).write_text("half")
        elsewhere = f".last.pt.elsewhere.{owner.pid}.0.tmp"
        (folder / elsewhere).write_text("of a process with the same number")
        owner.kill()
    with lock_folder(folder):
        assert json.loads((folder / NAME).read_text())["pid"] == os.getpid()
        assert sorted(p.name for p in folder.iterdir()) == [elsewhere, NAME]
    assert not (folder / NAME).exists()


@pytest.mark.parametrize("owner", [True, False])
def test_what_a_process_left_that_died_while_it_took_the_lock_goes_with_the_next(
    owner: bool, tmp_path: Path
) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    lock = write_lock(tmp_path, pid=ended.pid, token="half taken")
    half = lock.with_name(f"{NAME}.half")
    half.write_bytes(lock.read_bytes())
    alive = lock.with_name(f"{NAME}.alive")
    alive.write_text(json.dumps(locks._ourselves()))
    if not owner:
        lock.unlink()
    with lock_folder(tmp_path):
        assert sorted(p.name for p in tmp_path.iterdir()) == [NAME, alive.name]


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
def test_a_lock_that_stays_unreadable_is_taken_over(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "BEAT", 0.05)
    monkeypatch.setattr(locks, "GRACE", 0.3)
    (tmp_path / NAME).write_bytes(content)
    started = time.monotonic()
    with lock_folder(tmp_path):
        assert time.monotonic() - started > 0.2
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


@pytest.mark.parametrize("inside", ["owner", "second", "both"])
def test_a_process_in_another_container_of_this_host_is_refused(
    inside: str, container: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    prefix = {each: container if inside in (each, "both") else [] for each in ("owner", "second")}
    with subprocess.Popen([*prefix["owner"], *command], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        lock = json.loads((tmp_path / "run" / NAME).read_text())
        said = subprocess.run(
            [*prefix["second"], *command], capture_output=True, text=True, timeout=30
        ).stdout
        owner.kill()
    assert f"is in use by process {lock['pid']} on {lock['host']}" in said


def test_a_container_takes_the_folder_over_when_the_other_ended(
    container: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen([*container, *command], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        owner.kill()
    soon = HOLD.replace("= 0.1", "= 0.1; locks.STALE = 0.5").replace("sleep(60)", "sleep(0)")
    command[2] = soon
    said = subprocess.run([*container, *command], capture_output=True, text=True, timeout=30)
    assert said.stdout == "held\n", said.stderr


RACE = """
import errno, fcntl, sys
from pathlib import Path
from instdisc.runs import locks

def refuse(*_):
    raise OSError(errno.ENOLCK, "no locks here")

def no_links(*_):
    raise OSError(errno.EPERM, "no links here")

fcntl.flock, Path.hardlink_to = refuse, no_links
sys.stdin.readline()
try:
    with locks.lock_folder(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.readline()
except locks.FolderInUse:
    print("refused", flush=True)
"""


@pytest.mark.parametrize("left", ["nothing", "the lock of a dead process"])
def test_without_flock_and_hard_links_one_of_many_gets_the_folder(
    left: str, tmp_path: Path
) -> None:
    if left != "nothing":
        write_lock(tmp_path, started="1")
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    many = [subprocess.Popen(command, text=True, **pipes) for _ in range(6)]  # type: ignore[call-overload]
    time.sleep(0.5)
    for each in many:
        each.stdin.write("go\n")
        each.stdin.flush()
    said = [each.stdout.readline() for each in many]  # the one that holds it waits for the others
    for each in many:
        each.communicate(timeout=60)
    assert sorted(said) == ["held\n"] + ["refused\n"] * 5


def test_a_run_that_lost_its_folder_writes_nothing_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "BEAT", 0.02)
    folder = tmp_path / "run"
    with lock_folder(folder):
        write_text(folder / "a.json", "ours")
        write_lock(folder, host="elsewhere", pid=7, token="other")  # as if we had been suspended
        deadline = time.monotonic() + 10
        while folder not in LOST:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(UserError, match="taken over by process 7 on elsewhere"):
            write_text(folder / "deep" / "b.json", "ours")
        write_text(tmp_path / "c.json", "elsewhere is fine")
    assert sorted(p.name for p in folder.iterdir()) == [NAME, "a.json"]
    (folder / NAME).unlink()
    with lock_folder(folder):
        write_text(folder / "a.json", "ours again")


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


def test_a_locked_file_is_waited_for_and_shared_by_readers(tmp_path: Path) -> None:
    path, events = tmp_path / "rows", []
    path.write_text("")

    def write() -> None:
        with open_locked(path, "ab", on_wait=lambda: events.append("waiting")) as file:
            events.append("writing")
            file.write(b"x")

    with open_locked(path, "rb", shared=True), open_locked(path, "rb", shared=True) as file:
        writer = threading.Thread(target=write)
        writer.start()
        while not events:
            time.sleep(0.01)
        assert file.read() == b""
        assert events == ["waiting"]
    writer.join(10)
    assert events == ["waiting", "writing"]
    write()
    assert events[2:] == ["writing"]
    assert path.read_bytes() == b"xx"


def test_who_waited_for_a_file_that_was_replaced_gets_the_new_one(tmp_path: Path) -> None:
    path, waiting = tmp_path / "rows", threading.Event()
    path.write_text("old")

    def write() -> None:
        with open_locked(path, "ab", on_wait=waiting.set) as file:
            file.write(b"x")

    with open_locked(path, "rb"):
        writer = threading.Thread(target=write)
        writer.start()
        assert waiting.wait(10)
        (tmp_path / "new").write_text("new")
        (tmp_path / "new").replace(path)
    writer.join(10)
    assert path.read_text() == "newx"


@pytest.mark.parametrize(("number", "opens"), [(errno.ENOLCK, True), (errno.EIO, False)])
def test_a_file_system_without_locks_does_without(
    number: int, opens: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(fcntl, "flock", refuse)
    if opens:
        with open_locked(tmp_path / "rows", "ab") as file:
            file.write(b"x")
    else:
        with pytest.raises(OSError, match="no"), open_locked(tmp_path / "rows", "ab"):
            pass

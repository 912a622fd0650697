"""Disks that fail, stall, or lack what others have: one line, exit code 2, and nothing lost.

failing_disk.c, loaded before libc, makes calls on chosen files fail or never return; the commands
and everything else are real.
"""

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAULTS = Path(__file__).parent
RUN = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import workloads
from instdisc.cli import CommandConfig, run_command

class Words(CommandConfig):
    PROG = "disk"
    DESCRIPTION = "A command under test."

workloads.prepare()
name, root, folder, changes = sys.argv[2:]
task = workloads.TASKS[name].make(Path(root), **json.loads(changes))
sys.exit(run_command(Words, lambda _: task.run(Path(folder)), []))
"""
Run = Callable[..., tuple[int, str]]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled shim."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    made = tmp_path_factory.mktemp("shim") / "failing_disk.so"
    flags = ["-shared", "-fPIC", "-O1", "-o", str(made), str(FAULTS / "failing_disk.c"), "-ldl"]
    subprocess.run([compiler, *flags], check=True)
    return made


@pytest.fixture
def start(library: Path, tmp_path: Path) -> Callable[..., "subprocess.Popen[str]"]:
    """Starts a command on tmp_path/run under rules for the disk."""

    def begin(rules: str, name: str = "pretrain", env: Any = None, **changes: Any) -> Any:
        folder = tmp_path / "run"
        folder.mkdir(exist_ok=True)
        more = {"LD_PRELOAD": str(library), "FAILING_DISK": rules, **(env or {})}
        words = [str(FAULTS), name, str(tmp_path / "in"), str(folder), json.dumps(changes)]
        return subprocess.Popen(
            [sys.executable, "-c", RUN, *words],
            env={**os.environ, "INSTDISC_RUNS": str(folder / "runs"), **more},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    return begin


@pytest.fixture
def run(start: Any) -> Run:
    """Runs a command to its end; exit code and stderr."""

    def finish(*args: Any, **kwargs: Any) -> tuple[int, str]:
        process = start(*args, **kwargs)
        try:
            _, said = process.communicate(timeout=240)  # seconds; minutes would be a hang
        finally:
            process.kill()
        return process.returncode, said

    return finish


def only_line(code: int, said: str) -> str:
    assert code == 2, said
    assert re.fullmatch(r"disk: error: .*\n", said), said
    return said


@pytest.fixture
def goes_on(workloads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Asserts that nothing is damaged, and that the same command comes to the same result."""

    def finish(name: str = "pretrain", **changes: Any) -> None:
        assert not list((tmp_path / "run").rglob("*.damaged"))
        assert workloads.check_files(tmp_path / "run")[1] == []
        task = workloads.TASKS[name].make(tmp_path / "in", **changes)
        found = []
        for folder in (tmp_path / "run", tmp_path / "calm"):
            folder.mkdir(exist_ok=True)
            monkeypatch.setenv("INSTDISC_RUNS", str(folder / "runs"))
            task.run(folder)
            found.append(task.facts(folder))
        assert found[0] == found[1]

    return finish


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (f"write {errno.EIO} .last.pt. 40", "the disk fails"),
        (f"fsync {errno.EIO} .backbone.pt. 2", "the disk fails"),
        (f"write {errno.EDQUOT} .last.pt. 60", "the disk quota is used up"),
        (f"write {errno.ESTALE} metrics.jsonl 3", "the file server no longer has it"),
    ],
)
def test_a_write_that_fails_leaves_what_was_saved(
    run: Run, goes_on: Callable[..., None], tmp_path: Path, rule: str, words: str
) -> None:
    """Checkpoints are written in the background, and the quota is hit in the middle of one."""
    assert words in only_line(*run(rule))
    assert (tmp_path / "run" / "run" / "last.pt").exists()
    assert not list(tmp_path.rglob("*.tmp"))
    goes_on()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_the_disk_does_not_give_is_not_left_out(
    run: Run, goes_on: Callable[..., None], workers: int
) -> None:
    """--skip-bad-images is about images: what is trained on must not depend on the disk."""
    changes = {"workers": workers, "skip_bad_images": True}
    line = only_line(*run(f"read {errno.EIO} class1/5.png 1", **changes))
    assert "class1/5.png: the disk fails" in line
    goes_on(skip_bad_images=True)


@pytest.mark.slow
def test_a_read_that_never_returns_ends_in_a_line(run: Run, goes_on: Callable[..., None]) -> None:
    limit = {"INSTDISC_TIMEOUT_SECONDS": "5"}
    # The check of all images, before the first step, reads it four times.
    line = only_line(*run("read -1 class1/5.png 4", env=limit, workers=2))
    assert "gave no batch for 5 s (a disk that stalls?)" in line
    goes_on()


@pytest.mark.slow
def test_one_of_two_processes_whose_disk_stalls_ends_the_other(start: Any) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    both = []
    for rank in "01":
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": port, "INSTDISC_TIMEOUT_SECONDS": "5"}
        rule = "read -1 train/class1 1" if rank == "1" else ""
        both.append(start(rule, env=env, monitor_every=0))
    try:
        _, said = both[0].communicate(timeout=120)
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert both[0].returncode == 75, said
    assert re.fullmatch(r"disk: all processes live, but one came 5 s late .*\n", said), said


@pytest.mark.slow
def test_a_checkpoint_that_the_disk_does_not_give_stays_where_it_is(
    run: Run, goes_on: Callable[..., None], tmp_path: Path
) -> None:
    assert run("")[0] == 0
    line = only_line(*run(f"read {errno.EIO} /last.pt 0"))
    assert "last.pt cannot be read" in line
    assert "Input/output error" in line
    goes_on()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pretrain", "features", "report"])
def test_a_file_system_without_links_and_locks_is_one_like_others(
    run: Run, goes_on: Callable[..., None], name: str
) -> None:
    rules = f"link {errno.EPERM} / 0; flock {errno.ENOLCK} / 0"
    assert run(rules, name) == (0, "")
    goes_on(name)


def test_pipes_are_no_images_and_no_checkpoints(tmp_path: Path, workloads: Any) -> None:
    """Whoever opens one waits for a writer that will not come."""
    from instdisc.errors import UserError
    from instdisc.images.locations import locate_data
    from instdisc.images.sets import load_images
    from instdisc.networks.weights import open_weights

    data = workloads.write_images(tmp_path / "images")
    os.mkfifo(data / "train" / "class0" / "pipe.png")
    with pytest.raises(UserError, match=r"pipe\.png"):
        load_images(locate_data(str(data)), "train")
    assert len(load_images(locate_data(str(data)), "train", skip_bad=True)) == 24
    shards = tmp_path / "shards"
    shards.mkdir()
    for path in (tmp_path / "backbone.pt", tmp_path / "x.tar", shards / "x.tar"):
        os.mkfifo(path)
    with pytest.raises(UserError, match="no file"):
        open_weights(str(tmp_path / "backbone.pt"))
    for path in (tmp_path / "x.tar", shards):
        with pytest.raises(UserError, match=r"x\.tar|shards"):
            load_images(locate_data(str(path)), "train")

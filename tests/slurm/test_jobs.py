import dataclasses
import os
import re
import socket
from pathlib import Path

import pytest

from instdisc.errors import UserError
from slurm.jobs import (
    Job,
    command_line,
    load_job,
    prepare_folder,
    read_cause,
    read_records,
    read_status,
    refuse_if_running_here,
    safe_name,
    save_job,
    write_record,
    write_status,
    write_submission,
)

NAMES = ["a", "a b", "a-b", "$(touch x)", "`x`", "../../etc", "", ".", "a/b", "ä", "x" * 300, "-rf"]


def test_names_become_folders_of_their_own() -> None:
    folders = [safe_name(name) for name in NAMES]
    assert len(set(folders)) == len(NAMES)
    assert all(re.fullmatch(r"[\w+=][\w.=+-]*", name, re.ASCII) for name in folders), folders
    assert all(len(name) <= 100 for name in folders)


def job(tmp_path: Path, *argv: str) -> Job:
    made = tmp_path / "run" / "backbone.pt"
    return Job(name="j", task="knn", argv=argv, run=str(made.parent), produces=str(made))


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    first = job(tmp_path, "--a b", "$(x)", "ä\n")
    assert load_job(save_job(first, tmp_path / "jobs")) == first


def test_done_means_this_command_and_what_it_made(tmp_path: Path) -> None:
    root, first = tmp_path / "jobs", job(tmp_path, "--seed", "0")
    assert not first.is_done(root)
    folder = save_job(first, root)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "backbone.pt").write_text("")
    assert not first.is_done(root)
    write_status(folder, {**read_status(folder), "state": "done"})
    assert first.is_done(root)
    assert not job(tmp_path, "--seed", "1").is_done(root)
    (tmp_path / "run" / "backbone.pt").unlink()
    assert not first.is_done(root)


def test_a_report_is_out_of_date_once_a_job_before_it_has_ended_since(tmp_path: Path) -> None:
    first = job(tmp_path)
    last = Job(name="last", task="report", argv=(), run="", after=("j",), failed_flag="--missing")
    for each in (first, last):
        write_status(save_job(each, tmp_path), {"state": "done", "attempts": []})
    assert last.is_done(tmp_path)
    write_status(first.folder(tmp_path), {"state": "failed", "attempts": []})
    assert not last.is_done(tmp_path)
    assert dataclasses.replace(last, failed_flag="").is_done(tmp_path)


def test_submitting_again_clears_what_was(tmp_path: Path) -> None:
    folder = save_job(job(tmp_path), tmp_path)
    write_record(folder, 0, 0, {"outcome": "failed", "message": "", "rank": 0})
    write_status(folder, {"state": "failed", "attempts": [{}], "error": "x"})
    save_job(job(tmp_path), tmp_path)
    assert read_records(folder, 0) == {}
    assert read_cause(folder, 0) == {}
    assert read_status(folder)["attempts"] == []
    assert "error" not in read_status(folder)


def test_the_first_bad_end_is_the_cause(tmp_path: Path) -> None:
    for rank, outcome in ((0, "done"), (2, "failed"), (1, "interrupted")):
        write_record(tmp_path, 3, rank, {"outcome": outcome, "message": "", "rank": rank})
    assert read_cause(tmp_path, 3)["rank"] == 2
    assert set(read_records(tmp_path, 3)) == {0, 1, 2}
    assert read_cause(tmp_path, 4) == {}


def test_a_job_that_another_process_runs_is_left_to_it(tmp_path: Path) -> None:
    folder = save_job(job(tmp_path), tmp_path)
    host = socket.gethostname()
    write_submission(folder, cluster="local", job_id=str(os.getpid()), host=host)
    refuse_if_running_here(job(tmp_path), tmp_path)  # ourselves
    write_submission(folder, cluster="local", job_id=str(os.getppid()), host=host)
    with pytest.raises(UserError, match=f"run by process {os.getppid()}"):
        refuse_if_running_here(job(tmp_path), tmp_path)
    write_status(folder, {"state": "done", "attempts": []})
    refuse_if_running_here(job(tmp_path), tmp_path)


def test_a_damaged_status_is_named(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text("{")
    with pytest.raises(UserError, match=r"status.json is damaged: remove it"):
        read_status(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*--jobs"):
        prepare_folder(tmp_path / "file" / "jobs")


def test_a_read_only_file_system_is_named() -> None:
    # Kernel files: nobody can make a folder there, root neither.
    with pytest.raises(UserError, match=r"cannot be written .*--jobs"):
        prepare_folder(Path("/proc/jobs"))


def test_a_job_folder_is_private(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "jobs" / "x")
    assert (tmp_path / "jobs" / "x").stat().st_mode & 0o777 == 0o700


def test_a_command_is_told_which_jobs_before_it_are_not_done(tmp_path: Path) -> None:
    names = {"a b": "done", "c": "failed", "d": "waiting"}
    for name, state in names.items():
        folder = save_job(Job(name=name, task="knn", argv=(), run=""), tmp_path)
        write_status(folder, {"state": state, "attempts": []})
    last = Job(name="last", task="report", argv=("--no-figures",), run="", after=tuple(names))
    assert command_line(save_job(last, tmp_path)) == ["--no-figures"]
    told = dataclasses.replace(last, failed_flag="--missing")
    assert command_line(save_job(told, tmp_path)) == ["--no-figures", "--missing", "c", "d"]
    fine = dataclasses.replace(told, after=("a b",))
    assert command_line(save_job(fine, tmp_path)) == ["--no-figures"]

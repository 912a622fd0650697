"""Files appear whole or not at all."""

import os
import platform
from pathlib import Path

import pytest

from instdisc.errors import UserError
from instdisc.runs import folders


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    folders.write_text(path, "old")

    def fail_half_way() -> None:
        with folders.atomic_file(path) as file:
            file.write(b"new")
            raise RuntimeError("half")

    with pytest.raises(RuntimeError, match="half"):
        fail_half_way()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_no_two_writers_share_a_temporary_name(tmp_path: Path) -> None:
    """Containers on two nodes may have the same process number, and a process writes twice."""
    names = {folders.temporary_path(tmp_path / "last.pt").name for _ in range(100)}
    assert len(names) == 100
    assert all(f".{platform.node()}.{os.getpid()}." in name for name in names)


def test_jsonl_forgives_only_a_last_line_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert folders.read_jsonl(path) == []
    path.write_text('{"a": 1}\n{"a": 2}\n{"a"')
    assert folders.read_jsonl(path) == [{"a": 1}, {"a": 2}]
    path.write_text('{"a": 1}\n{"a"\n{"a": 3}\n')
    with pytest.raises(UserError, match="line 2"):
        folders.read_jsonl(path)


def test_the_newest_backbone_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTDISC_RUNS", str(tmp_path))
    with pytest.raises(UserError, match=r"run `python pretrain/run.py"):
        folders.newest_backbone()
    for age, name in ((50, "new"), (100, "old")):
        file = tmp_path / "pretrain" / name / "backbone.pt"
        file.parent.mkdir(parents=True)
        file.touch()
        os.utime(file, (1e9 - age, 1e9 - age))
    assert folders.newest_backbone().parent.name == "new"


def test_a_folder_made_for_a_run_is_private_and_one_that_is_there_keeps_its_mode(
    tmp_path: Path,
) -> None:
    before = os.umask(0)
    try:
        folders.make_private(tmp_path / "a" / "b" / "run")
        (tmp_path / "shared").mkdir(mode=0o775)
        folders.make_private(tmp_path / "shared")
        folders.make_private(tmp_path / "shared" / "run")
    finally:
        os.umask(before)
    modes = {"a": 0o755, "a/b": 0o755, "a/b/run": 0o700, "shared": 0o775, "shared/run": 0o700}
    assert {name: (tmp_path / name).stat().st_mode & 0o777 for name in modes} == modes
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        folders.make_private(tmp_path / "file" / "run")

"""Checkpoints survive what happens to files."""

import os
import pickle
import resource
import signal
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch

from instdisc.errors import UserError
from instdisc.runs.checkpoint import load_checkpoint, save_checkpoint, weights_hash


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    save_checkpoint(path, "train", {"step": 3, "bank": torch.arange(6.0).reshape(2, 3)})
    state = load_checkpoint(path, "train")
    assert state["step"] == 3
    assert torch.equal(state["bank"], torch.arange(6.0).reshape(2, 3))
    with pytest.raises(UserError, match="is not a backbone checkpoint"):
        load_checkpoint(path, "backbone")


def test_every_truncation_and_many_flipped_bytes_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    save_checkpoint(path, "train", {"bank": torch.zeros(1000)})
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError):
            load_checkpoint(path, "train")
    middle = whole.index(b"\0" * 2000) + 1000  # inside the tensor
    path.write_bytes(whole[:middle] + b"\x01" + whole[middle + 1 :])
    with pytest.raises(UserError, match="cannot be read"):
        load_checkpoint(path, "train")


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.system, (f"touch '{marker}'",))

    for name, write in (("a.pt", torch.save), ("b.pt", _bare_pickle)):
        write({"format": "instdisc/train/1", "x": Evil()}, tmp_path / name)
        with pytest.raises(UserError):
            load_checkpoint(tmp_path / name, "train")
    assert not marker.exists()


def _bare_pickle(value: object, path: Path) -> None:
    path.write_bytes(pickle.dumps(value))


def test_a_full_disk_is_an_os_error_and_the_old_checkpoint_survives(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(path, "train", {"step": 1})
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            save_checkpoint(path, "train", {"step": 2, "x": torch.zeros(1_000_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_the_hash_depends_on_names_shapes_and_values_only() -> None:
    state = {"a": torch.arange(4.0), "b": torch.ones(2, 2)}
    same = {"b": torch.ones(2, 2), "a": torch.arange(8.0)[:4]}
    assert weights_hash(state) == weights_hash(same)
    for other in (
        {**state, "a": torch.arange(4.0) + 1},
        {"c": state["a"], "b": state["b"]},
        {**state, "b": torch.ones(4)},
        {**state, "a": torch.arange(4.0).double()},
    ):
        assert weights_hash(other) != weights_hash(state)


def test_a_checkpoint_that_unpacks_to_more_than_its_size_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "good.pt", "train", {"step": 1, "x": torch.zeros(1_000_000)})
    with ZipFile(tmp_path / "good.pt") as good, ZipFile(tmp_path / "bomb.pt", "w") as bomb:
        for member in good.infolist():
            bomb.writestr(member.filename, good.read(member), ZIP_DEFLATED)
    assert (tmp_path / "bomb.pt").stat().st_size < 100_000
    with pytest.raises(UserError, match=r"would unpack to 4,\d+,\d+ bytes"):
        load_checkpoint(tmp_path / "bomb.pt", "train")
    assert load_checkpoint(tmp_path / "good.pt", "train")["step"] == 1

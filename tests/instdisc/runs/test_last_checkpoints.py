"""The last two checkpoints: a damaged one is set aside, and the one before it is used."""

import errno
import logging
import os
from pathlib import Path

import pytest
import torch

from instdisc.errors import UserError
from instdisc.runs.checkpoint import (
    load_checkpoint,
    load_last,
    previous_of,
    remove_checkpoints,
    save_checkpoint,
)
from instdisc.runs.log import LOGGER


@pytest.fixture
def last(tmp_path: Path) -> Path:
    """Three saves."""
    path = tmp_path / "last.pt"
    for step in (1, 2, 3):
        state = {"step": step, "bank": torch.full((1000,), float(step))}
        save_checkpoint(path, "train", state, keep_previous=True)
    return path


def flip(path: Path) -> None:
    """One bit in the middle of the tensor; as another file, so that no second name shares it."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)


def test_two_are_kept(last: Path) -> None:
    assert sorted(p.name for p in last.parent.iterdir()) == ["last.previous.pt", "last.pt"]
    assert load_checkpoint(last, "train")["step"] == 3
    assert load_checkpoint(previous_of(last), "train")["step"] == 2
    remove_checkpoints(last)
    assert load_last(last, "train") is None


@pytest.mark.parametrize("damage", ["flipped bit", "truncated", "gone", "empty"])
def test_the_one_before_takes_its_place(
    last: Path, damage: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOGGER, "propagate", True)
    if damage == "flipped bit":
        flip(last)
    elif damage == "truncated":
        last.write_bytes(last.read_bytes()[:-100])
    else:
        last.unlink()
        if damage == "empty":
            last.touch()
    with caplog.at_level(logging.WARNING, "instdisc"):
        state = load_last(last, "train")
    assert state is not None
    assert state["step"] == 2
    assert not last.exists()
    assert (last.parent / "last.pt.damaged").exists() == (damage != "gone")
    assert ("last.pt.damaged" in caplog.text) == (damage != "gone")
    save_checkpoint(last, "train", {"step": 9}, keep_previous=True)
    assert load_checkpoint(previous_of(last), "train")["step"] == 2


def test_with_none_that_loads_nothing_is_moved(last: Path) -> None:
    flip(last)
    flip(previous_of(last))
    with pytest.raises(UserError, match=r"last\.pt cannot be read"):
        load_last(last, "train")
    assert sorted(p.name for p in last.parent.iterdir()) == ["last.previous.pt", "last.pt"]


def test_a_file_of_another_kind_is_not_damage(last: Path) -> None:
    save_checkpoint(last, "backbone", {}, keep_previous=True)
    with pytest.raises(UserError, match="is not a train checkpoint"):
        load_last(last, "train")
    assert last.exists()


def test_a_failing_save_leaves_both_as_they_were(
    last: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            save_checkpoint(last, "train", {"step": 4}, keep_previous=True)
    assert load_checkpoint(last, "train")["step"] == 3
    assert load_checkpoint(previous_of(last), "train")["step"] == 2
    assert len(list(last.parent.iterdir())) == 2


def test_a_file_system_without_links_keeps_two_as_well(
    last: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    save_checkpoint(last, "train", {"step": 4}, keep_previous=True)
    assert load_checkpoint(last, "train")["step"] == 4
    assert load_checkpoint(previous_of(last), "train")["step"] == 3

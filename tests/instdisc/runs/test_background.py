"""Checkpoints written by a thread: what they hold, when they fail, what a kill leaves."""

import errno
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from instdisc.errors import Interrupted
from instdisc.runs.background import BackgroundWriter
from instdisc.runs.checkpoint import copy_to_host, load_checkpoint, previous_of, save_checkpoint
from instdisc.runs.log import LOGGER


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "last.pt")


def fail_while_writing(error: Exception) -> None:
    with BackgroundWriter() as writer:
        writer.start(full)
        raise error


def test_a_copy_has_its_own_memory_and_all_that_a_state_has() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model(torch.ones(2, 3, 5, 5)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3, "x": (1,)}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copied = copy_to_host(state)
    optimizer.step()
    assert not torch.equal(model[0].weight, before["0.weight"])
    for name, value in before.items():
        assert torch.equal(copied["model"][name], value)
        assert copied["model"][name].stride() == value.stride()
    assert copied["model"]._metadata == state["model"]._metadata  # versions of the modules
    assert copied["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    assert (copied["step"], copied["x"]) == (3, (1,))
    again = copy_to_host({**state, "model": model.state_dict()}, copied)
    assert torch.equal(again["model"]["0.weight"], model[0].weight)
    assert again["model"]["0.weight"].data_ptr() == copied["model"]["0.weight"].data_ptr()
    wider = copy_to_host({"model": {"0.weight": torch.ones(5)}}, copied)
    assert wider["model"]["0.weight"].tolist() == [1.0] * 5


def test_one_write_at_a_time_and_the_end_waits() -> None:
    running, order = threading.Lock(), []

    def write(number: int) -> Callable[[], None]:
        def work() -> None:
            assert running.acquire(blocking=False), "two at a time"
            time.sleep(0.05)
            order.append(number)
            running.release()

        return work

    with BackgroundWriter() as writer:
        for number in range(4):
            writer.start(write(number))
            assert len(order) >= number  # the one before is done
    assert order == [0, 1, 2, 3]


def test_a_failed_write_is_raised_by_the_next_or_at_the_end() -> None:
    with BackgroundWriter() as writer:
        writer.start(full)
        with pytest.raises(OSError, match="No space"):
            writer.start(lambda: None)
        writer.start(lambda: None)  # told once
    with pytest.raises(OSError, match="No space"), BackgroundWriter() as writer:
        writer.start(full)


def test_an_interruption_that_saved_nothing_is_not_one() -> None:
    with pytest.raises(OSError, match="No space"):
        fail_while_writing(Interrupted("stopped after step 3, saved in last.pt"))


def test_another_error_is_not_hidden(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LOGGER, "propagate", True)
    with caplog.at_level(logging.WARNING, "instdisc"), pytest.raises(ZeroDivisionError):
        fail_while_writing(ZeroDivisionError())
    assert "not written: last.pt: the disk is full" in caplog.text


def save_in_background(writer: BackgroundWriter, folder: Path, step: int) -> None:
    """As pretraining does: backbone.pt, then last.pt."""
    state = copy_to_host({"step": step, "bank": torch.full((20_000,), float(step))})

    def write() -> None:
        save_checkpoint(folder / "backbone.pt", "backbone", {"step": step})
        save_checkpoint(folder / "last.pt", "train", state, keep_previous=True)

    writer.start(write)


def save_from(folder: Path, step: int) -> None:
    """One save after the other, until a kill."""
    writer = BackgroundWriter()
    while True:
        save_in_background(writer, folder, step)
        step += 1


def kill_savers(folder: Path) -> None:
    started = time.monotonic()
    for step in (1, 2):
        with BackgroundWriter() as writer:
            save_in_background(writer, folder, step)
    span = 2 * (time.monotonic() - started)  # a kill comes within it, in any part of the saves
    draw = random.Random(0)
    for _ in range(20):
        pid = os.fork()
        if not pid:
            try:
                save_from(folder, step + 1)
            finally:
                os._exit(3)
        time.sleep(draw.uniform(0, span))
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        last = load_checkpoint(folder / "last.pt", "train")
        assert last["step"] >= step
        if last["step"] == step:  # killed too early, as all would be on a machine that got busy
            span = min(1.5 * span, 5)
        step = last["step"]
        assert torch.equal(last["bank"], torch.full((20_000,), float(step)))
        before = load_checkpoint(previous_of(folder / "last.pt"), "train")
        assert before["step"] in (step - 1, step)
        backbone = load_checkpoint(folder / "backbone.pt", "backbone")
        assert backbone["step"] in (step, step + 1)
    assert step > 2  # not all were killed in their first save


@pytest.mark.slow
def test_twenty_kills_leave_a_checkpoint_that_loads(tmp_path: Path) -> None:
    # From a process of its own: a fork of this one, which has threads, may wait for their locks.
    process = multiprocessing.get_context("spawn").Process(target=kill_savers, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0

"""Which errors are the machine's; real ones are in tests/faults/test_resources.py."""

import errno
import os
from multiprocessing.resource_sharer import DupFd

import pytest
import torch

from instdisc.errors import explain, some_of

WORKER = (
    "Caught MemoryError in DataLoader worker process 0.\nOriginal Traceback:\n  x\nMemoryError: {}"
)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "No space", "f"), "f: the disk is full"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory: use fewer --workers or"),
        (MemoryError(), "out of memory: use"),
        (MemoryError(WORKER.format("/a/cat.png did not fit")), "out of memory (/a/cat.png did not"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB."),
            "(wanted 2.50 GiB)",
        ),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error."), "loader"),
        (RuntimeError("DataLoader worker (pid(s) 7, 8) exited unexpectedly"), "loader process"),
    ],
)
def test_one_line_with_the_remedy(error: Exception, words: str) -> None:
    line = explain(error, ["workers", "batch_size", "seed"])
    assert line is not None
    assert words in line
    assert "\n" not in line
    assert "--accumulate" not in line  # the command has no such option


def test_torch_says_it_in_these_words() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50)
    assert explain(caught.value) == (
        "out of memory (wanted 4,294,967,296 MiB): free some, or use a larger machine"
    )


def test_a_loader_that_died_before_its_batch_was_fetched() -> None:
    shared = DupFd(os.open(os.devnull, os.O_RDONLY))
    address, key = shared._id
    shared._id = (address + "-of-a-dead-process", key)
    with pytest.raises(FileNotFoundError) as lost:
        shared.detach()
    line = explain(lost.value, ["workers"])
    assert line is not None
    assert line.startswith("a loader process died")


@pytest.mark.parametrize(
    "bug",
    [
        RuntimeError("mat1 and mat2 shapes"),
        OSError(errno.EBADF, "broken"),
        KeyError("x"),
        EOFError(),
    ],
)
def test_bugs_are_not_explained_away(bug: Exception) -> None:
    assert explain(bug, ["workers"]) is None


def test_some_names_stand_for_many() -> None:
    names = [str(number) for number in range(1005)]
    assert some_of(names) == "0, 1, 2, 3, 4 and 1,000 more"
    assert some_of(names[:5]) == "0, 1, 2, 3, 4"
    assert some_of(names[:6], 2) == "0, 1 and 4 more"
    assert some_of([]) == ""

"""Who is gone, who has left, who was never one of us; real sockets, limits of a second."""

import contextlib
import json
import os
import queue
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as torch_dist

from instdisc.errors import Interrupted, UserError
from instdisc.training import dist, heartbeat
from instdisc.training.heartbeat import Heartbeat


class First:
    """The first of three processes, and connections as the others would make them."""

    def __init__(self) -> None:
        self.store = torch_dist.HashStore()
        self.ends: queue.Queue[tuple[int, str]] = queue.Queue()
        self.heart = self.join(0)

    def join(self, rank: int) -> Heartbeat:
        return Heartbeat(
            self.store,
            rank=rank,
            world_size=3,
            address="127.0.0.1",
            end=lambda code, line: self.ends.put((code, line)),
        )

    def connect(self, **words: Any) -> socket.socket:
        """A connection that has sent a first line; the right token, if none is given."""
        found = json.loads(self.store.get(heartbeat.KEY))
        stream = socket.create_connection(("127.0.0.1", found["port"]), timeout=5)
        line = {"token": found["token"], **words}
        stream.sendall(json.dumps(line).encode() + b"\n")
        return stream


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> Iterator[First]:
    monkeypatch.setenv("INSTDISC_SILENCE_SECONDS", "1")
    made = First()
    yield made
    made.heart.leave(failed=False)


def message(heart: Heartbeat) -> str:
    cause = heart.cause(10)
    assert isinstance(cause, Interrupted)
    return str(cause)


def test_one_that_dies_is_named_to_all_and_who_does_not_end_is_ended(first: First) -> None:
    second = first.join(1)
    third = first.connect(rank=2, place="process 7 on n2")
    third.close()
    line = "rank 2 of 3 (process 7 on n2) died: run the same command again, it goes on from what"
    assert message(first.heart).startswith(line)
    assert message(second) == message(first.heart)
    second.leave(failed=False)  # it has ended by itself
    assert first.ends.get(timeout=10) == (75, message(first.heart))
    assert first.ends.empty()


def test_one_that_says_nothing_is_missed(first: First) -> None:
    second = first.join(1)
    with first.connect(rank=2, place="x"):
        assert "no answer for 1 s from rank 2 of 3 (x): run" in message(first.heart)
        assert message(second) == message(first.heart)
        second.leave(failed=False)


def test_one_that_never_came_is_missed(first: First) -> None:
    assert "no answer for 1 s from rank 1 of 3, rank 2 of 3: run" in message(first.heart)


def test_the_first_is_missed_too(first: First) -> None:
    second = first.join(1)
    for each in first.heart._sockets[2:]:  # as the kernel does for a process that was killed
        with contextlib.suppress(OSError):  # the one that listens
            each.shutdown(socket.SHUT_RDWR)
    assert "rank 0 of 3 (process" in message(second)
    second.leave(failed=False)


def test_who_says_goodbye_is_not_missed(first: First) -> None:
    for rank in (1, 2):
        first.join(rank).leave(failed=False)
    assert first.heart.cause(1.5) is None
    assert first.ends.empty()


def test_who_failed_is_referred_to_and_ends_nobody_by_force(first: First) -> None:
    second = first.join(1)
    first.join(2).leave(failed=True)
    for heart in (first.heart, second):
        cause = heart.cause(10)
        assert isinstance(cause, UserError)
        assert str(cause).startswith("rank 2 of 3 (process ")
        assert str(cause).endswith(" failed: see its message")
    time.sleep(1.5)
    assert first.ends.empty()
    second.leave(failed=True)


@pytest.mark.parametrize(
    "words",
    [{"rank": 1, "token": "guessed"}, {"rank": 0}, {"rank": 9}, {"beat": True}, {"rank": "1"}],
)
def test_a_stranger_is_shown_the_door(first: First, words: dict[str, Any]) -> None:
    third = first.join(2)
    with first.connect(**words) as other:
        assert other.recv(1) == b""
    mine = first.join(1)
    assert first.heart.cause(0.3) is None
    for each in (mine, third):
        each.leave(failed=False)


def test_garbage_is_shown_the_door(first: First) -> None:
    found = json.loads(first.store.get(heartbeat.KEY))
    for garbage in (b"\xff\n", b"[" * 5000, b"GET / HTTP/1.1\r\n\r\n", b"3\n", b"x" * 5000):
        with socket.create_connection(("127.0.0.1", found["port"]), timeout=5) as stream:
            stream.sendall(garbage)
            with contextlib.suppress(ConnectionResetError):  # unread bytes were left
                assert stream.recv(1) == b""


def test_a_fork_keeps_no_connection(first: First) -> None:
    """A loader process that outlives its parent would pass for it."""
    for rank in (1, 2):
        first.join(rank)
    pid = os.fork()
    if not pid:
        own = [each.fileno() for each in first.heart._sockets]
        os._exit(sum(number >= 0 for number in own))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert first.heart.cause(1.5) is None  # and the parent keeps its own


@pytest.mark.parametrize("text", ["soon", "0", "1.5", "-3"])
def test_a_limit_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTDISC_SILENCE_SECONDS", text)
    with pytest.raises(UserError, match="give whole seconds"):
        heartbeat.silence_limit()


def test_the_first_process_out_of_reach_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = torch_dist.HashStore()
    store.set(heartbeat.KEY, json.dumps({"port": port, "token": "", "place": ""}))
    with pytest.raises(UserError, match=r"rank 1 cannot connect .* allow TCP between the nodes"):
        Heartbeat(store, rank=1, world_size=2, address="127.0.0.1", end=lambda *_: None)


@pytest.mark.slow
def test_a_job_that_is_suspended_as_a_whole_misses_nobody(
    start_ranks: Callable[[Callable[[int], object]], list[Any]], tmp_path: Path
) -> None:
    """As `scontrol suspend` and Ctrl-Z do."""

    def work(rank: int) -> None:
        os.environ["INSTDISC_SILENCE_SECONDS"] = "2"
        with dist.joined("cpu"):
            (tmp_path / str(rank)).touch()
            while not dist.agree((tmp_path / "end").exists()):
                time.sleep(0.01)

    processes = start_ranks(work)
    until = time.monotonic() + 60
    while not all((tmp_path / rank).exists() for rank in "01") and time.monotonic() < until:
        time.sleep(0.05)
    for number, pause in ((signal.SIGSTOP, 5), (signal.SIGCONT, 5)):
        for process in processes:
            os.kill(process.pid, number)
        time.sleep(pause)
    (tmp_path / "end").touch()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]

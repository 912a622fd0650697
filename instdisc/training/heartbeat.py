"""Finds the rank that is gone: every process tells the first that it lives, the first tells all.

Collectives fail at once when a process was killed, without its rank; they wait for their timeout,
hours at worst, for one that was stopped or whose node has vanished. So a thread of each process
exchanges lines with the first process, six times in the time after which silence counts as death.
It goes on while its process lists images for hours, and touches no file.

Silence is counted in beats of our own: a job that was suspended as a whole finds no rank missing.
"""

import contextlib
import json
import os
import platform
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from instdisc.errors import EXIT_INTERRUPTED, Interrupted, UserError, some_of
from instdisc.names import SILENCE_VARIABLE

SILENCE_SECONDS = 60
BEATS = 6  # in the time after which silence counts as death
LONGEST_LINE = 4096
KEY = "instdisc/heartbeat"
AGAIN = "run the same command again, it goes on from what is saved"


class Store(Protocol):
    """What is needed of torch's store."""

    def set(self, key: str, value: str, /) -> object:
        """Puts a value where all processes find it."""

    def get(self, key: str, /) -> bytes:
        """Waits for a value."""


def silence_limit() -> int:
    """After how many seconds a process that says nothing counts as dead."""
    text = os.environ.get(SILENCE_VARIABLE) or str(SILENCE_SECONDS)
    if not text.isdecimal() or int(text) == 0:
        raise UserError(f"{SILENCE_VARIABLE}={text}: give whole seconds, at least 1")
    return int(text)


class Connection:
    """Lines of JSON to and from another process, whose rank is known once it has said it."""

    def __init__(self, stream: socket.socket) -> None:
        stream.setblocking(False)
        self.stream, self._begun = stream, b""

    def say(self, **words: object) -> None:
        """Sends a line; who takes none is noticed by silence."""
        with contextlib.suppress(OSError):
            self.stream.send(json.dumps(words).encode() + b"\n")

    def hear(self) -> tuple[list[dict[str, Any]], bool]:
        """The lines that have come, and whether more can come."""
        try:
            data = self.stream.recv(LONGEST_LINE)
        except BlockingIOError:
            return [], True
        except OSError:
            return [], False
        *lines, self._begun = (self._begun + data).split(b"\n")
        try:
            said = [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError, RecursionError):  # another program
            return [], False
        return said, bool(data) and len(self._begun) < LONGEST_LINE


class Peer:
    """A process that is watched: its name in messages, and how long it has been silent."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.name = rank, f"rank {rank} of {world_size}"
        self.connection: Connection | None = None
        self.missed = 0  # beats of ours since its last one

    def joins(self, connection: Connection, place: object) -> None:
        """It has connected."""
        self.connection, self.missed = connection, 0
        self.name += f" ({place})"


class Heartbeat:
    """Watches the other processes in a thread, until `leave`.

    Args:
        store: common to all processes.
        rank: of this process.
        world_size: how many there are.
        address: the first process's host, as the others name it.
        end: ends this process from the thread, with an exit code and a line: if it waits for the
            one that is gone it cannot end by itself.

    Raises:
        UserError: the first process cannot be reached.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        address: str,
        end: Callable[[int, str], object],
    ) -> None:
        self.limit, self._end, self._rank = silence_limit(), end, rank
        watched = range(1, world_size) if rank == 0 else range(1)
        self._peers = {each: Peer(each, world_size) for each in watched}
        self._cause: Exception | None = None
        self._known, self._left, self._failed = threading.Event(), threading.Event(), False
        self._selector = selectors.DefaultSelector()
        self._waker, waked = socket.socketpair()
        self._sockets = [self._waker, waked]
        self._selector.register(waked, selectors.EVENT_READ)
        self._server: socket.socket | None = None
        self._token = ""
        _OPEN.add(self)
        if rank == 0:
            self._listen(store, address)
        else:
            self._connect(store, address)
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def cause(self, seconds: float) -> Exception | None:
        """Why collectives fail: which process is gone or failed, if that is known in time."""
        self._known.wait(seconds)
        return self._cause

    def leave(self, *, failed: bool) -> None:
        """Says goodbye, and whether our own message tells of an error."""
        self._failed = failed
        self._left.set()
        with contextlib.suppress(OSError):
            self._waker.send(b"x")
        self._thread.join(self.limit)

    def close_sockets(self) -> None:
        """Closes what is open; in a fork of this process its copies."""
        for each in self._sockets:
            each.close()
        self._selector.close()

    def _listen(self, store: Store, address: str) -> None:
        self._token = secrets.token_hex(16)
        local = address == "localhost" or address.startswith("127.")
        dual = not local and socket.has_dualstack_ipv6()
        self._server = socket.create_server(
            ("127.0.0.1" if local else "", 0),
            family=socket.AF_INET6 if dual else socket.AF_INET,
            backlog=len(self._peers),
            dualstack_ipv6=dual,
        )
        self._server.setblocking(False)
        self._sockets.append(self._server)
        self._selector.register(self._server, selectors.EVENT_READ)
        port = self._server.getsockname()[1]
        store.set(KEY, json.dumps({"port": port, "token": self._token, "place": _place()}))

    def _connect(self, store: Store, address: str) -> None:
        found = json.loads(store.get(KEY))
        try:
            stream = socket.create_connection((address, found["port"]), timeout=self.limit)
        except OSError as error:
            raise UserError(
                f"rank {self._rank} cannot connect to the first process, {address} port "
                f"{found['port']} ({error}): allow TCP between the nodes"
            ) from None
        connection = self._add(stream)
        self._peers[0].joins(connection, found["place"])
        connection.say(token=found["token"], rank=self._rank, place=_place())

    def _add(self, stream: socket.socket) -> Connection:
        connection = Connection(stream)
        self._sockets.append(stream)
        self._selector.register(stream, selectors.EVENT_READ, connection)
        return connection

    def _watch(self) -> None:
        """The thread."""
        beat, lost = time.monotonic(), None
        while not self._left.is_set() and lost is None:
            for key, _ in self._selector.select(max(0.0, beat - time.monotonic())):
                if key.fileobj is self._server:
                    with contextlib.suppress(OSError):
                        self._add(self._server.accept()[0])
                elif key.data is not None:
                    lost = lost or self._hear(key.data)
            if time.monotonic() >= beat:
                beat = time.monotonic() + self.limit / BEATS
                lost = lost or self._beat()
        if lost is not None:
            self._tell(Interrupted(lost), lost=lost)
            # Where a collective fails the process ends in order; elsewhere it may wait forever.
            if not self._left.wait(self.limit):
                self._end(EXIT_INTERRUPTED, lost)
        for peer in self._peers.values():
            if peer.connection is not None:
                peer.connection.say(bye=True, failed=self._failed)
        self.close_sockets()

    def _beat(self) -> str | None:
        """Sends a line to all; who has been silent for too long."""
        for peer in self._peers.values():
            peer.missed += 1
            if peer.connection is not None:
                peer.connection.say(beat=True)
        silent = [peer.name for peer in self._peers.values() if peer.missed > BEATS]
        if not silent:
            return None
        return f"no answer for {self.limit} s from {some_of(silent)}: {AGAIN}"

    def _hear(self, connection: Connection) -> str | None:
        """What a connection says; who is lost by that."""
        said, more = connection.hear()
        for words in said:
            peer = self._peer(connection) or self._welcome(connection, words)
            if peer is None:
                more = False
                break
            peer.missed = 0
            if "lost" in words:
                return str(words["lost"])
            if "failure" in words:
                self._tell(UserError(str(words["failure"])))
            if "bye" in words:
                del self._peers[peer.rank]
                if words["failed"]:
                    # No end by force: who needs it for a collective sees that fail at its end.
                    failure = f"{peer.name} failed: see its message"
                    self._tell(UserError(failure), failure=failure)
        if more:
            return None
        peer = self._peer(connection)
        self._selector.unregister(connection.stream)
        connection.stream.close()
        return f"{peer.name} died: {AGAIN}" if peer is not None else None

    def _peer(self, connection: Connection) -> Peer | None:
        found = (each for each in self._peers.values() if each.connection is connection)
        return next(found, None)

    def _welcome(self, connection: Connection, words: dict[str, Any]) -> Peer | None:
        """The process whose first line this is; None for another program."""
        peer = self._peers.get(words.get("rank", -1))
        token = str(words.get("token")).encode()
        if peer is None or not secrets.compare_digest(token, self._token.encode()):
            return None
        peer.joins(connection, words.get("place"))
        if self._server is not None and all(each.connection for each in self._peers.values()):
            self._selector.unregister(self._server)
            self._server.close()  # all ranks have connected
        return peer

    def _tell(self, cause: Exception, **words: str) -> None:
        """Remembers what happened, the first time; the first process passes it on."""
        if self._cause is None:
            self._cause = cause
            self._known.set()
        for peer in self._peers.values():
            if peer.connection is not None:
                peer.connection.say(**words)


_OPEN: weakref.WeakSet[Heartbeat] = weakref.WeakSet()


def _close_copies() -> None:
    for each in list(_OPEN):
        each.close_sockets()
    _OPEN.clear()


# A loader process that outlives its parent would keep the connection open, as if both were alive.
os.register_at_fork(after_in_child=_close_copies)


def _place() -> str:
    return f"process {os.getpid()} on {platform.node()}"

"""Writing files while the work goes on."""

import concurrent.futures
from collections.abc import Callable
from types import TracebackType

from instdisc.errors import Interrupted, explain
from instdisc.runs.log import LOGGER


class BackgroundWriter:
    """Runs one write at a time in a thread; the next call raises what went wrong in it.

    As a context it waits for the write at its end. Its thread is no daemon: a process that ends
    another way waits too.
    """

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[object] | None = None

    def __enter__(self) -> "BackgroundWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as failure:
            # An interruption promises that the work is saved; other errors are not to be hidden.
            if error is None or isinstance(error, Interrupted):
                raise
            LOGGER.warning(f"the last checkpoint was not written: {explain(failure) or failure}")

    def start(self, write: Callable[[], object]) -> None:
        """Waits for the write before, then begins this one."""
        self.wait()
        self._pending = self._pool.submit(write)

    def wait(self) -> None:
        """Returns when nothing is being written; raises the error of a write that failed."""
        if self._pending is None:
            return
        concurrent.futures.wait([self._pending])  # may be interrupted, then it is still pending
        pending, self._pending = self._pending, None
        pending.result()

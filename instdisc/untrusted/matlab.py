"""MATLAB files of unknown origin."""

import multiprocessing
import resource
import struct
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import scipy.io
from scipy.io.matlab import MatReadError

from instdisc.errors import UserError

# Memory for a file: a few bytes of it can ask for an array of gigabytes.
BASE_BYTES, TIMES_SIZE = 1 << 28, 64  # bytes; compressed files unpack to about ten times their size
# What SciPy raises for a damaged file; the last are its own, for tags out of order.
DAMAGED = (
    *(TypeError, LookupError, AttributeError, ArithmeticError, ValueError, OSError, zlib.error),
    *(MatReadError, struct.error, MemoryError, RecursionError, AssertionError, NameError),
)


def read_mat(path: Path, *, squeeze: bool = False) -> dict[str, Any]:
    """The variables of a MATLAB file.

    A process of its own reads it: scipy's reader is written in C and can crash on damaged files.
    It is forked, so that nothing has to be imported again; it does nothing but read, and gets no
    more memory than a file of this size can need.

    Args:
        path: the file.
        squeeze: leave out axes of length 1, which MATLAB adds.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(path, squeeze, sender), daemon=True)
    child.start()
    sender.close()
    try:
        content, problem = receiver.recv()
    except (EOFError, OSError):
        content, problem = {}, f"{path} is damaged: scipy's reader of MATLAB files crashed on it"
    finally:
        child.join()
        receiver.close()
    if problem:
        raise UserError(problem)
    return dict(content)


def _send(path: Path, squeeze: bool, sender: Connection) -> None:
    content, problem = {}, ""
    try:
        _limit_memory(BASE_BYTES + TIMES_SIZE * path.stat().st_size)
        content = scipy.io.loadmat(str(path), appendmat=False, squeeze_me=squeeze)
    except FileNotFoundError:
        problem = f"no file {path}"
    except NotImplementedError:
        problem = f"{path} is MATLAB v7.3 (HDF5): save it with -v7 and try again"
    except DAMAGED as error:
        problem = f"{path} is not a MATLAB file: {error or type(error).__name__}"
    sender.send((content, problem))


def _limit_memory(more: int) -> None:
    """Lets this process have so many bytes more than it has; only Linux tells how many that is."""
    counts = Path("/proc/self/statm")
    if counts.exists():
        used = int(counts.read_text().split()[0]) * resource.getpagesize()
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = used + more if most == resource.RLIM_INFINITY else min(used + more, most)
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))

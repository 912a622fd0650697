"""MATLAB files of unknown origin, read where a crash does no harm."""

import multiprocessing
import struct
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import scipy.io
from scipy.io.matlab import MatReadError

from instdisc.errors import UserError

MAT_ERRORS = (
    *(
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        ValueError,
        OSError,
        zlib.error,
        MatReadError,
        struct.error,
    ),
    *(MemoryError, RecursionError, AssertionError, NameError),  # SciPy's own, for tags out of order
)


def read_mat(path: Path) -> dict[str, Any]:
    """The variables of a MATLAB file.

    A process of its own reads it: scipy's reader is written in C and can crash on damaged files.
    It is forked, so that nothing has to be imported again; it does nothing but read.

    Raises:
        UserError: there is no such file, or it cannot be read.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send_mat, args=(path, sender), daemon=True)
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


def _send_mat(path: Path, sender: Connection) -> None:
    content, problem = {}, ""
    try:
        content = scipy.io.loadmat(str(path), appendmat=False)
    except FileNotFoundError:
        problem = f"no file {path}"
    except NotImplementedError:
        problem = f"{path} is MATLAB v7.3 (HDF5): save it with -v7 and try again"
    except MAT_ERRORS as error:
        problem = f"{path} is not a MATLAB file: {error or type(error).__name__}"
    sender.send((content, problem))

"""What ends a command: errors with a fix, interruptions, the machine's errors. Imports no torch."""

import errno
import re
import traceback
from collections.abc import Collection, Sequence

from instdisc.names import TIMEOUT_VARIABLE

EXIT_INTERRUPTED = 75  # EX_TEMPFAIL: the same command will go on
EXIT_PIPE = 141  # 128 + SIGPIPE, as shells show a command whose reader has gone


class UserError(ValueError):
    """An error with a fix, which the message names; the command exits with code 2."""


def some_of(names: Sequence[str], count: int = 5) -> str:
    """The first names, and how many more there are, for a message of one line."""
    more = f" and {len(names) - count:,} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


class Interrupted(Exception):
    """A signal ended the work, which is saved; the command exits with code 75: run it again."""


MENDABLE = {
    errno.ENOSPC: "the disk is full: free some space, then run the same command again",
    errno.EDQUOT: "the disk quota is used up: free some space, then run the same command again",
    errno.EFBIG: "the file would pass the size limit: raise it (ulimit -f)",
    errno.EACCES: "permission denied: choose another folder or change its permissions",
    errno.EPERM: "not permitted: choose another folder or change its permissions",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.ENAMETOOLONG: "the name is too long: choose a shorter one",
    errno.ENOTDIR: "a part of the path is a file, not a folder: choose another one",
    errno.EIO: "the disk fails (input/output error): check it, then run the same command again",
    errno.ESTALE: "the file server no longer has it: mount it again, then run the same command",
    errno.ETIMEDOUT: "the file server does not answer: run the same command when it does",
    errno.ENOTCONN: "its file system is not connected: mount it again, then run the same command",
}
# Errors of a disk or file server, which say nothing about the file.
DISK_ERRORS = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN)
# What a command that has the option on the left can do to need less memory.
SAVINGS = {
    "workers": "fewer --workers",
    "batch_size": "a smaller --batch-size",
    "accumulate": "a larger --accumulate",
    "bank_dtype": "--bank-dtype float16",
    "opts": "a smaller SOLVER.IMS_PER_BATCH or DATALOADER.NUM_WORKERS",
}
# torch's words, since it has no type of its own for these but for GPUs: the loader's watchdog;
# allocators of the CPU, of shared memory, of threads, of oneDNN and of CUDA's libraries.
_LOADER_STALLED = re.compile(r"DataLoader timed out after (\d+)")
_IN_LOADER = re.compile(r"OSError: \[Errno (\d+)\] ([^\n]*): '([^\n]*)'\s*$")
_LOADER_DIED = re.compile(r"DataLoader worker \(pid.*(killed by signal|exited unexpectedly)")
_NO_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|out of memory|Cannot allocate memory|bad_alloc"
    r"|unable to (mmap|allocate shared memory)|can't start new thread"
    r"|could not create a (primitive|memory)|_ALLOC_FAILED",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory left, in whatever words."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_NO_MEMORY.search(str(error)))


def explain(error: BaseException, options: Collection[str] = ()) -> str | None:
    """What happened and what helps, in a line; None for a bug, which keeps its traceback.

    Args:
        error: what ended a command.
        options: names of the command's options, of which the line recommends some.
    """
    died = isinstance(error, RuntimeError) and _LOADER_DIED.search(str(error))
    if died or lost_a_batch(error):
        advice = _advice(set(options) & {"workers", "batch_size", "opts"})
        return (
            "a loader process died, probably because memory ran out: "
            f"{advice}; the same command goes on from what is saved"
        )
    if isinstance(error, RuntimeError) and (stalled := _LOADER_STALLED.search(str(error))):
        return (
            f"the loader processes gave no batch for {stalled[1]} s (a disk that stalls?): the "
            f"same command goes on from what is saved; {TIMEOUT_VARIABLE} allows more"
        )
    # A loader process sends an error as text.
    if isinstance(error, OSError) and (found := _IN_LOADER.search(str(error))):
        error = OSError(int(found[1]), found[2], found[3])
    if is_out_of_memory(error):
        return f"out of memory{_detail(error)}: {_advice(options)}"
    if isinstance(error, OSError) and error.errno in MENDABLE:
        return f"{error.filename or 'writing'}: {MENDABLE[error.errno]}"
    return None


def lost_a_batch(error: BaseException) -> bool:
    """Whether a loader process died while this one fetched what it had sent."""
    if not isinstance(error, ConnectionError | EOFError | FileNotFoundError):
        return False
    frames = traceback.walk_tb(error.__traceback__)
    names = (frame.f_code.co_filename for frame, _ in frames)
    return any(name.endswith("resource_sharer.py") for name in names)


def _advice(options: Collection[str]) -> str:
    savings = [text for name, text in SAVINGS.items() if name in options]
    return f"use {' or '.join(savings)}" if savings else "free some, or use a larger machine"


def _detail(error: BaseException) -> str:
    """What was wanted, where the error tells; a loader process puts its traceback on top."""
    text = str(error).strip()
    if wanted := re.search(r"[Tt]ried to allocate ([\d.]+) (bytes|[KMG]iB)", text):
        size, unit = wanted.groups()
        if unit == "bytes":
            size, unit = f"{int(size) / 2**20:,.0f}", "MiB"
        return f" (wanted {size} {unit})"
    if isinstance(error, MemoryError) and text:
        return f" ({text.splitlines()[-1].partition('Error: ')[2] or text.splitlines()[-1]})"
    return ""

"""Locks: one run per folder, one process at a file.

`open_locked` is for moments: the kernel keeps the lock, and ends it with the process. `lock_folder`
is for runs, which other hosts and people must be able to ask about: a file that names its owner.

`.lock` in the folder holds the owner's host and process; the owner renews its time every `BEAT`
seconds. A lock that is there is taken over when

- its owner was here and is no more: no such process, or another one with its number. "Here" is the
  same host, boot and PID namespace: elsewhere, other containers of this host included, a process
  number says nothing; or
- its owner is the same Slurm job before a requeue, or
- its owner was elsewhere and `STALE` seconds have passed without a renewal. Whoever finds such a
  lock waits for that: it is refused at the first renewal, so within a few beats; or
- it cannot be read, and has not been written to for `GRACE` seconds.

A run whose lock was taken over all the same (it was suspended for longer than `STALE`) writes no
file into that folder any more.

The file system must create a file only if it is not there, and rename; hard links are not needed.
With `flock`, processes of one host take a lock over one after the other; where it is missing, and
between hosts, who takes one over waits `SETTLE` seconds to see that no other process did. Times are
compared as the file server gives them, so that clocks need not agree. Imports no torch.
"""

import contextlib
import errno
import fcntl
import glob
import json
import os
import platform
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from instdisc.errors import UserError
from instdisc.runs.folders import LOST, make_private

NAME = ".lock"
BEAT = 20.0
STALE = 120.0
GRACE = 5.0  # from the creation of a lock to its first byte
SETTLE = 1.0
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def open_locked(
    path: Path, mode: str, *, shared: bool = False, on_wait: Callable[[], object] | None = None
) -> Iterator[IO[Any]]:
    """Opens a file that others keep their hands off until it is closed; waits for those before.

    Who waited for a file that was replaced meanwhile gets the one that has its name now. Some
    network file systems have no such locks; there the file is opened without.

    Args:
        path: the file; with `w`, it is emptied before the lock is there.
        mode: as of `open`.
        shared: with others that only read.
        on_wait: called once if somebody else has the lock.
    """
    while True:
        with path.open(mode) as file:
            try:
                _flock(file.fileno(), fcntl.LOCK_SH if shared else fcntl.LOCK_EX, on_wait)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            if _has_name(file, path):
                yield file
                return


def _has_name(file: IO[Any], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _flock(descriptor: int, kind: int, on_wait: Callable[[], object] | None = None) -> None:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        if on_wait is not None:
            on_wait()
        fcntl.flock(descriptor, kind)


class FolderInUse(UserError):
    """Another process holds the folder."""


def _started(pid: int) -> str | None:
    """When a process of this host began, in its kernel's count; None if there is no such process.

    A process number is used again, together with its beginning it is not. `?` without /proc.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("latin1").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]
    except (OSError, IndexError):
        if Path("/proc/self/stat").exists():
            return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except (PermissionError, OverflowError):
        pass
    return "?"


def _namespaces() -> str:
    """In which process numbers and start times mean what they mean here."""
    if not sys.platform.startswith("linux"):
        return ""
    try:
        own = Path("/proc/self/ns")
        found = [own / "pid", *(each for each in [own / "time"] if each.exists())]
        return "-".join(str(each.stat().st_ino) for each in found)
    except OSError:
        return os.urandom(8).hex()  # unknown, so equal to no other


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def _ourselves() -> dict[str, Any]:
    return {
        "host": platform.node(),
        "boot": _boot(),
        "namespaces": _namespaces(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "job": os.environ.get("SLURM_JOB_ID"),
        "restart": os.environ.get("SLURM_RESTART_COUNT", "0"),
        "token": os.urandom(8).hex(),
    }


def _read(path: Path) -> dict[str, Any] | None:
    """Who holds a lock; None if that cannot be read."""
    try:
        owner = json.loads(path.read_text("utf-8"))
        if isinstance(owner["host"], str) and type(owner["pid"]) is int and owner["pid"] > 0:
            return dict(owner)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _mtime(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return None


def _is_over(owner: dict[str, Any], us: dict[str, Any]) -> bool | None:
    """Whether the owner is gone; None if only time can tell."""
    if us["job"] and owner.get("job") == us["job"] and owner.get("restart") != us["restart"]:
        return True  # Slurm requeues a job when all its processes have ended
    if any(owner.get(key) != us[key] for key in ("host", "boot", "namespaces")):
        return None
    began = _started(owner["pid"])
    return began is None or owner.get("started") not in (began, None, "?")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Keeps others of this host from taking the same lock over at the same moment.

    Yields:
        Whether the file system can do so.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            _flock(descriptor, fcntl.LOCK_EX)
        except OSError:  # not on every network file system
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def _acquire(path: Path, us: dict[str, Any]) -> None:
    mine = path.with_name(f"{NAME}.{us['token']}")
    seen: float | None = None
    try:
        while True:
            with _alone(path.parent) as alone:
                if _create(path, us):
                    return
                mine.write_text(json.dumps(us), "utf-8")
                renewed, owner = _mtime(path), _read(path)
                if renewed is None:
                    continue  # given back this moment
                over = None if owner is None else _is_over(owner, us)
                if over is None:
                    limit = GRACE if owner is None else STALE
                    over = mine.stat().st_mtime - renewed > limit or None
                if over:
                    _clean(mine, us, owner)
                    mine.replace(path)
                    if not alone or (owner and owner["host"] != us["host"]):
                        time.sleep(SETTLE)
                    if (_read(path) or {}).get("token") == us["token"]:
                        return
                    continue  # somebody else was later, and has it
            if owner and (over is False or (seen is not None and renewed != seen)):
                raise FolderInUse(
                    f"{path.parent} is in use by process {owner['pid']} on {owner['host']}: wait "
                    "for it, or choose another --output"
                )
            seen = renewed
            time.sleep(min(1.0, BEAT / 4))
    finally:
        mine.unlink(missing_ok=True)


def _create(path: Path, us: dict[str, Any]) -> bool:
    """Makes the lock if there is none. It cannot be read before its content is there: `GRACE`."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(json.dumps(us))
    except FileExistsError:
        return False
    _clean(path, us, None)
    return True


def _clean(ours: Path, us: dict[str, Any], owner: dict[str, Any] | None) -> None:
    """Removes what the dead left: files half written (runs.atomic_file), locks half taken.

    Before the lock changes hands: if we die meanwhile, the next one finds the same owner.

    Args:
        ours: a file in the folder that we wrote this moment.
        us: who we are.
        owner: of the lock that is taken over, if it can be read.
    """
    folder, now = ours.parent, ours.stat().st_mtime
    left = []
    for each in folder.glob(f"{NAME}.*"):
        written, waiter = _mtime(each), _read(each)
        is_dead = waiter is not None and _is_over(waiter, us)
        if is_dead or (written is not None and now - written > STALE):
            left.append(each)
    if owner is not None:
        left += folder.rglob(f".*.{glob.escape(owner['host'])}.{owner['pid']}.*.tmp")
    for each in left:
        each.unlink(missing_ok=True)


def _renew(path: Path, us: dict[str, Any], stop: threading.Event) -> None:
    while not stop.wait(BEAT):
        owner = _read(path)
        if owner is not None and owner.get("token") != us["token"]:
            LOST[path.parent.resolve()] = f"process {owner['pid']} on {owner['host']}"
            return  # taken over, since we slept too long: it is not ours to renew
        with contextlib.suppress(OSError):
            os.utime(path)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Makes the folder, private to this user, and holds it for this process alone.

    Folders that were made and are left empty are removed again.

    Raises:
        FolderInUse: another run is at work in it; the message has its host and process.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    make_private(folder)
    path, us = folder / NAME, _ourselves()
    stop = threading.Event()
    try:
        _acquire(path, us)
        LOST.pop(folder.resolve(), None)
        renewing = threading.Thread(target=_renew, args=(path, us, stop), daemon=True)
        renewing.start()
        try:
            yield
        finally:
            stop.set()
            renewing.join()
            if (_read(path) or {}).get("token") == us["token"]:
                path.unlink(missing_ok=True)
    finally:
        for each in made:
            with contextlib.suppress(OSError):  # not empty: the run's own
                each.rmdir()


def empty_folder(folder: Path) -> None:
    """Removes all that a folder holds but its lock."""
    for each in folder.iterdir():
        if each.name == NAME:
            continue
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()

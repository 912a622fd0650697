"""One run per folder: a lock file that names its owner, and when it may be taken over.

`.lock` in the folder holds the owner's host and process; the owner renews its time every `BEAT`
seconds. A lock that is there is taken over when

- it cannot be read, or
- its owner was on this host and is no more: no such process, or another one with its number, or
- its owner is the same Slurm job before a requeue, or
- its owner was on another host and `STALE` seconds have passed without a renewal. Whoever finds
  such a lock waits for that: it is refused at the first renewal, so within a few beats.

Times are compared as the file server gives them, so that clocks need not agree. Imports no torch.
"""

import contextlib
import fcntl
import json
import os
import platform
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instdisc.errors import UserError
from instdisc.runs.folders import make_private

NAME = ".lock"
BEAT = 20.0
STALE = 120.0


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


def _ourselves() -> dict[str, Any]:
    return {
        "host": platform.node(),
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


def _is_over(owner: dict[str, Any] | None, us: dict[str, Any]) -> bool | None:
    """Whether the owner is gone; None if only time can tell."""
    if owner is None:
        return True
    if us["job"] and owner.get("job") == us["job"] and owner.get("restart") != us["restart"]:
        return True  # Slurm requeues a job when all its processes have ended
    if owner["host"] != us["host"]:
        return None
    began = _started(owner["pid"])
    return began is None or owner.get("started") not in (began, None, "?")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keeps others of this host from taking the same lock over at the same moment."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # not on every network file system
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _acquire(path: Path, us: dict[str, Any]) -> None:
    mine = path.with_name(f"{NAME}.{us['token']}")
    seen: float | None = None
    try:
        while True:
            with _alone(path.parent):
                mine.write_text(json.dumps(us), "utf-8")
                renewed, owner = _mtime(path), _read(path)
                over = True if renewed is None else _is_over(owner, us)
                if renewed is not None and over is None:
                    over = mine.stat().st_mtime - renewed > STALE or None
                if over:
                    _clean(path.parent, mine, owner)
                    with contextlib.suppress(FileExistsError):
                        if renewed is None:
                            _link(mine, path)
                        else:
                            mine.replace(path)
                    if (_read(path) or {}).get("token") == us["token"]:
                        return
                    continue  # somebody on another host was quicker
            assert owner is not None
            if over is False or (seen is not None and renewed != seen):
                raise UserError(
                    f"{path.parent} is in use by process {owner['pid']} on {owner['host']}: wait "
                    "for it, or choose another --output"
                )
            seen = renewed
            time.sleep(min(1.0, BEAT / 4))
    finally:
        mine.unlink(missing_ok=True)


def _clean(folder: Path, mine: Path, owner: dict[str, Any] | None) -> None:
    """Removes what the dead left: files half written (runs.atomic_file), locks half taken.

    Before the lock changes hands: if we die meanwhile, the next one finds the same owner.
    """
    left = [each for each in folder.glob(f"{NAME}.*") if each != mine]
    if owner is not None:
        left += folder.rglob(f".*.{owner['pid']}.tmp")
    for each in left:
        each.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        source.replace(target)


def _renew(path: Path, us: dict[str, Any], stop: threading.Event) -> None:
    while not stop.wait(BEAT):
        if (_read(path) or {}).get("token") != us["token"]:
            return  # taken over, since we slept too long: it is not ours to renew
        with contextlib.suppress(OSError):
            os.utime(path)


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Makes the folder, private to this user, and holds it for this process alone.

    Folders that were made and are left empty are removed again.

    Raises:
        UserError: another run is at work in it; the message has its host and process.
    """
    made = [each for each in (folder, *folder.parents) if not each.exists()]
    make_private(folder)
    path, us = folder / NAME, _ourselves()
    stop = threading.Event()
    try:
        _acquire(path, us)
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

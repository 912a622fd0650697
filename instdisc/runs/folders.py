"""Run directories: where runs live, atomic writes, what produced them. Imports no torch."""

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from instdisc.errors import UserError
from instdisc.names import RUNS_VARIABLE

# Run folders that another process took over from this one, and which; kept by `runs.locks`.
LOST: dict[Path, str] = {}
VERSIONED = ("torch", "torchvision", "timm", "numpy", "scikit-learn", "instdisc-transfer")


def runs_root() -> Path:
    """The folder that holds all runs: `INSTDISC_RUNS`, else `runs` below the current folder."""
    return Path(os.environ.get(RUNS_VARIABLE) or "runs")


def make_private(folder: Path) -> None:
    """Makes a folder that only this user can look into; one that is there stays as it is.

    Folders above it that have to be made are writable by their owner only, whatever the umask.
    """
    for above in reversed(folder.parents):
        if not above.exists():
            above.mkdir(mode=0o755, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def temporary_path(path: Path) -> Path:
    """A name beside `path` for a file that is being written; no other process or host uses it.

    It holds host and process, by which `runs.locks` finds what a dead owner left.
    """
    writer = f"{platform.node()}.{os.getpid()}.{os.urandom(4).hex()}"
    return path.with_name(f".{path.name}.{writer}.tmp")


@contextlib.contextmanager
def atomic_file(path: Path, mode: str = "wb") -> Iterator[IO[Any]]:
    """Opens a file that appears under its name whole, synced to disk, or not at all.

    Raises:
        UserError: the run folder was taken over by another process meanwhile.
    """
    for above in path.resolve().parents if LOST else ():
        if above in LOST:
            raise UserError(
                f"{above} was taken over by {LOST[above]} while this process was suspended: "
                f"{path.name} is not written. Let that one finish"
            )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(path)
    encoding = None if "b" in mode else "utf-8"
    try:
        with temporary.open(mode, encoding=encoding) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some network file systems cannot sync a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_text(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    with atomic_file(path, "w") as file:
        file.write(text)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2, sort_keys=False) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Reads a .jsonl file; a last line cut short by a crash is left out."""
    rows = []
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    for number, line in enumerate(lines):
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            if number < len(lines) - 1:
                raise UserError(f"{path}, line {number + 1}: not JSON: remove the line") from None
    return rows


def git_revision() -> str | None:
    """The commit of the checkout that this code runs from, with `+` if it was changed."""
    home = Path(__file__).resolve().parents[2]
    if not (home / ".git").exists():
        return None

    def git(*command: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(home), *command], capture_output=True, text=True, timeout=10
        )
        done.check_returncode()  # git refuses a checkout of another user
        return done.stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def provenance() -> dict[str, Any]:
    """What produced a result: code, versions, machine, command, time."""
    import importlib.metadata  # here: it takes a tenth of the time of `--help`

    versions = {}
    for name in VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "git": git_revision(),
        "python": platform.python_version(),
        "versions": versions,
        "host": platform.node(),
        "argv": sys.argv,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def newest_backbone(arch: str | None = None) -> Path:
    """The backbone of the pretraining run that finished last, of one architecture if it is named.

    Raises:
        UserError: there is none; the message has the command that makes one.
    """

    def fits(path: Path) -> bool:
        if arch is None:
            return True
        try:
            return bool(
                json.loads((path.parent / "config.json").read_text("utf-8"))["arch"] == arch
            )
        except (OSError, ValueError, KeyError, TypeError):  # imported, or moved: not a run's own
            return False

    found = sorted(
        (runs_root() / "pretrain").glob("*/backbone.pt"), key=lambda p: p.stat().st_mtime
    )
    found = [path for path in found if fits(path)]
    if not found:
        kind = f"{arch} backbone" if arch else "backbone"
        raise UserError(
            f"no {kind} under {runs_root() / 'pretrain'}: run `python pretrain/run.py "
            f"--arch {arch or 'resnet50'}` first, or name one with --weights"
        )
    return found[-1]

"""Kills a command at random moments, starts it again, compares it with an undisturbed run.

    python tests/faults/killer.py                            1,000 kills over all commands
    python tests/faults/killer.py pretrain embed --kills 20  20 over two

Children are forked from this process, which has imported everything: a start costs little. A child
is killed (SIGKILL) either some time after its start, or at one of its operations on files: when
it opens a file for writing, renames, links or removes one. After each kill all files that the child
left must be whole. A line of JSON for each command says what was done, how often; --record FILE
puts the counts into a file of docs/results. Exit code 1 if a result changed, a file was damaged or
a start failed.
"""

import argparse
import dataclasses
import json
import os
import random
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from record import record
from workloads import TASKS, Task, check_files, prepare

WRITES = os.O_WRONLY | os.O_RDWR
CHANGES = {
    *("os.rename", "os.link", "os.symlink", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"),
}


class Child:
    """One start of a task, forked."""

    def __init__(self, task: Task, folder: Path, stop_at: int | None, exactly: bool) -> None:
        self.pipe, told = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(told)
            return
        os.close(self.pipe)
        code = 3
        try:
            log = os.open(folder / "child.log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ["INSTDISC_RUNS"] = str(folder / "runs")
            count = watch_files(folder, told, stop_at, exactly)
            task.run(folder)
            os.write(told, f"{count()}\n".encode())
            code = 0
        except BaseException:  # the child must not go on as if it were the parent
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)

    def wait(self, seconds: float | None) -> str:
        """What the child says within so many seconds; empty if nothing, or if it has ended."""
        ready, _, _ = select.select([self.pipe], [], [], seconds)
        return os.read(self.pipe, 100).decode() if ready else ""

    def end(self, *, kill: bool) -> int:
        """Its exit code, or minus the signal."""
        if kill:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


def watch_files(folder: Path, told: int, stop_at: int | None, exactly: bool) -> Callable[[], int]:
    """Counts what this process does to files below the folder; tells, or dies, at one of them."""
    root, count = str(folder), 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        writing = event == "open" and isinstance(args[2], int) and bool(args[2] & WRITES)
        if not (writing or event in CHANGES):
            return
        if not any(isinstance(each, str | Path) and str(each).startswith(root) for each in args):
            return
        count += 1
        if count == stop_at and exactly:
            os.kill(os.getpid(), signal.SIGKILL)
        elif count == stop_at:
            os.write(told, b"now\n")

    sys.addaudithook(hook)
    return lambda: count


def undisturbed(task: Task, folder: Path) -> tuple[int, float]:
    """A whole run: how often it changes files, and how long it takes."""
    folder.mkdir()
    started = time.monotonic()
    child = Child(task, folder, None, False)
    said = child.wait(None)
    code = child.end(kill=False)
    assert code == 0, (folder / "child.log").read_text()[-3000:]
    return int(said), time.monotonic() - started


@dataclasses.dataclass
class Outcome:
    """What was done to a command, and what came of it."""

    kills: int = 0
    starts: int = 0
    whole_runs: int = 0
    failed: int = 0  # starts that ended in an error of their own
    changed: int = 0  # whole runs with another result than the undisturbed one
    files_read: int = 0
    corrupt: int = 0  # of these files

    @property
    def is_good(self) -> bool:
        """Whether all ended as undisturbed."""
        return not (self.failed or self.changed or self.corrupt)


def torment(task: Task, root: Path, num_kills: int, seed: int) -> Outcome:
    """Kills, starts again, compares; tells stderr what is not as it should be."""
    num_events, seconds = undisturbed(task, root / "whole")
    wanted = task.facts(root / "whole")
    draw, out = random.Random(seed), Outcome()
    while out.kills < num_kills or not out.whole_runs + out.failed:
        folder = root / f"killed{out.whole_runs + out.failed}"
        folder.mkdir(exist_ok=True)
        out.starts += 1
        # The later half of a run is reached by runs that go on; each kind of moment gets its share.
        kinds = ("time", "exactly", "soon after")
        kind = draw.choice(kinds) if out.kills < num_kills else "never"
        stop_at = draw.randint(1, num_events) if kind in ("exactly", "soon after") else None
        child = Child(task, folder, stop_at, kind == "exactly")
        said = child.wait(draw.uniform(0, seconds) if kind == "time" else None)
        if kind == "soon after" and said == "now\n":
            time.sleep(draw.uniform(0, 0.02))
        code = child.end(kill=kind == "time" or said == "now\n")
        if code == -signal.SIGKILL:
            out.kills += 1
            count, damaged = check_files(folder)
            out.files_read, out.corrupt = out.files_read + count, out.corrupt + len(damaged)
            complain(damaged)
        elif code:
            out.failed += 1
            complain([f"start {out.starts}: {(folder / 'child.log').read_text()[-3000:]}"])
        else:
            out.whole_runs += 1
            different = compare(task.facts(folder), wanted)
            left = (folder / "run").rglob(".*")
            different += [f"left: {p}" for p in left if p.name.startswith((".lock", ".last"))]
            out.changed += bool(different)
            complain([f"after {out.kills} kills: {each}" for each in different])
    return out


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What differs between two results, by name."""
    names = sorted(found.keys() | wanted.keys())
    missing = object()
    return [name for name in names if found.get(name, missing) != wanted.get(name, missing)]


def complain(lines: Sequence[str]) -> None:
    """To stderr."""
    for line in lines:
        sys.stderr.write(f"{line}\n")


def shares(names: Sequence[str], kills: int) -> dict[str, int]:
    """So many kills over commands, by their weight, each at least one."""
    weights = {name: TASKS[name].kills for name in names}
    found, left, weight = {}, kills, sum(weights.values())
    for name in names:
        found[name] = max(1, round(left * weights[name] / weight))
        left, weight = left - found[name], weight - weights[name]
    return found


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tasks", nargs="*", metavar="TASK", help=f"of {', '.join(TASKS)}; or all")
    parser.add_argument("--kills", type=int, default=1000, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, metavar="FILE", help="of docs/results")
    args = parser.parse_args()
    prepare()
    rows: list[dict[str, Any]] = []
    good = True
    for name, kills in shares(args.tasks or list(TASKS), args.kills).items():
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch).resolve()
            out = torment(TASKS[name].make(root), root, kills, args.seed)
        seconds = round(time.monotonic() - started)
        done = {**dataclasses.asdict(out), "seconds": seconds}
        sys.stdout.write(json.dumps({"task": name, **done}) + "\n")
        sys.stdout.flush()
        rows.append({"command": TASKS[name].title, **done})
        good &= out.is_good
    rows.append({"command": "all", **{key: sum(row[key] for row in rows) for key in done}})
    sys.stdout.write(json.dumps(rows[-1]) + "\n")
    if args.record:
        record(args.record, "kills", rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

"""One of two processes is killed or stopped: the other ends with a line that names it.

Both are real processes with a gloo group. The one that is to die counts its collectives, and sends
itself the signal at one of them, so that the other is in the middle of its work. What is left must
be whole, and the same command must come to the result of an undisturbed run of two processes.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as torch_dist

from instdisc.cli import CommandConfig, run_command
from instdisc.errors import EXIT_INTERRUPTED

SILENCE = 4  # seconds, on a machine that may be busy; sixty by default
ENOUGH = 2 * SILENCE + 10  # the promise is twice the silence; the rest is for a busy machine
COMMANDS = ("pretrain", "semisup", "linear", "features", "detect")
KILL, STOP = signal.SIGKILL, signal.SIGSTOP
Start = Callable[[Callable[[int], object]], list[Any]]


class Words(CommandConfig):
    """The name with which lines begin."""

    PROG = "ranks"
    DESCRIPTION = "A command under test."


@dataclass(frozen=True)
class Pair:
    """A command for two processes."""

    task: Any  # of workloads.TASKS
    root: Path
    start: Start

    def begin(self, folder: Path, fault: tuple[int, int, int] | None = None) -> list[Any]:
        """Starts both; `fault` is the rank that sends itself a signal, which one, at what count."""
        folder.mkdir(exist_ok=True)

        def work(rank: int) -> None:
            for number, name in ((1, "stdout"), (2, "stderr")):
                file = os.open(folder / f"{name}-{rank}", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
                os.dup2(file, number)
            sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
            os.environ["INSTDISC_RUNS"] = str(folder / "runs")
            os.environ["INSTDISC_SILENCE_SECONDS"] = str(SILENCE)
            count = count_collectives(fault[1:] if fault and fault[0] == rank else None)
            code = run_command(Words, lambda _: self.task.run(folder), [])
            (folder / f"count-{rank}").write_text(str(count()))
            sys.exit(code)

        return self.start(work)

    def finish(self, folder: Path) -> dict[str, Any]:
        """Runs both to the end; what must come out the same."""
        processes = self.begin(folder)
        for process in processes:
            process.join(120)
        codes = [process.exitcode for process in processes]
        assert codes == [0, 0], [said(folder, rank)[-3000:] for rank in range(2)]
        return self.task.facts(folder)


def count_collectives(fault: tuple[int, ...] | None) -> Callable[[], int]:
    """Counts this process's all-reduces; sends itself a signal at one of them."""
    count, reduce = 0, torch_dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if fault and count == fault[1]:
            os.kill(os.getpid(), fault[0])
        return reduce(*args, **kwargs)

    torch_dist.all_reduce = counted
    return lambda: count


def wait_for_end(process: Any) -> None:
    """Returns when a process is killed or stopped."""
    until = time.monotonic() + 120
    state = Path(f"/proc/{process.pid}/stat")
    while process.is_alive() and state.read_text().rpartition(") ")[2][0] != "T":
        assert time.monotonic() < until, "the signal did not come"
        time.sleep(0.05)


def said(folder: Path, rank: int) -> str:
    return (folder / f"stderr-{rank}").read_text()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Commands with their results, each made once."""
    return {"root": tmp_path_factory.mktemp("ranks")}


@pytest.fixture
def pair(
    request: pytest.FixtureRequest, made: dict[str, Any], start_ranks: Start, workloads: Any
) -> Pair:
    name, root = request.param, made["root"] / request.param
    if name not in made:
        root.mkdir()
        made[name] = workloads.TASKS[name].make(root)
    found = Pair(made[name], root, start_ranks)
    if f"{name} result" not in made:
        made[f"{name} result"] = found.finish(root / "whole")
    return found


@pytest.fixture
def result(pair: Pair, made: dict[str, Any]) -> dict[str, Any]:
    return made[f"{pair.root.name} result"]


CASES = [(name, number, victim) for name in COMMANDS for number, victim in ((KILL, 1), (STOP, 0))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pair", "number", "victim"),
    [*CASES, ("pretrain", KILL, 0), ("pretrain", STOP, 1)],
    indirect=["pair"],
)
def test_the_other_ends_with_a_line_that_names_the_rank_and_the_command_goes_on(
    pair: Pair, result: dict[str, Any], workloads: Any, number: int, victim: int
) -> None:
    folder, other = pair.root / f"{number}-{victim}", 1 - victim
    middle = int((pair.root / "whole" / f"count-{victim}").read_text()) // 2 + 1
    processes = pair.begin(folder, (victim, number, middle))
    wait_for_end(processes[victim])
    processes[other].join(ENOUGH)
    assert processes[other].exitcode == EXIT_INTERRUPTED, said(folder, other)[-3000:]
    rank = rf"rank {victim} of 2 \(process {processes[victim].pid} on \S+\)"
    what = f"{rank} died" if number == KILL else f"no answer for {SILENCE} s from {rank}"
    line = f"ranks: {what}: run the same command again, it goes on from what is saved\n"
    assert re.fullmatch(line, said(folder, other))
    processes[victim].kill()  # as torchrun, srun and a person would
    processes[victim].join()
    count, damaged = workloads.check_files(folder)
    assert count > 0
    assert not damaged
    found = pair.finish(folder)
    assert found.keys() == result.keys()
    for name, value in result.items():
        assert found[name] == value, name

"""The same jobs on one machine without Slurm: `--cluster local`, and `debug` in this process."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from instdisc.errors import EXIT_INTERRUPTED, UserError
from instdisc.names import STOP_SIGNALS
from slurm.attempt import TORCHRUN, begin, choose_port, fail, finish
from slurm.jobs import Job, read_status, save_job, write_status, write_submission
from slurm.resources import Resources
from slurm.tasks import TASKS

SECONDS_TO_STOP = 60  # between asking the processes of a job to stop and killing them
POLL = 0.1

Say = Callable[[str], None]


def share_cores(cores: Sequence[int], number: int, parts: int) -> list[int]:
    """The cores of one of so many parts; one that others have too where there are too few."""
    first, last = (len(cores) * part // parts for part in (number, number + 1))
    return list(cores[first:last]) or [cores[number % len(cores)]]


def allowed_cores() -> list[int]:
    """The cores of this process; none where the system does not tell (macOS)."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@contextlib.contextmanager
def _pinned(cores: Sequence[int]) -> Iterator[None]:
    """Processes that are started here stay on these cores: they inherit the place of this one."""
    before = allowed_cores()
    if not (before and cores):
        yield
        return
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class LocalJob:
    """The processes of one attempt at a job, on cores of its own; torch has a thread for each."""

    def __init__(
        self, job: Job, folder: Path, resources: Resources, number: int, cores: Sequence[int] = ()
    ) -> None:
        self.job, self.folder, self.number, self.cores = job, folder, number, cores
        self.num_processes = resources.num_processes
        begin(folder, number=number, job_id=str(os.getpid()), log=str(folder / "log"))
        shared = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
        shared = {name: value for name, value in shared.items() if not name.startswith("SLURM_")}
        if self.num_processes > 1 and cores:
            shared.setdefault("OMP_NUM_THREADS", str(max(1, len(cores) // self.num_processes)))
        port = choose_port(os.getpid(), number + hash(job.name) % 1000)
        self.asked: float | None = None
        self.processes: list[subprocess.Popen[bytes]] = []
        for rank in range(self.num_processes):
            own = {
                "RANK": str(rank),
                "WORLD_SIZE": str(self.num_processes),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self.num_processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            # Both streams in one file, so that an error is below what led to it.
            with (folder / f"log-{rank}.txt").open("ab") as log, _pinned(cores):
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-u", "-m", "slurm.attempt", "local", folder, str(number)],
                        stdout=log,
                        stderr=log,
                        env={**shared, **(own if self.num_processes > 1 else {})},
                        start_new_session=True,  # Ctrl-C reaches this process, which stops them
                    )
                )

    def stop(self) -> None:
        """Asks all processes to save and end; kills those that have not in a minute."""
        if self.asked is None:
            self.asked = time.monotonic()
            for process in self.processes:
                if process.poll() is None:
                    process.terminate()
        elif time.monotonic() - self.asked > SECONDS_TO_STOP:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()

    def poll(self) -> str | None:
        """The outcome, once all processes have ended; one that fails ends the others."""
        codes = [process.poll() for process in self.processes]
        if any(code not in (None, 0) for code in codes):
            self.stop()
        if any(code is None for code in codes):
            return None
        # A signal as srun returns it.
        worst = max((code if code >= 0 else 128 - code) for code in codes if code is not None)
        return finish(self.folder, number=self.number, code=worst, num_processes=self.num_processes)


@contextlib.contextmanager
def _listening(flag: list[int]) -> Iterator[None]:
    def note(number: int, frame: FrameType | None) -> None:
        flag.append(number)

    previous = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _ending(running: list[LocalJob]) -> Iterator[None]:
    """Stops all processes, also after an error here."""
    try:
        yield
    finally:
        for local in running:
            local.stop()


def run_local(
    jobs: Sequence[Job],
    resources: Mapping[str, Resources],
    root: Path,
    *,
    parallel: int,
    say: Say,
) -> int:
    """Runs a graph with at most `parallel` jobs at a time, each on its share of the cores.

    Args:
        jobs: what is left to do, parents before children; parents that are missing are done.
        resources: by task.
        root: folder of all jobs.
        parallel: how many jobs at once.
        say: writes a line.

    Returns:
        0; 1 if a job failed; 75 if a signal ended it: the same command goes on.
    """
    for task, wanted in resources.items():
        if wanted.nodes > 1:
            raise UserError(f"--nodes {wanted.nodes}: --cluster local is one machine ({task})")
    for job in jobs:
        save_job(job, root)
        host, pid = socket.gethostname(), str(os.getpid())
        write_submission(job.folder(root), cluster="local", job_id=pid, host=host)
    waiting = {job.name: job for job in jobs}
    attempts = dict.fromkeys(waiting, 0)
    running: list[LocalJob] = []
    allowed = allowed_cores()
    shares = [share_cores(allowed, slot, parallel) if allowed else [] for slot in range(parallel)]
    failed: set[str] = set()
    signals: list[int] = []
    with _listening(signals), _ending(running):
        while waiting or running:
            if signals:
                waiting.clear()
                for local in running:
                    local.stop()
            for job in list(waiting.values()):
                if not job.failed_flag and (broken := failed & set(job.after)):
                    message = f"not started: {', '.join(sorted(broken))} failed"
                    fail(job.folder(root), message)
                    say(f"{job.name}: {message}")
                    failed.add(waiting.pop(job.name).name)
                    continue
                open_parents = {each.job.name for each in running} | set(waiting)
                if len(running) < parallel and not open_parents & set(job.after):
                    del waiting[job.name]
                    say(f"{job.name}: started, log in {job.folder(root)}")
                    wanted, cores = resources[job.task], shares.pop(0)
                    running.append(
                        LocalJob(job, job.folder(root), wanted, attempts[job.name], cores)
                    )
            for local in list(running):
                outcome = local.poll()
                if outcome is None:
                    continue
                running.remove(local)
                shares.append(list(local.cores))
                name = local.job.name
                say(f"{name}: {_describe(outcome, local.folder)}")
                if outcome == "failed":
                    failed.add(name)
                elif outcome == "interrupted" and not signals:
                    attempts[name] += 1  # stopped from outside: start it again
                    waiting = {name: local.job, **waiting}
            time.sleep(POLL)
    if signals:
        say("stopped, what was done is kept: run the same command again to go on")
        return EXIT_INTERRUPTED
    return 1 if failed else 0


def _describe(outcome: str, folder: Path) -> str:
    status = read_status(folder)
    return f"{outcome}: {status['error']}" if outcome == "failed" else outcome


def run_debug(jobs: Sequence[Job], root: Path, say: Say) -> int:
    """Runs jobs one after the other in this process, where a debugger can follow."""
    for job in jobs:
        folder = save_job(job, root)
        write_submission(folder, cluster="debug", job_id=str(os.getpid()))
        begin(folder, number=0, job_id=str(os.getpid()), log="")
        say(f"{job.name}: started here")
        code = TASKS[job.task].load_main()(list(job.argv))
        state = {0: "done", EXIT_INTERRUPTED: "interrupted"}.get(code, "failed")
        error = {"error": f"exit code {code}"} if state == "failed" else {}
        write_status(folder, {**read_status(folder), "state": state, **error})
        if code:
            return code
    return 0

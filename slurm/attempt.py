"""What runs on the nodes: `python -m slurm.attempt begin|run|finish INDEX`.

The batch script calls `begin` once, then `run` in every process (through srun), then `finish` once.
`finish` decides between done, failed and requeue. It runs in the batch script after all processes
have ended, not in a signal handler or in one of them: by then everything is saved, and killed
processes can be distinguished from those that stopped on request.

INDEX is a JSON list of job folders; an element of a job array takes the one with its number.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from instdisc.cli import LAST_ACTS, Parser
from instdisc.errors import EXIT_INTERRUPTED, UserError
from instdisc.names import SCHEDULER_SIGNALS
from slurm.jobs import (
    command_line,
    is_stuck,
    load_environment,
    load_job,
    progress_of,
    read_cause,
    read_records,
    read_status,
    write_record,
    write_status,
)
from slurm.tasks import TASKS

# Exit codes from srun for processes that a signal ended before Python had its handler.
STOPPED = {EXIT_INTERRUPTED, *(128 + number for number in SCHEDULER_SIGNALS)}
# What torchrun sets; the submitting shell may have old values of these.
TORCHRUN = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
# Below the range from which systems take ports for outgoing connections.
FIRST_PORT, NUM_PORTS = 20_000, 12_000


def job_folder(index: Path, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder of this job."""
    folders = json.loads(index.read_text(encoding="utf-8"))
    return Path(folders[int(environ.get("SLURM_ARRAY_TASK_ID") or 0)])


def attempt_number(environ: Mapping[str, str] = os.environ) -> int:
    """How often the job was requeued before."""
    return int(environ.get("SLURM_RESTART_COUNT") or 0)


def choose_address(num_nodes: int, environ: Mapping[str, str] = os.environ) -> str:
    """A name of this node that the other nodes of the job can resolve."""
    if num_nodes == 1:
        return "127.0.0.1"
    for name in (socket.gethostname(), environ.get("SLURMD_NODENAME", "")):
        try:
            socket.getaddrinfo(name or "-", None)
        except OSError:
            continue
        return name
    raise UserError(f"this node does not know its own name, {socket.gethostname()}: tell the site")


def choose_port(job_id: int, attempt: int) -> int:
    """A free port that differs between jobs and between attempts of one job."""
    start = job_id * 31 + attempt * 1009
    for offset in range(NUM_PORTS):
        port = FIRST_PORT + (start + offset) % NUM_PORTS
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise UserError("no free port on this node")


def begin(folder: Path, *, number: int, job_id: str, log: str) -> None:
    """Opens an attempt in the status file.

    Raises:
        UserError: the last two attempts made no progress.
    """
    job, status = load_job(folder), read_status(folder)
    progress = progress_of(job.run)
    if is_stuck(status, progress):
        last = status["attempts"][-1].get("message") or "killed"
        message = f"stopped twice in a row at the same step ({last}): not started again"
        write_status(folder, {**status, "state": "failed", "error": message})
        raise UserError(message)
    attempt = {
        "number": number,
        "job_id": job_id,
        "host": socket.gethostname(),
        "started": time.time(),
        "progress": progress,
    }
    attempts = [*status["attempts"], attempt]
    write_status(folder, {**status, "state": "running", "attempts": attempts, "log": log})


def torchrun_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What torchrun would set, from what srun has set; nothing for a single process."""
    if int(environ["SLURM_NTASKS"]) == 1:
        return {}
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": environ["SLURM_NTASKS_PER_NODE"],
        "MASTER_ADDR": environ["MASTER_ADDR"],
        "MASTER_PORT": environ["MASTER_PORT"],
    }


class _Tail:
    """Passes text on to a stream and keeps its last line: the error, if there was one."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.line = stream, ""

    def write(self, text: str) -> int:
        lines = [line for line in re.split(r"[\r\n]", text) if line.strip()]
        if lines:
            self.line = lines[-1].strip()
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def run_process(folder: Path, *, number: int, rank: int) -> None:
    """Runs the command in this process, records how it ended, and ends the process."""
    own = os.getpid()

    def end(code: int, message: str) -> None:
        outcome = {0: "done", EXIT_INTERRUPTED: "interrupted"}.get(code, "failed")
        record = {"outcome": outcome, "code": code, "message": message, "rank": rank}
        write_record(folder, number, rank, record)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(RuntimeError):  # a signal in the middle of a print
                stream.flush()
        os._exit(code)  # exit handlers must not change the outcome

    def stop(signal_number: int, frame: FrameType | None) -> None:
        # Loops that have something to save set their own handler (instdisc/runs/signals.py).
        if os.getpid() == own:
            end(EXIT_INTERRUPTED, "stopped by a signal where there was nothing to save")

    for each in SCHEDULER_SIGNALS:
        signal.signal(each, stop)
    os.environ.update(load_environment(folder))
    task, argv = TASKS[load_job(folder).task], command_line(folder)
    tail = _Tail(sys.stderr)
    sys.stderr = tail
    LAST_ACTS.append(end)
    sys.argv = [task.script, *argv]
    try:
        code = task.load_main()(argv)
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    except BaseException as error:  # the status file records every end
        traceback.print_exc(file=tail.stream)
        end(1, f"{type(error).__name__}: {error}".partition("\n")[0])
    end(code, tail.line)


def judge(folder: Path, *, number: int, code: int, num_processes: int) -> tuple[str, str]:
    """Outcome of an attempt, `done`, `interrupted` or `failed`, and a line about it."""
    if code == 0:
        return "done", ""
    records, cause = read_records(folder, number), read_cause(folder, number)
    missing = sorted(set(range(num_processes)) - set(records))
    message = cause.get("message", "")
    # srun returns the highest code: with a process that was killed (128 + 9) it is not in STOPPED.
    if cause.get("outcome") == "interrupted" and (not missing or code in STOPPED):
        return "interrupted", message
    if cause.get("outcome") != "failed" and code in STOPPED and len(missing) == num_processes:
        return "interrupted", "stopped by a signal before it began"
    if missing:
        killed = f"process {', '.join(map(str, missing))} of {num_processes} was killed"
        said = f"; process {cause['rank']} said: {message}" if message else ""
        return "failed", f"{killed} (out of memory?){said}; submit again to go on"
    return "failed", message or f"exit code {code}"


def finish(folder: Path, *, number: int, code: int, num_processes: int) -> str:
    """Closes an attempt in the status file; returns its outcome."""
    outcome, message = judge(folder, number=number, code=code, num_processes=num_processes)
    status = read_status(folder)
    attempts = status["attempts"]
    if attempts:
        attempts[-1] |= {"ended": time.time(), "outcome": outcome, "message": message}
    if outcome == "interrupted" and is_stuck(status, progress_of(load_job(folder).run)):
        outcome = "failed"
        message = f"stopped twice in a row at the same step ({message}): not started again"
    error = {"error": message} if outcome == "failed" else {}
    write_status(folder, {**status, "state": outcome, **error})
    return outcome


def fail(folder: Path, message: str) -> None:
    """Marks a job as failed for a reason of its own."""
    write_status(folder, {**read_status(folder), "state": "failed", "error": message})


def requeue(folder: Path, job_id: str) -> int:
    """Puts an interrupted job back into the queue, unless Slurm has done that or cancelled it."""
    shown = subprocess.run(
        ["scontrol", "show", "job", "-o", job_id], capture_output=True, text=True
    )
    if shown.returncode == 0 and "JobState=RUNNING" not in shown.stdout:
        return EXIT_INTERRUPTED
    asked = subprocess.run(["scontrol", "requeue", job_id], capture_output=True, text=True)
    if asked.returncode:
        reason = asked.stderr.strip().partition("\n")[0]
        fail(folder, f"could not be requeued ({reason}): submit again to go on")
    return EXIT_INTERRUPTED


def _begin_on_slurm(folder: Path, index: Path, number: int, environ: Mapping[str, str]) -> int:
    """Prints the rendezvous address, for the batch script to export."""
    job_id, num_nodes = environ["SLURM_JOB_ID"], int(environ["SLURM_JOB_NUM_NODES"])
    array = environ.get("SLURM_ARRAY_JOB_ID")
    shown = f"{array}_{environ['SLURM_ARRAY_TASK_ID']}" if array else job_id
    try:
        begin(folder, number=number, job_id=shown, log=str(index.parent / f"{shown}_0_log"))
        address, port = choose_address(num_nodes, environ), choose_port(int(job_id), number)
    except UserError as error:
        fail(folder, str(error))
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"MASTER_ADDR={address} MASTER_PORT={port}\n")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """One step of a job; `local` is `run` on a machine without Slurm."""
    parser = Parser(prog="slurm/attempt.py", description=__doc__.partition("\n")[0])
    parser.add_argument("step", choices=("begin", "run", "finish", "local"))
    parser.add_argument("path", type=Path, help="the index; for local the job's folder")
    parser.add_argument("number", type=int, nargs="?", default=0, help="exit code; local: attempt")
    given = parser.parse_args(argv)
    if given.step == "local":
        rank = int(os.environ.get("RANK") or 0)
        run_process(given.path, number=given.number, rank=rank)
    if given.step == "finish":  # a scheduler may send its signal again
        for each in SCHEDULER_SIGNALS:
            signal.signal(each, signal.SIG_IGN)
    folder, number = job_folder(given.path), attempt_number()
    if given.step == "begin":
        return _begin_on_slurm(folder, given.path, number, os.environ)
    num_processes = int(os.environ["SLURM_NTASKS"])
    if given.step == "run":
        described = torchrun_variables(os.environ)
        for name in TORCHRUN:
            os.environ.pop(name, None)
        os.environ.update(described)
        run_process(folder, number=number, rank=int(os.environ["SLURM_PROCID"]))
    outcome = finish(folder, number=number, code=given.number, num_processes=num_processes)
    if outcome == "interrupted":
        return requeue(folder, os.environ["SLURM_JOB_ID"])
    return 0 if outcome == "done" else given.number or 1


if __name__ == "__main__":
    sys.exit(main())

"""What Slurm says: jobs in the queue, their states, the site's limits. No accounting is needed."""

import dataclasses
import re
import shutil
import socket
import subprocess
from collections.abc import Iterable
from typing import Any

from instdisc.errors import UserError
from slurm.jobs import is_alive

DEFAULT_MAX_ARRAY = 1001  # Slurm's own
ACTIVE = frozenset(
    ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD")
)


@dataclasses.dataclass(frozen=True)
class Queued:
    """A job in the queue."""

    state: str
    reason: str
    elapsed: str
    nodes: str


def ask(*command: str) -> str:
    """The output of a Slurm command.

    Raises:
        UserError: Slurm is not here, or does not answer.
    """
    if shutil.which(command[0]) is None:
        raise UserError(
            f"{command[0]} is not on this machine: submit from a login node of the cluster, or use "
            "--cluster local"
        )
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise UserError(f"{command[0]} gave no answer in a minute: try again later") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise UserError(f"Slurm refuses: {lines[-1]} ({' '.join(command[:3])})")
    return done.stdout


def max_array_size() -> int:
    """How many elements a job array may have at this site."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config"), re.M)
    size = int(found.group(1)) if found else DEFAULT_MAX_ARRAY
    if size < 2:
        return 1  # arrays are turned off: one by one
    return size


def read_queue(job_ids: Iterable[str]) -> dict[str, Queued]:
    """Those of the jobs that Slurm knows, array elements each by itself; none without Slurm."""
    if not list(job_ids) or shutil.which("squeue") is None:
        return {}
    shown = ask(
        "squeue", "--noheader", "--array", "--me", "--states=all", "--format=%i|%T|%r|%M|%N"
    )
    queue = {}
    for line in shown.splitlines():
        job_id, state, reason, elapsed, nodes = line.strip().split("|", 4)
        queue[job_id] = Queued(state, reason, elapsed, nodes)
    wanted = set(job_ids)
    return {job_id: queued for job_id, queued in queue.items() if job_id in wanted}


def find_state(
    status: dict[str, Any], submission: dict[str, Any], queued: Queued | None
) -> tuple[str, str]:
    """The state that people care about, and why.

    The status file is the job's own word: one that has ended stays in the queue until its nodes are
    free. Only the queue knows of jobs that could not speak, or that somebody has put back.
    """
    state, error = status["state"], str(status.get("error", ""))
    if state in ("done", "failed") and (queued is None or queued.state != "PENDING"):
        return state, error
    if submission.get("cluster") != "slurm":
        here = any(a.get("host") == socket.gethostname() for a in status["attempts"][-1:])
        if state == "running" and here and not is_alive(str(submission.get("job_id"))):
            return "stopped", "its process is gone"
        return ("waiting" if state == "interrupted" else state), ""
    if queued is None or queued.state not in ACTIVE:
        if queued is not None and queued.state != "COMPLETED":
            return "stopped", f"Slurm says {queued.state} ({queued.reason})"
        return "stopped", "no longer in the queue"
    if queued.state in ("RUNNING", "COMPLETING") and state != "waiting":
        return "running", f"{queued.elapsed} on {queued.nodes}"
    if queued.reason == "DependencyNeverSatisfied":
        return "stopped", "a job that it waits for failed"
    requeued = "again, " if status["attempts"] else ""
    return "waiting", f"{requeued}{queued.reason}"

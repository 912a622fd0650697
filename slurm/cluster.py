"""Jobs into Slurm's queue: job arrays, what squeue says, and submission through submitit.

The only module that imports submitit, and only when it is needed. submitit writes the batch script
and calls sbatch. Its way of running a pickled function is not used: it would catch signals itself,
requeue from a signal handler in one process, and take every job shorter than ten minutes for one
that has run out of time.
"""

import contextlib
import dataclasses
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from instdisc.errors import UserError
from instdisc.runs.folders import write_json
from slurm.jobs import Job, is_alive, load_job, prepare_folder, save_job, write_submission
from slurm.resources import Resources, check_text

# How a graph of jobs becomes job arrays: few submissions, and each element depends on its own
# parents only.

Place = tuple[int, int]  # number of the array in the plan, number of the element in it


@dataclasses.dataclass(frozen=True)
class Array:
    """Jobs that are submitted at once.

    Attributes:
        jobs: its elements.
        resources: what each of them asks for.
        corresponding: numbers of earlier arrays; element i waits for their element i.
        complete: numbers of earlier arrays, or places in them, that every element waits for.
        queued: job ids of earlier submissions that every element waits for.
    """

    jobs: tuple[Job, ...]
    resources: Resources
    corresponding: tuple[int, ...] = ()
    complete: tuple[Place, ...] = ()
    queued: tuple[str, ...] = ()

    def dependency(self, ids: Sequence[str], sizes: Sequence[int]) -> str | None:
        """As sbatch wants it, where `ids` are the numbers that earlier arrays were given."""
        ended = "afterany" if self.jobs[0].failed_flag else "afterok"
        words = [f"aftercorr:{ids[number]}" for number in self.corresponding]
        for number in sorted({number for number, _ in self.complete}):
            elements = [element for place, element in self.complete if place == number]
            whole = len(elements) == sizes[number]
            names = [ids[number]] if whole else [f"{ids[number]}_{each}" for each in elements]
            words += [f"{ended}:{name}" for name in names]
        words += [f"{ended}:{job_id}" for job_id in self.queued]
        return ",".join(words) or None


def plan_arrays(
    jobs: Sequence[Job],
    resources: Mapping[str, Resources],
    *,
    max_size: int,
    queued: Mapping[str, str] | None = None,
) -> list[Array]:
    """Groups jobs into arrays of at most `max_size`, in an order in which they can be submitted.

    Args:
        jobs: what is left to do, parents before children.
        resources: by task.
        max_size: the site's limit.
        queued: job ids, by name, of jobs that are in the queue already.
    """
    queued = queued or {}
    places: dict[str, Place] = {}
    plan: list[Array] = []
    level: dict[str, int] = {}
    names = {job.name for job in jobs}
    for job in jobs:
        assert all(name in level for name in job.after if name in names), "parents come first"
        level[job.name] = 1 + max((level[name] for name in job.after if name in level), default=-1)
    kinds = sorted({(level[job.name], job.task) for job in jobs})
    for kind in kinds:
        members = [job for job in jobs if (level[job.name], job.task) == kind]
        groups: dict[tuple[tuple[str, ...], tuple[int, ...]], list[Job]] = {}
        for job in members:
            ids = tuple(queued[name] for name in job.after if name in queued)
            arrays = tuple(sorted({places[name][0] for name in job.after if name in places}))
            groups.setdefault((ids, arrays), []).append(job)
        for (ids, arrays), group in groups.items():
            for part in _split(group, arrays, places, plan, max_size):
                array = _depend(part, arrays, places, plan, resources[kind[1]], ids)
                places |= {job.name: (len(plan), number) for number, job in enumerate(part)}
                plan.append(array)
    return plan


def _parents(job: Job, places: Mapping[str, Place]) -> tuple[Place, ...]:
    return tuple(places[name] for name in job.after if name in places)


def _corresponds(
    group: Sequence[Job],
    arrays: Sequence[int],
    places: Mapping[str, Place],
    plan: Sequence[Array],
) -> bool:
    """Whether element i of the group has element i of each array as its only parent there."""
    same_size = all(len(plan[number].jobs) == len(group) > 1 for number in arrays)
    return (
        bool(arrays)
        and same_size
        and all(
            _parents(job, places) and set(_parents(job, places)) == {(n, i) for n in arrays}
            for i, job in enumerate(group)
        )
    )


def _split(
    group: list[Job],
    arrays: Sequence[int],
    places: Mapping[str, Place],
    plan: Sequence[Array],
    max_size: int,
) -> list[list[Job]]:
    """Parts of a group that can be one array each."""
    if not arrays:
        parts = [group]
    elif _corresponds(group, arrays, places, plan):
        return [group]  # as large as its parents, which fit
    else:
        by_parents: dict[frozenset[Place], list[Job]] = {}
        for job in group:
            by_parents.setdefault(frozenset(_parents(job, places)), []).append(job)
        parts = list(by_parents.values())
    return [p[first : first + max_size] for p in parts for first in range(0, len(p), max_size)]


def _depend(
    part: list[Job],
    arrays: Sequence[int],
    places: Mapping[str, Place],
    plan: Sequence[Array],
    resources: Resources,
    ids: tuple[str, ...],
) -> Array:
    if _corresponds(part, arrays, places, plan):
        return Array(tuple(part), resources, corresponding=tuple(arrays), queued=ids)
    parents = tuple(sorted(set(_parents(part[0], places))))
    return Array(tuple(part), resources, complete=parents, queued=ids)


# What Slurm says: jobs in the queue, their states, the site's limits. No accounting is needed.

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
    """The site's limit on the elements of a job array."""
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
        # A job that Slurm has not looked at yet has the reason None.
        queue[job_id] = Queued(state, reason if reason != "None" else "", elapsed, nodes)
    wanted = set(job_ids)
    return {job_id: queued for job_id, queued in queue.items() if job_id in wanted}


def find_state(
    status: dict[str, Any], submission: dict[str, Any], queued: Queued | None
) -> tuple[str, str]:
    """The state of a job, as `status.py` shows it, and the reason.

    The status file decides for a job that has ended: it stays in the queue until its nodes are
    free. The queue decides for one that died without writing status.json, or that was requeued.
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
            reason = f" ({queued.reason})" if queued.reason else ""
            return "stopped", f"Slurm says {queued.state}{reason}"
        return "stopped", "no longer in the queue"
    if queued.state in ("RUNNING", "COMPLETING") and state != "waiting":
        return "running", f"{queued.elapsed} on {queued.nodes}"
    if queued.reason == "DependencyNeverSatisfied":
        return "stopped", "a job that it depends on failed"
    return "waiting", ", ".join(
        filter(None, ("again" if status["attempts"] else "", queued.reason))
    )


# The shell must survive the signals that its processes handle; a trap that does nothing is not
# inherited, as ignoring them would be.
TRAP = "trap : TERM USR1 USR2"


def _step(name: str, index: Path, python: Sequence[str] = (sys.executable,)) -> str:
    return shlex.join([*python, "-u", "-m", "slurm.attempt", name, str(index)])


def batch_options(
    array: Array, index: Path, parallel: int, dependency: str | None
) -> dict[str, Any]:
    """Arguments for submitit's executor."""
    resources = array.resources
    names = [job.name for job in array.jobs]
    name = names[0] if len(names) == 1 else f"{array.jobs[0].task} ({len(names)} jobs)"
    check_text(name)
    options = {
        **resources.sbatch_options(),
        "job_name": name,
        "dependency": dependency,
        "array_parallelism": parallel,
        "setup": [
            *resources.setup,
            TRAP,
            f"rendezvous=$({_step('begin', index)}) || exit",
            "export $rendezvous",
        ],
        "teardown": [f"{_step('finish', index)} $?"],
        "srun_args": resources.srun_options(),
    }
    return {key: value for key, value in options.items() if value is not None or key in KEEP_NONE}


KEEP_NONE = ("time", "wckey")  # None here means: not submitit's default either


def script_text(array: Array, folder: Path, parallel: int, dependency: str | None = None) -> str:
    """The batch script of an array, as submitit writes it."""
    # Private, and needed: SlurmExecutor, which calls it, exists only where srun does.
    from submitit.slurm.slurm import _make_sbatch_string

    index = folder / "index.json"
    count = len(array.jobs) if len(array.jobs) > 1 else None
    options = batch_options(array, index, parallel, dependency)
    command = _step("run", index, array.resources.python)
    return _make_sbatch_string(command=command, folder=folder, map_count=count, **options)


def check_with_slurm(array: Array, folder: Path, parallel: int) -> None:
    """Has sbatch check the script before anything is queued."""
    text = script_text(array, folder, parallel)
    script = folder / "test.sh"
    script.write_text(text, encoding="utf-8")
    try:
        done = subprocess.run(
            ["sbatch", "--test-only", str(script)], capture_output=True, text=True, timeout=60
        )
    except subprocess.TimeoutExpired:
        raise UserError("sbatch gave no answer in a minute: try again later") from None
    finally:
        script.unlink()
    if done.returncode:
        raise UserError(f"Slurm refuses: {_reason(done.stderr)}; nothing was queued")


def _reason(stderr: str) -> str:
    lines = [line for line in stderr.strip().splitlines() if "error" in line or "failure" in line]
    text = (lines or stderr.strip().splitlines() or ["no reason given"])[-1]
    return re.sub(r"^(sbatch: )?(error: )?(allocation failure: )?", "", text)


def submit_array(array: Array, folder: Path, parallel: int, dependency: str | None) -> str:
    """One sbatch; returns the number of the job or of the array."""
    from submitit.core.utils import FailedJobError
    from submitit.slurm.slurm import SlurmExecutor

    index = folder / "index.json"

    class Executor(SlurmExecutor):
        """submitit's, with our command instead of its own; submitit has no public way to say it."""

        @property
        def _submitit_command_str(self) -> str:
            return _step("run", index, array.resources.python)

    executor = Executor(folder)
    executor.update_parameters(**batch_options(array, index, parallel, dependency))
    folders = [Path(text) for text in json.loads(index.read_text(encoding="utf-8"))]
    try:
        # submitit needs something to pickle; this one loads the job.
        if len(folders) == 1:
            jobs = [executor.submit(load_job, folders[0])]
        else:
            with executor.batch():
                jobs = [executor.submit(load_job, each) for each in folders]
    except FailedJobError as error:
        raise UserError(f"Slurm refuses: {_reason(str(error))}") from None
    for each, job in zip(folders, jobs, strict=True):
        write_submission(each, cluster="slurm", job_id=job.job_id)
    return str(jobs[0].job_id).partition("_")[0]


def submit_plan(plan: Sequence[Array], root: Path, parallel: int) -> list[str]:
    """Submits arrays in order, all or none; returns their numbers."""
    check_text(str(root))
    if "%" in str(root):
        raise UserError(f"{root} has a % in its name, which Slurm would replace: use --jobs DIR")
    ask("scontrol", "ping")
    prepare_folder(root)
    folders = []
    for array in plan:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        folder = root / "submissions" / f"{stamp}-{uuid.uuid4().hex[:8]}"
        prepare_folder(folder)
        folders.append(folder)
        index = [str(job.folder(root.absolute())) for job in array.jobs]
        write_json(folder / "index.json", index)
    for array, folder in zip(plan, folders, strict=True):
        check_with_slurm(array, folder, parallel)
    for array in plan:
        for job in array.jobs:
            save_job(job, root)
    ids: list[str] = []
    sizes = [len(array.jobs) for array in plan]
    try:
        for array, folder in zip(plan, folders, strict=True):
            dependency = array.dependency(ids, sizes)
            ids.append(submit_array(array, folder, parallel, dependency))
    except (UserError, OSError, KeyboardInterrupt):
        for job_id in ids:
            with contextlib.suppress(UserError):
                ask("scancel", job_id)
        raise
    return ids

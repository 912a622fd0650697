"""Jobs into Slurm's queue, through submitit, which is imported here and only when it is needed.

submitit writes the batch script and calls sbatch. Its way of running a pickled function is not
used: it would catch signals itself, requeue from a signal handler in one process, and take every
job shorter than ten minutes for one that has run out of time.
"""

import contextlib
import json
import re
import shlex
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instdisc.errors import UserError
from instdisc.runs.folders import write_json
from slurm.arrays import Array
from slurm.jobs import load_job, prepare_folder, save_job, write_submission
from slurm.queue_state import ask
from slurm.resources import check_text

# The shell must outlive the signals that its processes answer; a trap that does nothing is not
# inherited, as ignoring them would be.
TRAP = "trap : TERM USR1 USR2"


def _step(name: str, index: Path) -> str:
    return shlex.join([sys.executable, "-u", "-m", "slurm.attempt", name, str(index)])


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
    from submitit.slurm.slurm import _make_sbatch_string

    index = folder / "index.json"
    count = len(array.jobs) if len(array.jobs) > 1 else None
    options = batch_options(array, index, parallel, dependency)
    return _make_sbatch_string(
        command=_step("run", index), folder=folder, map_count=count, **options
    )


def check_with_slurm(array: Array, folder: Path, parallel: int) -> None:
    """Lets sbatch say what it would refuse, while nothing is queued."""
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
        """submitit's, with a command of ours."""

        @property
        def _submitit_command_str(self) -> str:
            return _step("run", index)

    executor = Executor(folder)
    executor.update_parameters(**batch_options(array, index, parallel, dependency))
    folders = [Path(text) for text in json.loads(index.read_text(encoding="utf-8"))]
    try:
        # What is pickled says what the job is to whoever opens it with submitit.
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

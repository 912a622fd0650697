"""A job: what is to run, its folder, and its status file, which every part of a job can read.

job.json        the command, written before anything is queued
submission.json which queue has it, under which number
status.json     waiting, running, interrupted, done or failed; every attempt; the last error
rank-A-R.json   how process R of attempt A ended; cause-A.json: the first that failed or was stopped
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from instdisc.errors import UserError
from instdisc.names import DATA_VARIABLE, RUNS_VARIABLE, VOC_VARIABLE
from instdisc.runs.folders import make_private, runs_root, write_json

State = Literal["waiting", "running", "interrupted", "done", "failed"]
# What a run writes when it makes progress; logs and configs are written by every attempt.
PROGRESS_FILES = re.compile(r".*\.(pt|pth|npy)|result.*\.json|last_checkpoint|report\.json")
KEPT_VARIABLES = (RUNS_VARIABLE, DATA_VARIABLE, VOC_VARIABLE)


def jobs_root() -> Path:
    """The folder of all jobs."""
    return runs_root() / "slurm"


def safe_name(name: str) -> str:
    """A name as a folder: different for different names, with nothing that a shell expands."""
    plain = re.sub(r"[^\w.=+-]+", "-", name, flags=re.ASCII).strip("-.") or "job"
    if plain == name and len(name) <= 100:
        return name
    return f"{plain[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One command, to be run once.

    Attributes:
        name: what people and the queue call it; also names its folder.
        task: a key of TASKS.
        argv: the command's arguments.
        run: the folder that the command writes to.
        produces: a file or folder without which it is not done, whatever the status says.
        after: names of the jobs that must be done before.
        failed_flag: flag of the command that names jobs which failed. With it the job starts when
            those before it have ended, however they ended, and is told which are not done.
        workers: loader processes of each of its processes; as is usual for the task if None.
        images: how many images go through the network, for the estimate.
        arch: which network, for the estimate.
    """

    name: str
    task: str
    argv: tuple[str, ...]
    run: str
    produces: str | None = None
    after: tuple[str, ...] = ()
    failed_flag: str = ""
    workers: int | None = None
    images: float = 0.0
    arch: str = "resnet50"

    def folder(self, root: Path) -> Path:
        """Where everything about the job is kept."""
        return root / safe_name(self.name)

    def is_done(self, root: Path) -> bool:
        """Whether this command ended well, and what it made is still there and up to date."""
        folder = self.folder(root)
        status = read_status(folder)
        made = self.produces is None or Path(self.produces).exists()
        if not made or status["state"] != "done" or load_job(folder).argv != self.argv:
            return False
        # It does not need the others to be done, so one of them may have ended since.
        others = self.after if self.failed_flag else ()
        ends = [read_status(root / safe_name(name)).get("updated", 0) for name in others]
        return max(ends, default=0) <= status["updated"]


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise UserError(f"{path} is damaged: remove it, and submit the job again") from None


def prepare_folder(folder: Path) -> None:
    """Makes a folder and checks that it can be written to, before anything is queued."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        make_private(folder)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"the job folder {folder} cannot be written ({error.strerror}): name one that can, and "
            "that all nodes share, with --jobs or INSTDISC_RUNS"
        ) from None


def save_job(job: Job, root: Path) -> Path:
    """Writes a job and clears what earlier submissions of it left; returns its folder."""
    folder = job.folder(root)
    prepare_folder(folder)
    for old in [*folder.glob("rank-*.json"), *folder.glob("cause-*.json")]:
        old.unlink()
    (folder / "submission.json").unlink(missing_ok=True)
    values = dataclasses.asdict(job)
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if os.environ.get(name)}
    write_json(folder / "job.json", {**values, "environment": kept})
    write_status(folder, {"state": "waiting", "attempts": []})
    return folder


def load_job(folder: Path) -> Job:
    """Reads a job."""
    values = _read(folder / "job.json")
    if not values:
        raise UserError(f"{folder} holds no job: name a folder below {jobs_root()}")
    known = {field.name for field in dataclasses.fields(Job)}
    kept: dict[str, Any] = {name: values[name] for name in known & set(values)}
    kept |= {name: tuple(kept[name]) for name in ("argv", "after")}
    return Job(**kept)


def load_environment(folder: Path) -> dict[str, str]:
    """The variables that name runs and data, as they were when the job was submitted."""
    return dict(_read(folder / "job.json").get("environment", {}))


def read_status(folder: Path) -> dict[str, Any]:
    """The status of a job; one that was never submitted waits."""
    return {"state": "waiting", "attempts": [], **_read(folder / "status.json")}


def command_line(folder: Path) -> list[str]:
    """Arguments of a job's command, with the jobs before it that are not done if it wants them."""
    job = load_job(folder)
    states = {name: read_status(folder.parent / safe_name(name))["state"] for name in job.after}
    failed = [name for name, state in states.items() if state != "done"]
    return [*job.argv, *([job.failed_flag, *failed] if job.failed_flag and failed else [])]


def write_status(folder: Path, status: dict[str, Any]) -> None:
    """Writes it atomically."""
    write_json(folder / "status.json", {**status, "updated": time.time()})


def read_submission(folder: Path) -> dict[str, Any]:
    """Which queue has the job."""
    return _read(folder / "submission.json")


def write_submission(folder: Path, **values: Any) -> None:
    """Records which queue has the job."""
    write_json(folder / "submission.json", {**values, "time": time.time()})


def is_alive(pid: str) -> bool:
    """Whether this machine has a process of that number."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def refuse_if_running_here(job: Job, root: Path) -> None:
    """Two processes must not run one job: both would write to its run."""
    submission = read_submission(job.folder(root))
    pid = str(submission.get("job_id"))
    local = submission.get("cluster") == "local" and submission.get("host") == socket.gethostname()
    unfinished = read_status(job.folder(root))["state"] in ("waiting", "running")
    if local and unfinished and pid != str(os.getpid()) and is_alive(pid):
        raise UserError(f"{job.name} is being run by process {pid}: wait for it, or stop it")


def read_records(folder: Path, attempt: int) -> dict[int, dict[str, Any]]:
    """How each process of an attempt ended, by rank; killed processes have no record."""
    found = folder.glob(f"rank-{attempt}-*.json")
    return {int(path.stem.rpartition("-")[2]): _read(path) for path in found}


def read_cause(folder: Path, attempt: int) -> dict[str, Any]:
    """The first process of an attempt that failed or was stopped."""
    try:
        return _read(folder / f"cause-{attempt}.json")
    except UserError:  # killed while it wrote
        return {}


def write_record(folder: Path, attempt: int, rank: int, record: dict[str, Any]) -> None:
    """Records how a process ended; the first that is not done is the cause of the others' end."""
    if record["outcome"] != "done":
        cause = folder / f"cause-{attempt}.json"
        with contextlib.suppress(FileExistsError), cause.open("x", encoding="utf-8") as file:
            json.dump(record, file)
    write_json(folder / f"rank-{attempt}-{rank}.json", record)


def progress_of(run: str | Path) -> int:
    """A number that changes whenever a run saves something: the newest checkpoint's time."""
    folder = Path(run)
    files: Iterable[Path] = folder.rglob("*") if folder.is_dir() else ()
    times = []
    for path in files:
        if PROGRESS_FILES.fullmatch(path.name):
            try:
                times.append(path.stat().st_mtime_ns)
            except FileNotFoundError:  # replaced while we looked
                continue
    return max(times, default=0)


def is_stuck(status: dict[str, Any], progress: int) -> bool:
    """Whether the last two attempts were both stopped without any progress."""
    last = status["attempts"][-2:]
    return (
        len(last) == 2
        and all(attempt["progress"] == progress for attempt in last)
        and last[0].get("message") == last[1].get("message")
    )

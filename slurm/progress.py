"""State and progress of all jobs, from their folders, the runs' folders and squeue.

Slurm's accounting is not needed.
"""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instdisc.cli import CommandConfig, option, say
from instdisc.errors import UserError
from instdisc.runs.folders import read_jsonl
from slurm.cluster import find_state, read_queue
from slurm.jobs import Job, jobs_root, load_job, read_status, read_submission

ORDER = ("running", "waiting", "failed", "stopped", "done")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatusConfig(CommandConfig):
    """Which jobs to show, and how."""

    PROG = "slurm/status.py"
    DESCRIPTION = "Shows what runs, waits, failed and finished, with each run's progress."
    EPILOG = """
    examples:
      python slurm/status.py                     all jobs of this folder's runs/
      python slurm/status.py table1 seed0        those with both words in their names
      python slurm/status.py --json              for programs
    A job is `stopped` when it left the queue without having ended: cancelled, its node
    lost, or a job that it depends on failed. Submit it again to go on.
    """

    jobs: Path | None = option(None, "folder of all jobs; runs/slurm if not given", metavar="DIR")
    json: bool = option(False, "one JSON object per line")
    errors: int = option(1, "lines of a failed job's log to show beside its error")
    words: tuple[str, ...] = option(
        (), "only jobs with all of these in their names", metavar="WORD", positional=True
    )


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """One line of the table."""

    name: str
    task: str
    state: str
    job_id: str
    attempts: int
    detail: str
    run: str
    log: str
    folder: str


def read_progress(run: Path) -> dict[str, Any]:
    """The latest epoch, loss and kNN accuracy in the metrics files of a run folder."""
    # Detectron2 calls its file metrics.json, and an epoch an iteration.
    names = ("metrics.jsonl", "*/metrics.jsonl", "*/metrics.json")
    files = [file for name in names for file in run.glob(name)]
    if not files:
        return {}
    newest = max(files, key=lambda file: file.stat().st_mtime)
    found: dict[str, Any] = {}
    try:
        rows = read_jsonl(newest)
    except UserError:  # its last line is being written
        return {}
    shown = ("epoch", "loss", "epoch_loss", "knn_recomputed", "iteration", "total_loss")
    for row in rows:
        found |= {name: row[name] for name in shown if row.get(name) is not None}
    try:
        config = json.loads((run / "config.json").read_text(encoding="utf-8"))
        if isinstance(config, dict) and config.get("epochs") is not None:
            found["epochs"] = config["epochs"]
    except (OSError, ValueError):
        pass
    return found


def describe_progress(found: dict[str, Any]) -> str:
    """`epoch 3.2/12, loss 6.10, kNN 31.25%`."""
    if "iteration" in found:
        return f"iteration {found['iteration']}, loss {found.get('total_loss', 0):.4g}"
    if "epoch" not in found:
        return ""
    parts = [f"epoch {found['epoch']:.4g}" + (f"/{found['epochs']}" if "epochs" in found else "")]
    loss = found.get("loss", found.get("epoch_loss"))
    if loss is not None:
        parts.append(f"loss {loss:.4g}")
    if "knn_recomputed" in found:
        parts.append(f"kNN {found['knn_recomputed']:.2f}%")
    return ", ".join(parts)


def read_statuses(root: Path, words: Sequence[str] = ()) -> list[JobStatus]:
    """All jobs below a folder, by state in the order of ORDER, then by name."""
    folders = sorted(path.parent for path in root.glob("*/job.json"))
    jobs: dict[Path, Job] = {folder: load_job(folder) for folder in folders}
    jobs = {f: job for f, job in jobs.items() if all(word in job.name for word in words)}
    submissions = {folder: read_submission(folder) for folder in jobs}
    on_slurm = [str(s["job_id"]) for s in submissions.values() if s.get("cluster") == "slurm"]
    queue = read_queue(on_slurm)
    found = []
    for folder, job in jobs.items():
        status, submission = read_status(folder), submissions[folder]
        job_id = str(submission.get("job_id", ""))
        state, reason = find_state(status, submission, queue.get(job_id))
        progress = describe_progress(read_progress(Path(job.run))) if job.run else ""
        shown = (reason, progress) if state == "failed" else (progress, reason)
        found.append(
            JobStatus(
                name=job.name,
                task=job.task,
                state=state,
                job_id=job_id,
                attempts=len(status["attempts"]),
                detail="; ".join(part for part in shown if part),
                run=job.run,
                log=str(status.get("log", "")),
                folder=str(folder),
            )
        )
    return sorted(found, key=lambda each: (ORDER.index(each.state), each.name))


def log_tail(status: JobStatus, lines: int) -> list[str]:
    """The end of a job's error log."""
    for suffix in (".err", "-0.txt"):
        path = Path(status.log + suffix)
        if status.log and path.exists():
            return path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    return []


def run_status(config: StatusConfig) -> None:
    """The command: prints the table."""
    root = config.jobs or jobs_root()
    if not root.is_dir():
        raise UserError(f"no jobs in {root}: submit one with slurm/submit.py, or name --jobs DIR")
    statuses = read_statuses(root, config.words)
    if config.json:
        for each in statuses:
            say(json.dumps(dataclasses.asdict(each)))
        return
    counts = [f"{sum(s.state == state for s in statuses)} {state}" for state in ORDER]
    say(f"{time.strftime('%H:%M:%S')}  {', '.join(counts)}")
    width = max((len(each.name) for each in statuses), default=0)
    for each in statuses:
        again = f" (attempt {each.attempts})" if each.attempts > 1 else ""
        line = f"{each.state:<8} {each.job_id:>8}  {each.name:<{width}}  {each.detail}{again}"
        say(line.rstrip())
        if each.state == "failed" and config.errors > 1:
            for text in log_tail(each, config.errors):
                say(f"{'':18} | {text}")

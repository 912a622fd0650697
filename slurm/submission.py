"""A command as a job, a study as a graph of jobs: planned, shown, or handed to a cluster."""

import dataclasses
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from instdisc.cli import CommandConfig, option, parse, say
from instdisc.errors import UserError
from slurm.cluster import (
    find_state,
    max_array_size,
    plan_arrays,
    read_queue,
    script_text,
    submit_plan,
)
from slurm.jobs import Job, jobs_root, read_status, read_submission, refuse_if_running_here
from slurm.resources import ResourceFlags, Resources, check_text, load_resources
from slurm.studies import BUILDERS, StudyConfig, build_study, count_states, describe_cost, draw_tree
from slurm.tasks import TASKS, check_arguments, find_task, run_folder

PARALLEL = 32  # elements of a job array that run at once


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubmitConfig(ResourceFlags, CommandConfig):
    """A submission: flags about the cluster, and the command to run there.

    Attributes:
        given: names of the resources that were given as flags, which win over slurm.toml.
    """

    PROG = "slurm/submit.py"
    DESCRIPTION = """
    Runs a command of the project, unchanged, as a job. Flags before TASK are for the
    cluster, those behind it for the command; they are checked before anything is queued.
    A job that is preempted or reaches its time limit saves, is queued again and goes on.
    """
    EPILOG = f"""
    tasks: {", ".join(TASKS)};
           study {"|".join(BUILDERS)}|all

    examples:
      python slurm/submit.py --nodes 2 --gpus 8 --partition gpu --time 24h pretrain --arch resnet50
      python slurm/submit.py --gpus 1 semisup --labeled 0.01 --weights runs/pretrain/resnet50
      python slurm/submit.py --dry-run --gpus 8 study table2 --data /data/imagenet
      python slurm/submit.py --cluster local --parallel 2 study table1 --scale small --cifar DIR
      python slurm/submit.py pretrain --help                     the command's own flags
    Resources can be kept in slurm.toml, here or in ~/.config/instdisc; docs/slurm.md says how.
    python slurm/status.py shows what became of the jobs.
    """

    words: tuple[str, ...] = option((), "see below", metavar="TASK ARGS...", rest=True)
    cluster: Literal["slurm", "local", "debug"] = option(
        "slurm", "slurm; local: processes on this machine; debug: in this very process"
    )
    dry_run: bool = option(False, "show the batch scripts, the jobs and their cost, and stop")
    name: str | None = option(None, "what to call the job; task and time if not given")
    jobs: Path | None = option(None, "folder of all jobs; runs/slurm if not given", metavar="DIR")
    parallel: int | None = option(
        None, "jobs of a study that run at once; if not given 32, and 1 on this machine"
    )
    resources: Path | None = option(None, "file to use instead of slurm.toml", metavar="FILE")
    check: bool = option(True, "check the command's arguments here; off for data on the nodes only")
    given: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Checks what the types cannot say; Resources checks the rest, slurm.toml included."""
        if self.parallel is not None and self.parallel < 1:
            raise UserError("--parallel must be at least 1")

    @classmethod
    def recipe_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Which of the resources were given."""
        names = [field.name for field in dataclasses.fields(ResourceFlags)]
        return {"given": tuple(name for name in names if name in given)}


def build_jobs(config: SubmitConfig) -> list[Job]:
    """The job of a task, or all jobs of a study."""
    if not config.words:
        raise UserError("name a task, or `study NAME`: see --help")
    task, *argv = config.words
    if task != "study":
        return [_single_job(task, argv, config)]
    if not argv or argv[0].startswith("-"):
        if argv and argv[0] in ("-h", "--help"):
            parse(StudyConfig, ["--help"])
        raise UserError(f"study: name one of {', '.join(BUILDERS)}, all")
    jobs = build_study(argv[0], parse(StudyConfig, argv[1:]))
    if config.check:
        for job in jobs:
            check_arguments(job.task, job.argv)
    return jobs


def _single_job(task: str, argv: list[str], config: SubmitConfig) -> Job:
    find_task(task)
    name = config.name
    if name is None:
        name = f"{task}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    check_text(name)
    run = ""
    if config.check or {"-h", "--help"} & set(argv):
        run = str(run_folder(task, check_arguments(task, argv)).absolute())
    return Job(name=name, task=task, argv=tuple(argv), run=run)


def choose_resources(
    jobs: Sequence[Job], config: SubmitConfig, study: bool
) -> dict[str, Resources]:
    """What each task asks for; a command that is not distributed gets one process."""
    flags = {name: getattr(config, name) for name in config.given}
    found = {}
    for task in dict.fromkeys(job.task for job in jobs):
        wanted = load_resources(flags, task, TASKS, config.resources)
        if not TASKS[task].distributed and wanted.num_processes > 1:
            if not study:
                raise UserError(f"{task} is one process: leave out --nodes, --gpus and --tasks")
            wanted = wanted.for_one_process()
        found[task] = wanted
    return found


def find_states(jobs: Sequence[Job], root: Path) -> tuple[dict[str, str], dict[str, str]]:
    """State of each job, `done`, `queued` or `to run`; and the ids of those in the queue."""
    submitted = {job.name: read_submission(job.folder(root)) for job in jobs}
    ids = {n: str(s["job_id"]) for n, s in submitted.items() if s.get("cluster") == "slurm"}
    queue = read_queue(ids.values()) if ids else {}
    queued: dict[str, str] = {}
    states: dict[str, str] = {}
    for job in jobs:
        refuse_if_running_here(job, root)
        if (job_id := ids.get(job.name)) in queue:
            own, submission = read_status(job.folder(root)), submitted[job.name]
            if find_state(own, submission, queue[job_id])[0] in ("running", "waiting"):
                queued[job.name] = job_id
        parents_done = all(states.get(name, "done") == "done" for name in job.after)
        if job.name in queued:
            states[job.name] = "queued"
        else:
            states[job.name] = "done" if parents_done and job.is_done(root) else "to run"
    return states, queued


def run_submit(config: SubmitConfig) -> int:
    """The command: plans, shows or starts."""
    root = (config.jobs or jobs_root()).absolute()
    jobs = build_jobs(config)
    study = config.words[0] == "study"
    resources = choose_resources(jobs, config, study)
    states, queued = find_states(jobs, root)
    left = [job for job in jobs if states[job.name] == "to run"]
    if study:
        say(f"study {config.words[1]}: {count_states(states)}")
        for line in draw_tree(jobs, states):
            say(line)
        for task, wanted in resources.items():
            say(f"{task:<10}{wanted.describe()}")
        say(describe_cost(left, resources))
    if config.dry_run:
        return _dry_run(left, resources, root, config, queued)
    if not left:
        say(f"nothing to do: {count_states(states)}")
        return 0
    if config.cluster == "slurm":
        return _submit_to_slurm(left, resources, root, config, queued)
    from slurm.local import run_debug, run_local

    if config.cluster == "debug":
        return run_debug(left, root, say)
    return run_local(left, resources, root, parallel=config.parallel or 1, say=say)


def _dry_run(
    left: Sequence[Job],
    resources: Mapping[str, Resources],
    root: Path,
    config: SubmitConfig,
    queued: Mapping[str, str],
) -> int:
    for job in left:
        say(f"would run: {shlex.join(['python', *_script(job), *job.argv])}")
    if config.cluster != "slurm":
        return 0
    plan = plan_arrays(left, resources, max_size=10**6, queued=queued)
    sizes = [len(array.jobs) for array in plan]
    for number, array in enumerate(plan):
        dependency = array.dependency([f"<{earlier}>" for earlier in range(number)], sizes)
        waits = f", {dependency}" if dependency else ""
        say(f"\n# submission <{number}>: {len(array.jobs)} x {array.jobs[0].task}{waits}")
        if number == 0:
            folder = root / "submissions" / "dry-run"
            say(script_text(array, folder, config.parallel or PARALLEL, dependency))
    return 0


def _script(job: Job) -> list[str]:
    return [TASKS[job.task].module.replace(".", "/") + ".py"]


def _submit_to_slurm(
    left: Sequence[Job],
    resources: Mapping[str, Resources],
    root: Path,
    config: SubmitConfig,
    queued: Mapping[str, str],
) -> int:
    limit = max_array_size()
    plan = plan_arrays(left, resources, max_size=limit, queued=queued)
    ids = submit_plan(plan, root, config.parallel or PARALLEL)
    for array, job_id in zip(plan, ids, strict=True):
        what = array.jobs[0].name if len(array.jobs) == 1 else f"{len(array.jobs)} jobs"
        say(f"submitted {job_id}: {array.jobs[0].task}, {what}")
    say(f"python slurm/status.py shows what becomes of them; folders are in {root}")
    return 0

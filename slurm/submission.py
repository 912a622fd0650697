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
    DEFAULT_MAX_ARRAY,
    Array,
    find_state,
    max_array_size,
    plan_arrays,
    read_queue,
    script_text,
    submit_plan,
)
from slurm.jobs import Job, jobs_root, read_status, read_submission, refuse_if_running_here
from slurm.resources import ResourceFlags, Resources, check_text, load_resources
from slurm.studies import BUILDERS, StudyConfig, build_study
from slurm.tasks import TASKS, check_arguments, find_task, run_folder

PARALLEL = 32  # elements of a job array that run at once
MIN_CORES = 4  # of a process with a GPU: itself, autograd, NCCL, pinned memory
# Training images a second of one process, assumed: a GPU of the V100's class at 224 pixels without
# mixed precision; a CPU core at 32 pixels (about what resnet18 was seen to do, the others by their
# operations). No GPU has been measured.
GPU_RATES = {"alexnet": 2500.0, "vgg16": 230.0, "resnet18": 1100.0, "resnet50": 360.0}
CPU_RATES = {"alexnet": 250.0, "vgg16": 25.0, "resnet18": 175.0, "resnet50": 60.0}
FORWARD_ONLY = 3.0  # speed of a forward pass relative to a training step
# Two-stage detectors see images three times as wide.
COST_OF_TASK = {"knn": 1 / FORWARD_ONLY, "linear": 1 / FORWARD_ONLY, "detect": 12.0}
MINUTE = 1 / 60
LONGEST_LIST = 60


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
    A job that is preempted or reaches its time limit saves, is requeued and goes on.
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
    python slurm/status.py shows the state of the jobs.
    """

    words: tuple[str, ...] = option((), "see below", metavar="TASK ARGS...", rest=True)
    cluster: Literal["slurm", "local", "debug"] = option(
        "slurm", "slurm; local: processes on this machine; debug: in this process"
    )
    dry_run: bool = option(False, "show the batch scripts, the jobs and their cost, and stop")
    name: str | None = option(None, "what to call the job; task and time if not given")
    jobs: Path | None = option(None, "folder of all jobs; runs/slurm if not given", metavar="DIR")
    parallel: int | None = option(
        None,
        "jobs of a study that run at once; if not given 32, and 1 on this machine, where each has "
        "its share of the cores: one job a core does most",
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
    if not config.check:
        return jobs
    return [_with_workers(job, check_arguments(job.task, job.argv)) for job in jobs]


def _single_job(task: str, argv: list[str], config: SubmitConfig) -> Job:
    find_task(task)
    name = config.name
    if name is None:
        name = f"{task}-{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
    check_text(name)
    job = Job(name=name, task=task, argv=tuple(argv), run="")
    if config.check or {"-h", "--help"} & set(argv):
        parsed = check_arguments(task, argv)
        run = str(run_folder(task, parsed).absolute())
        return _with_workers(dataclasses.replace(job, run=run), parsed)
    return job


def _with_workers(job: Job, parsed: Any) -> Job:
    """The job with the loader workers that its command's config names, if it names any."""
    workers = getattr(parsed, "workers", None)
    return job if workers is None else dataclasses.replace(job, workers=workers)


def _num_workers(task: str, jobs: Sequence[Job]) -> int:
    own = [job.workers for job in jobs if job.task == task]
    return max(TASKS[task].workers if each is None else each for each in own)


def choose_resources(
    jobs: Sequence[Job], config: SubmitConfig, study: bool
) -> dict[str, Resources]:
    """What each task asks for; a command that is not distributed gets one process.

    A process with a GPU gets a core for itself and one for each of its loader workers, but no fewer
    than MIN_CORES.
    """
    flags = {name: getattr(config, name) for name in config.given}
    found = {}
    for task in dict.fromkeys(job.task for job in jobs):
        wanted, shares = load_resources(flags, task, TASKS, config.resources), 1
        if not TASKS[task].distributed and wanted.num_processes > 1:
            if not study and not flags.keys().isdisjoint(("nodes", "gpus", "tasks")):
                raise UserError(f"{task} is one process: leave out --nodes, --gpus and --tasks")
            shares = wanted.processes_per_node if TASKS[task].all_cores else 1
            wanted = wanted.for_one_process()
        found[task] = wanted.with_cores(shares * max(MIN_CORES, 1 + _num_workers(task, jobs)))
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


def estimate_hours(job: Job, resources: Resources) -> float:
    """Hours of one job on what it asks for."""
    rates = GPU_RATES if resources.gpus else CPU_RATES
    rate = rates.get(job.arch, rates["resnet50"])  # what other networks take is not known
    images = job.images * COST_OF_TASK.get(job.task, 1.0)
    return max(MINUTE, images / (rate * resources.num_processes) / 3600)


def describe_cost(
    jobs: Sequence[Job], resources: Mapping[str, Resources], parallel: int | None = None
) -> str:
    """The sum over jobs, in hours of a GPU or of a core, and the time from end to end.

    Args:
        jobs: parents before children.
        resources: of each task.
        parallel: how many jobs run at once; None: as many as can.
    """
    total = alone = longest = 0.0
    ends: dict[str, float] = {}
    for job in jobs:
        wanted = resources[job.task]
        hours = estimate_hours(job, wanted)
        total += hours * wanted.num_processes
        alone += hours
        ends[job.name] = hours + max((ends.get(name, 0.0) for name in job.after), default=0.0)
        longest = max(longest, ends[job.name])
    if parallel is not None:
        longest = max(longest, alone / parallel)
    unit = "GPU" if any(each.gpus for each in resources.values()) else "core"
    return (
        f"about {_hours(total)} of a {unit}, {_hours(longest)} from end to end if nothing waits "
        "(rough: see docs/slurm.md)"
    )


def _hours(hours: float) -> str:
    return f"{hours:,.0f} hours" if hours >= 10 else f"{60 * hours:,.0f} minutes"


def draw_tree(jobs: Sequence[Job], states: Mapping[str, str]) -> list[str]:
    """Jobs below those that they wait for; counts by task where the list would be long."""
    if len(jobs) > LONGEST_LIST:
        return _draw_counts(jobs, states)
    by_name = {job.name: job for job in jobs}
    children: dict[str | None, list[Job]] = {}
    for job in jobs:
        # Below the last of its parents; the report, which waits for all, at the end.
        parents = [name for name in job.after if name in by_name and not job.failed_flag]
        children.setdefault(parents[-1] if parents else None, []).append(job)

    def lines(parent: str | None, depth: int) -> list[str]:
        found = []
        for job in children.get(parent, []):
            many = f", after {len(job.after)} jobs" if len(job.after) > 2 else ""
            found.append(f"{'  ' * depth}{job.task:<10}{job.name}  [{states[job.name]}{many}]")
            found += lines(job.name, depth + 1)
        return found

    return lines(None, 1)


def _draw_counts(jobs: Sequence[Job], states: Mapping[str, str]) -> list[str]:
    depths: dict[str, int] = {}
    groups: dict[tuple[int, str], list[Job]] = {}
    for job in jobs:
        depths[job.name] = 1 + max((depths.get(name, 0) for name in job.after), default=0)
        groups.setdefault((depths[job.name], job.task), []).append(job)
    found = []
    for (depth, task), group in sorted(groups.items()):
        done = sum(states[job.name] == "done" for job in group)
        example = f"{group[0].name} ... {group[-1].name}" if len(group) > 1 else group[0].name
        found.append(f"{'  ' * depth}{task:<10}{len(group)} jobs, {done} done: {example}")
    return found


def count_states(states: Mapping[str, str]) -> str:
    """`12 jobs: 3 done, 1 queued, 8 to run`."""
    values = list(states.values())
    parts = [f"{values.count(state)} {state}" for state in dict.fromkeys(sorted(values))]
    return f"{len(values)} job{'s' * (len(values) != 1)}: {', '.join(parts)}"


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
        parallel = None if config.cluster == "slurm" else config.parallel or 1
        say(describe_cost(left, resources, parallel))
    if config.dry_run:
        for job in left:
            say(f"would run: {shlex.join(['python', TASKS[job.task].script, *job.argv])}")
        for task, wanted in resources.items():
            say(f"{task:<10}each process: {_describe_cores(task, wanted, jobs)}")
    elif not left:
        say(f"nothing to do: {count_states(states)}")
        return 0
    if config.cluster == "slurm":
        limit = DEFAULT_MAX_ARRAY if config.dry_run else max_array_size()
        plan = plan_arrays(left, resources, max_size=limit, queued=queued)
        (_show if config.dry_run else _submit)(plan, root, config.parallel or PARALLEL)
        return 0
    if config.dry_run:
        return 0
    from slurm.local import run_debug, run_local

    if config.cluster == "debug":
        return run_debug(left, root, say)
    return run_local(left, resources, root, parallel=config.parallel or 1, say=say)


def _describe_cores(task: str, wanted: Resources, jobs: Sequence[Job]) -> str:
    cores = "cores are left to Slurm"
    if wanted.cpus is not None:
        cores = f"{wanted.cpus} core{'s' * (wanted.cpus > 1)}"
    loads = f", {_num_workers(task, jobs)} loader workers" if TASKS[task].workers else ""
    return cores + loads


def _show(plan: Sequence[Array], root: Path, parallel: int) -> None:
    """The arrays and their dependencies, and the script of the first."""
    sizes = [len(array.jobs) for array in plan]
    for number, array in enumerate(plan):
        dependency = array.dependency([f"<{earlier}>" for earlier in range(number)], sizes)
        waits = f", {dependency}" if dependency else ""
        say(f"\n# submission <{number}>: {len(array.jobs)} x {array.jobs[0].task}{waits}")
        if number == 0:
            say(script_text(array, root / "submissions" / "dry-run", parallel, dependency))


def _submit(plan: Sequence[Array], root: Path, parallel: int) -> None:
    ids = submit_plan(plan, root, parallel)
    for array, job_id in zip(plan, ids, strict=True):
        what = array.jobs[0].name if len(array.jobs) == 1 else f"{len(array.jobs)} jobs"
        say(f"submitted {job_id}: {array.jobs[0].task}, {what}")
    say(f"python slurm/status.py shows their state; folders are in {root}")

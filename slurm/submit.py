"""python slurm/submit.py TASK ARGS...: any command of the project as a job, or a whole study."""

import argparse
import dataclasses
import secrets
import shlex
import sys
import time
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from instdisc.cli import Parser, build_parser, option, parse, run_command
from instdisc.errors import UserError
from slurm.cluster import find_state, max_array_size, plan_arrays, read_queue
from slurm.jobs import Job, jobs_root, read_status, read_submission, refuse_if_running_here
from slurm.resources import Resources, check_text, load_resources
from slurm.studies import BUILDERS, StudyConfig, build_study, count_states, describe_cost, draw_tree
from slurm.tasks import TASKS, check_arguments, find_task, run_folder

PARALLEL = 32  # elements of a job array that run at once
DESCRIPTION = """\
Runs a command of the project, unchanged, as a job. Flags before TASK are for the
cluster, those behind it for the command; they are checked before anything is queued.
A job that is preempted or reaches its time limit saves, is queued again and goes on."""

EPILOG = f"""\
tasks: {", ".join(TASKS)};
       study {"|".join(BUILDERS)}|all

examples:
  python slurm/submit.py --nodes 2 --gpus 8 --partition gpu --time 24h pretrain --arch resnet50
  python slurm/submit.py --gpus 1 semisup --labeled 0.01 --weights runs/pretrain/resnet50
  python slurm/submit.py --dry-run --gpus 8 study table2 --data /data/imagenet
  python slurm/submit.py --cluster local --parallel 2 study table1 --scale small --cifar cifar-10
  python slurm/submit.py pretrain --help                     the command's own flags
Resources can be kept in slurm.toml, here or in ~/.config/instdisc; docs/slurm.md says how.
python slurm/status.py shows what became of the jobs."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubmitConfig:
    """Flags about the submission itself; Resources has those about the cluster."""

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


def say(line: str = "") -> None:
    """One line to the terminal."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def build_submit_parser() -> argparse.ArgumentParser:
    """Both dataclasses as flags, then the task and all that follows it."""
    parser = Parser(
        prog="slurm/submit.py",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for title, kind in (("submission", SubmitConfig), ("resources", Resources)):
        group = parser.add_argument_group(title)
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if "help" not in field.metadata:
                continue  # slurm.toml only
            _add(group, field, hints[field.name])
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="TASK ARGS...", help="see below"
    )
    return parser


def _add(group: Any, field: "dataclasses.Field[Any]", hint: Any) -> None:
    members = [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]
    default = "none" if field.default is None else field.default
    shown = f"{field.metadata['help']} (default: {default})".replace("%", "%%")
    kwargs: dict[str, Any] = {"default": argparse.SUPPRESS, "help": shown, "dest": field.name}
    flag = "--" + field.name.replace("_", "-")
    if hint is bool:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **kwargs)
    elif typing.get_origin(hint) is Literal:
        group.add_argument(flag, choices=members, **kwargs)
    else:
        metavar = field.metadata["metavar"] or members[0].__name__.upper()
        group.add_argument(flag, type=members[0], metavar=metavar, **kwargs)


def build_jobs(command: Sequence[str], config: SubmitConfig) -> list[Job]:
    """The job of a task, or all jobs of a study."""
    if not command:
        raise UserError("name a task, or `study NAME`: see --help")
    task, *argv = command
    if task != "study":
        return [_single_job(task, argv, config)]
    about = {"prog": "slurm/submit.py study NAME", "description": "Runs a table or figure."}
    if not argv or argv[0].startswith("-"):
        if argv and argv[0] in ("-h", "--help"):
            build_parser(StudyConfig, **about).parse_args(["--help"])
        raise UserError(f"study: name one of {', '.join(BUILDERS)}, all")
    jobs = build_study(argv[0], parse(StudyConfig, argv[1:], **about))
    if config.check:
        for job in jobs:
            check_arguments(job.task, job.argv)
    return jobs


def _single_job(task: str, argv: list[str], config: SubmitConfig) -> Job:
    find_task(task)
    name = config.name
    if name is None:
        name = f"{task}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    check_text(name)
    run = ""
    if config.check or {"-h", "--help"} & set(argv):
        run = str(run_folder(task, check_arguments(task, argv)).absolute())
    return Job(name=name, task=task, argv=tuple(argv), run=run)


def choose_resources(
    jobs: Sequence[Job], flags: Mapping[str, Any], config: SubmitConfig, study: bool
) -> dict[str, Resources]:
    """What each task asks for; a command that nothing can share gets one process."""
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


def submit(config: SubmitConfig, flags: Mapping[str, Any], command: Sequence[str]) -> int:
    """Plans, shows or starts."""
    if config.parallel is not None and config.parallel < 1:
        raise UserError("--parallel must be at least 1")
    root = (config.jobs or jobs_root()).absolute()
    jobs = build_jobs(command, config)
    study = command[0] == "study"
    resources = choose_resources(jobs, flags, config, study)
    states, queued = find_states(jobs, root)
    left = [job for job in jobs if states[job.name] == "to run"]
    if study:
        say(f"study {command[1]}: {count_states(states)}")
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
    from slurm.cluster import script_text

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
    from slurm.cluster import submit_plan

    limit = max_array_size()
    plan = plan_arrays(left, resources, max_size=limit, queued=queued)
    ids = submit_plan(plan, root, config.parallel or PARALLEL)
    for array, job_id in zip(plan, ids, strict=True):
        what = array.jobs[0].name if len(array.jobs) == 1 else f"{len(array.jobs)} jobs"
        say(f"submitted {job_id}: {array.jobs[0].task}, {what}")
    say(f"python slurm/status.py shows what becomes of them; folders are in {root}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    given = vars(build_submit_parser().parse_args(argv))
    command = given.pop("command")
    own = {field.name for field in dataclasses.fields(SubmitConfig)}
    flags = {name: value for name, value in given.items() if name not in own}
    values = {name: value for name, value in given.items() if name in own}

    def execute(config: Any) -> int:
        return submit(SubmitConfig(**values), flags, command)

    # Only for what it makes of errors: the arguments are parsed above.
    return run_command(SubmitConfig, execute, [], prog="slurm/submit.py", description="")


if __name__ == "__main__":
    sys.exit(main())

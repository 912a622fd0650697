"""What a job asks the cluster for: flags, slurm.toml, and the options of sbatch and srun from them.

No default fits one site only. What is not given is left to Slurm, except the cores of GPU processes
(`with_cores`): Slurm's own default is one core, which the loader's workers would have to share.
"""

import dataclasses
import functools
import os
import re
import sys
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from instdisc.cli import option
from instdisc.errors import UserError

TIME = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?")
CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")
MEMORY = re.compile(r"\d+[KMGT]B?")
GPU_REQUEST = re.compile(r"[a-z][a-z-]*=([^{}]|\{gpus\})+")
CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def parse_minutes(text: str) -> int:
    """`90m`, `24h`, `2d`, `1d12h`, a number of minutes, or Slurm's `D-HH:MM:SS`, in minutes."""
    if text.isdecimal():
        minutes = int(text)
    elif (match := CLOCK.fullmatch(text)) is not None:
        days, hours, mins, seconds = (int(part or 0) for part in match.groups())
        minutes = days * 1440 + hours * 60 + mins + (seconds > 0)
    elif text and (match := TIME.fullmatch(text)) is not None:
        days, hours, mins = (int(part or 0) for part in match.groups())
        minutes = days * 1440 + hours * 60 + mins
    else:
        raise UserError(f"--time {text}: write 90m, 24h, 2d, 1d12h or D-HH:MM:SS")
    if minutes < 1:
        raise UserError(f"--time {text}: at least a minute")
    return minutes


_resource = functools.partial(option, group="resources")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResourceFlags:
    """What a job asks for; None leaves it to the site."""

    nodes: int = _resource(1, "machines")
    gpus: int = _resource(0, "GPUs on each node, one process for each")
    tasks: int = _resource(1, "processes on each node where no GPUs are asked for (gloo)")
    cpus: int | None = _resource(
        None,
        "cores for each process; if not given, with GPUs 1 and 1 per loader worker, at least 4",
    )
    mem: str | None = _resource(None, "memory of each node, such as 64G")
    time: str | None = _resource(
        None, "time limit: 90m, 24h, 2d; a job that reaches it saves, is requeued and goes on"
    )
    signal_delay: int = _resource(120, "seconds before the time limit at which a job saves")
    partition: str | None = _resource(None, "partition")
    account: str | None = _resource(None, "account")
    qos: str | None = _resource(None, "quality of service")
    constraint: str | None = _resource(None, "features that nodes must have")
    nodelist: str | None = _resource(None, "nodes to use")
    exclude: str | None = _resource(None, "nodes not to use")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resources(ResourceFlags):
    """One job's share of a cluster: flags over slurm.toml over defaults; these by slurm.toml only.

    Attributes:
        setup: lines of shell before the command.
        sbatch: more options of sbatch, by name.
        srun: more arguments of srun.
        python: what starts Python in the processes of srun; the submitting one if not given.
        gpu_request: the option of sbatch that asks for GPUs; {gpus} is their number on a node.
    """

    setup: tuple[str, ...] = ()
    sbatch: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    srun: tuple[str, ...] = ()
    python: tuple[str, ...] = (sys.executable,)
    gpu_request: str = "gpus-per-node={gpus}"

    def __post_init__(self) -> None:
        """Refuses what Slurm would refuse, and text that would end its line of the script."""
        for name in ("nodes", "tasks", "cpus", "signal_delay"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1")
        if self.gpus < 0:
            raise UserError("--gpus must not be negative")
        if self.gpus and self.tasks > 1:
            raise UserError("--gpus has one process for each GPU: leave --tasks out")
        if self.mem is not None and not MEMORY.fullmatch(self.mem):
            raise UserError(f"--mem {self.mem}: write a number and a unit, such as 64G")
        if self.time is not None:
            limit = 60 * parse_minutes(self.time)
            if limit <= self.signal_delay:
                raise UserError(
                    f"--time {self.time} ends before --signal-delay {self.signal_delay} s: the job "
                    "would be told to stop as it starts; raise one or lower the other"
                )
        if not GPU_REQUEST.fullmatch(self.gpu_request):
            raise UserError(
                f"gpu-request = {self.gpu_request!r}: write an sbatch option without its dashes, "
                'such as "gres=gpu:{gpus}"'
            )
        if not self.python:
            raise UserError('python = []: name a command, such as ["python"], or leave it out')
        words = [str(part) for item in self.sbatch.items() for part in item]
        words += [*self.srun, *self.python]
        for text in [v for v in vars(self).values() if isinstance(v, str)] + words:
            check_text(text)

    @property
    def processes_per_node(self) -> int:
        """One for each GPU, or as many as were asked for."""
        return self.gpus or self.tasks

    @property
    def num_processes(self) -> int:
        """Of the whole job."""
        return self.nodes * self.processes_per_node

    def for_one_process(self) -> "Resources":
        """The same for a command of one process; it keeps one GPU if there are any."""
        return dataclasses.replace(self, nodes=1, tasks=1, gpus=min(self.gpus, 1))

    def with_cores(self, count: int) -> "Resources":
        """The same with so many cores for each process, if it has a GPU and no number was given."""
        return dataclasses.replace(self, cpus=count) if self.gpus and self.cpus is None else self

    def describe(self) -> str:
        """One line: nodes, GPUs or slots, partition, time."""
        slot = f"{self.gpus} GPU{'s' * (self.gpus > 1)}" if self.gpus else f"{self.tasks} CPU slot"
        where = f" in {self.partition}" if self.partition else ""
        limit = f", {self.time} each time" if self.time else ""
        return f"{self.nodes} node{'s' * (self.nodes > 1)} x {slot}{where}{limit}"

    def sbatch_options(self) -> dict[str, Any]:
        """Arguments for submitit's executor."""
        minutes = None if self.time is None else parse_minutes(self.time)
        options: dict[str, Any] = {
            "nodes": self.nodes,
            "ntasks_per_node": self.processes_per_node,
            "cpus_per_task": self.cpus,
            "time": minutes,  # None: submitit would otherwise ask for five minutes
            "signal_delay_s": self.signal_delay,
            "wckey": None,  # submitit's own default, which some sites refuse
        }
        names = ("partition", "account", "qos", "constraint", "nodelist", "exclude")
        options |= {name: getattr(self, name) for name in names}
        extra = {"requeue": True, "kill-on-invalid-dep": "yes", **self.sbatch}
        if self.gpus:
            name, _, value = self.gpu_request.format(gpus=self.gpus).partition("=")
            extra[name] = value
        if self.mem is not None:
            extra["mem"] = self.mem
        return {**options, "additional_parameters": extra}

    def srun_options(self) -> list[str]:
        """One process that ends badly ends the step; a requeued job keeps its log."""
        words = ["--kill-on-bad-exit=1", "--open-mode=append"]
        # Since 22.05 srun does not take this over from sbatch.
        words += [f"--cpus-per-task={self.cpus}"] if self.cpus else []
        return words + list(self.srun)


def check_text(text: str) -> None:
    """Refuses text with a line break, which would end its line of the batch script."""
    if CONTROL.search(text):
        raise UserError(f"{text!r} has a line break or control character in it: remove it")


def resource_files(given: Path | None) -> list[Path]:
    """Where resources may be kept; later files win."""
    if given is not None:
        return [given]
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return [
        path for path in (home / "instdisc" / "slurm.toml", Path("slurm.toml")) if path.exists()
    ]


def read_toml(path: Path) -> dict[str, Any]:
    """Reads a file of resources."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"--resources {path}: no such file") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"{path} is not TOML ({error}): see docs/slurm.md") from None


def _checked(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Values of a table, with the names and types that Resources has."""
    hints = typing.get_type_hints(Resources)
    found = {}
    for raw, value in values.items():
        name = raw.replace("-", "_")
        if name not in hints:
            known = ", ".join(field.replace("_", "-") for field in hints)
            raise UserError(f"{path}: unknown key {raw}: use {known}, or a table per task")
        hint = hints[name]
        if hint == tuple[str, ...]:
            fits = isinstance(value, list) and all(isinstance(line, str) for line in value)
            value = tuple(value) if fits else value
        elif name == "sbatch":
            fits = isinstance(value, dict)
        else:
            kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
            fits = type(value) in kinds
        if not fits:
            raise UserError(f"{path}: {raw} = {value!r} is of the wrong type: see docs/slurm.md")
        found[name] = value
    return found


def load_resources(
    flags: Mapping[str, Any], task: str, tasks: Iterable[str], file: Path | None = None
) -> Resources:
    """Flags win over the task's table in slurm.toml, that over the rest of the file."""
    general: dict[str, Any] = {}
    special: dict[str, Any] = {}
    names = set(tasks)
    for path in resource_files(file):
        values = read_toml(path)
        tables = {name: values.pop(name) for name in names & set(values)}
        general |= _checked(values, path)
        special |= _checked(tables.get(task, {}), path)
    return Resources(**{**general, **special, **flags})

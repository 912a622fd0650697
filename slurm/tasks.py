"""The commands that can be jobs, by name; their arguments checked without torch."""

import dataclasses
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from instdisc.cli import parse_only
from instdisc.errors import UserError
from instdisc.runs.folders import runs_root


@dataclasses.dataclass(frozen=True)
class Task:
    """A command of the project.

    Attributes:
        module: where its `main(argv)` is.
        help: what it does, for the list of tasks.
        distributed: whether several processes can share it; otherwise it gets one.
        stand_in: flags that spare the check on the login node what only torch could find out; the
            job itself never sees them.
    """

    module: str
    help: str
    distributed: bool = True
    stand_in: tuple[str, str] | None = None

    @property
    def exists(self) -> bool:
        """Whether this version of the project has it."""
        return importlib.util.find_spec(self.module) is not None

    def load_main(self) -> Callable[[Sequence[str]], int]:
        """The command, imported; it imports torch only when it runs."""
        return importlib.import_module(self.module).main


TASKS = {
    "pretrain": Task("pretrain.run", "train a backbone"),
    "export": Task("pretrain.export", "convert it for other libraries", distributed=False),
    "knn": Task("transfer.knn", "weighted nearest neighbours"),
    "linear": Task("transfer.linear", "linear probes on conv1..conv5"),
    # Which recipe fits is written in the network's file, which torch must read.
    "semisup": Task("transfer.semisup", "fine-tune with few labels", True, ("--recipe", "paper")),
    "retrieve": Task("transfer.retrieve", "the retrieval figure"),
    "proposals": Task("transfer.proposals", "selective search", distributed=False),
    "detect": Task("transfer.detect", "detection on VOC07"),
    "suite": Task("transfer.suite", "every task for one backbone", distributed=False),
    "report": Task("transfer.report", "tables and figures", distributed=False),
}


def find_task(name: str) -> Task:
    """The task of that name."""
    if name not in TASKS:
        raise UserError(f"no task {name!r}: choose one of {', '.join(TASKS)}, or study")
    if not TASKS[name].exists:
        raise UserError(f"this version has no {TASKS[name].module.replace('.', '/')}.py: update it")
    return TASKS[name]


def check_arguments(name: str, argv: Sequence[str]) -> Any:
    """The command's own config, made from its arguments and thrown away by all but `status`.

    Raises:
        SystemExit: the command refuses them; it has said why.
    """
    task = find_task(name)
    words = list(argv)
    if task.stand_in and task.stand_in[0] not in [word.partition("=")[0] for word in words]:
        words += task.stand_in
    with parse_only() as parsed:
        code = task.load_main()(words)
    if code:
        raise SystemExit(code)
    return parsed[0]


def run_folder(name: str, config: Any) -> Path:
    """Where a command will write, as far as its arguments tell."""
    if getattr(config, "output", None) is not None:
        return Path(config.output)
    folder = runs_root() / name
    if name == "pretrain":
        return folder / config.arch
    if name == "detect":
        return folder / config.run_name
    weights = str(getattr(config, "weights", None) or "")
    leaf = Path(weights).name if ":" not in weights else weights.replace("/", "-")
    return folder / leaf.replace(":", "-") if weights else folder

"""The commands that can be jobs, by name; their arguments checked without torch."""

import dataclasses
import importlib
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
        stand_in: flags that the check on the login node uses for what only torch could find out;
            the job itself does not get them.
        workers: loader processes of each process, unless its flags say otherwise.
        all_cores: whether its one process uses every core it gets, and so wants those of a node.
    """

    module: str
    help: str
    distributed: bool = True
    stand_in: tuple[str, str] | None = None
    workers: int = 4
    all_cores: bool = False

    @property
    def script(self) -> str:
        """Path of the script in the checkout."""
        return self.module.replace(".", "/") + ".py"

    def load_main(self) -> Callable[[Sequence[str]], int]:
        """The command, imported; it imports torch only when it runs."""
        return importlib.import_module(self.module).main


TASKS = {
    "pretrain": Task("pretrain.run", "train a backbone"),
    "export": Task("pretrain.export", "convert it for other libraries", False, workers=0),
    "knn": Task("transfer.knn", "weighted nearest neighbours"),
    "fewshot": Task("transfer.fewshot", "few-shot episodes, nearest class mean"),
    "linear": Task("transfer.linear", "linear probes on conv1..conv5"),
    "voc_svm": Task("transfer.voc_svm", "VOC07 classification, full and low-shot"),
    # Which recipe fits is written in the network's file, which torch must read.
    "semisup": Task("transfer.semisup", "fine-tune with few labels", True, ("--recipe", "paper")),
    "retrieve": Task("transfer.retrieve", "the retrieval figure"),
    "embed": Task("transfer.embed", "features of a folder as .npy and .csv"),
    "proposals": Task("transfer.proposals", "selective search", False, workers=0, all_cores=True),
    "detect": Task("transfer.detect", "detection on VOC and COCO"),
    "suite": Task("transfer.suite", "every task for one backbone", False),
    "report": Task("transfer.report", "tables and figures", False, workers=0),
}


def find_task(name: str) -> Task:
    """The task of that name."""
    if name not in TASKS:
        raise UserError(f"no task {name!r}: choose one of {', '.join(TASKS)}, or study")
    return TASKS[name]


def check_arguments(name: str, argv: Sequence[str]) -> Any:
    """The command's own config, made from its arguments.

    Raises:
        SystemExit: the command refuses them; it has printed why.
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
        return folder / config.arch.replace(":", "-")
    if name == "detect":
        return folder / config.run_name
    weights = str(getattr(config, "weights", None) or "")
    leaf = Path(weights).name if ":" not in weights else weights.replace("/", "-")
    return folder / leaf.replace(":", "-") if weights else folder

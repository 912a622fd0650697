"""SuiteConfig: flags of transfer/suite.py. Imports no torch."""

import dataclasses
import shlex
from typing import Literal

from instdisc.cli import CommandConfig
from instdisc.errors import UserError
from transfer.config import check, data_option, network_option, protocol_option, run_option

TaskName = Literal["all", "knn", "retrieve", "fewshot", "voc_svm", "linear", "semisup", "detect"]
# Cheap ones first; knn and retrieve read the same stored features.
TASKS = ("knn", "retrieve", "fewshot", "voc_svm", "linear", "semisup", "detect")
# Of a pretraining's configuration, what says where and how it ran, but not what was learnt.
FIELDS_WITHOUT_EFFECT = (
    *("data", "output", "resume", "overwrite", "device", "workers", "monitor_every"),
    *("num_neighbors", "log_every", "save_minutes", "tensorboard", "bank_placement", "on_nan"),
    *("compile", "threads"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuiteConfig(CommandConfig):
    """Every transfer task for one or several networks."""

    PROG = "transfer/suite.py"
    DESCRIPTION = """
    Runs the readouts and transfer tasks for one or several networks, each task in
    a process of its own, the cheap ones first, then writes the report. What is
    finished is not run again; a task that fails does not stop the others, and is
    named at the end (exit code 1). Stopped by a signal, the suite ends with 75:
    the same command goes on.
    """
    EPILOG = """
    examples:
      python transfer/suite.py                                         newest run, all tasks
      python transfer/suite.py --weights a.pt --data /data/imagenet --voc-root VOCdevkit
      python transfer/suite.py --weights a.pt b.pt timm:resnet50 random:resnet50 --tasks knn linear
      python transfer/suite.py --tasks semisup --labeled 0.01 --trials 3 --extra 'semisup --sweep'
    Features are computed once per network and kept in runs/features, where kNN and
    retrieval share them. runs/suite has a record of each finished part.
    """

    weights: tuple[str, ...] = network_option(
        (),
        "one or several of: a run folder, a backbone.pt, untrained:RUN, random:ARCH[:SEED], "
        "data-init:ARCH[:SEED], timm:NAME; the newest pretraining run if not given",
        metavar="NAME",
    )
    tasks: tuple[TaskName, ...] = protocol_option(("all",), "which tasks, in this order")
    data: str | None = data_option(
        None, "images for all tasks but those on VOC, as each of them takes it", metavar="DIR"
    )
    voc_root: str | None = data_option(None, "VOCdevkit, for voc_svm and detect", metavar="DIR")
    coco_root: str | None = data_option(
        None, "COCO (train2017, val2017, annotations), for detection on it too", metavar="DIR"
    )
    labeled: tuple[float, ...] = protocol_option(
        (0.01, 0.02, 0.04, 0.1, 0.2),
        "fractions of labels for semisup; these are the paper's",
        metavar="FRACTION",
    )
    trials: int = protocol_option(1, "repetitions of semisup and detect")
    extra: tuple[str, ...] = protocol_option(
        (),
        "more flags for one task, as one word: --extra 'semisup --epochs 20' 'knn --k 20 200'",
        metavar="'TASK FLAGS'",
    )
    seed: int = run_option(0, "of the first repetition", volatile=False)
    workers: int | None = run_option(None, "loader processes of each task", aliases=["-j"])
    device: Literal["auto", "cpu", "cuda"] = run_option("auto", "where to compute")
    again: bool = run_option(False, "run finished parts again, as when the images have changed")
    report: bool = run_option(True, "write the report at the end")

    def __post_init__(self) -> None:
        """Refuses values that make no sense, with the fix."""
        check(
            (bool(self.tasks), "--tasks: name at least one, or all"),
            (len(set(self.tasks)) == len(self.tasks), "--tasks: name each one once"),
            (len(set(self.weights)) == len(self.weights), "--weights: name each one once"),
            (bool(self.labeled), "--labeled: name at least one fraction"),
            (self.trials >= 1, "--trials must be at least 1"),
            (self.seed >= 0, "--seed must not be negative"),
            (self.workers is None or self.workers >= 0, "--workers must not be negative"),
        )
        self.extra_flags()

    @property
    def chosen_tasks(self) -> tuple[str, ...]:
        """The tasks, `all` spelt out."""
        return TASKS if "all" in self.tasks else self.tasks

    def extra_flags(self) -> dict[str, list[str]]:
        """More flags by task."""
        flags: dict[str, list[str]] = {}
        for text in self.extra:
            try:
                words = shlex.split(text)
            except ValueError as error:
                raise UserError(f"--extra {text!r}: {error}: check its quotes") from None
            if not words or words[0] not in TASKS:
                raise UserError(f"--extra {text!r}: begin with one of {', '.join(TASKS)}")
            flags.setdefault(words[0], []).extend(words[1:])
        return flags

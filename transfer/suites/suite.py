"""run_suite(config): tasks as processes, a record of each finished part. Imports no torch."""

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from instdisc.cli import say
from instdisc.errors import EXIT_INTERRUPTED, Interrupted, UserError
from instdisc.names import (
    COCO_DETECTORS,
    DATA_VARIABLE,
    DETECTORS,
    NAMED_NETWORKS,
    STOP_SIGNALS,
    TIMM,
    VOC_VARIABLE,
)
from instdisc.runs.folders import newest_backbone, runs_root, write_json
from instdisc.runs.locks import open_locked
from instdisc.runs.results import config_hash
from transfer.suites.settings import SuiteConfig

# What else decides which images a task sees.
ENVIRONMENT = (DATA_VARIABLE, VOC_VARIABLE)


@dataclasses.dataclass(frozen=True)
class NetworkName:
    """One word of --weights.

    Attributes:
        name: as it was given, or the newest run's file.
        label: for people and file names.
        identity: changes when the network behind the name does.
        arch: its architecture, where the name or the run folder tells it.
    """

    name: str
    label: str
    identity: str
    arch: str | None


@dataclasses.dataclass(frozen=True)
class Part:
    """One task for one network."""

    task: str
    network: NetworkName
    flags: tuple[str, ...]
    volatile: tuple[str, ...] = ()  # flags that change no result
    skipped: str = ""  # why it cannot be run

    @property
    def label(self) -> str:
        """For people."""
        return f"{self.task} of {self.network.label}"

    @property
    def key(self) -> str:
        """Equal for two parts that would do the same."""
        environment = {name: os.environ.get(name) for name in ENVIRONMENT}
        what = [self.task, self.network.identity, self.flags, environment]
        return config_hash({"part": json.dumps(what)})

    @property
    def record(self) -> Path:
        """Where it is written that the part is finished."""
        name = self.network.label.replace("/", "-").replace(":", "-")
        return runs_root() / "suite" / name / f"{self.task}-{self.key[:12]}.json"

    @property
    def command(self) -> list[str]:
        """The process; `-P` keeps modules of the current folder out of it."""
        flags = [*self.volatile, *self.flags]
        return [sys.executable, "-P", "-m", f"transfer.{self.task}", *flags]


def find_network(name: str | None) -> NetworkName:
    """What a word of --weights stands for, without opening it.

    Raises:
        UserError: there is no such file.
    """
    kind, _, rest = (name or "").partition(":")
    if kind == "untrained":
        run = find_network(rest or None)
        word = f"untrained:{run.name}"
        return NetworkName(word, f"untrained:{run.label}", f"untrained:{run.identity}", run.arch)
    if name is not None and kind in NAMED_NETWORKS:
        arch = None if kind == "timm" or rest.startswith(TIMM) else rest.partition(":")[0]
        return NetworkName(name, name, name, arch)
    path = newest_backbone() if name is None else Path(name)
    path = path / "backbone.pt" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"--weights {name}: no such run or file, nor one of random:, timm:, ...")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    label = path.parent.name if path.name == "backbone.pt" else path.stem
    return NetworkName(str(path), label, digest, _find_arch(path))


def _find_arch(path: Path) -> str | None:
    """The architecture from the run's config.json, or from the file itself."""
    try:
        return str(json.loads((path.parent / "config.json").read_text("utf-8"))["arch"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    # An imported file has no config.json beside it, and only torch can read it.
    from instdisc.runs.checkpoint import load_checkpoint

    return str(load_checkpoint(path, "backbone")["arch"])


def make_part(task: str, network: NetworkName, config: SuiteConfig) -> Part:
    """The flags of a task, or why it cannot be run."""
    if task == "detect":
        return _make_detection(network, config)
    flags = ["--weights", network.name, "--seed", str(config.seed)]
    name, data = ("--voc-root", config.voc_root) if task == "voc_svm" else ("--data", config.data)
    if data is not None:
        flags += [name, data]
    if task == "voc_svm":
        flags.append("--low-shot")
    if task == "semisup":
        flags += ["--labeled", *map(str, config.labeled), "--trials", str(config.trials)]
    volatile = ["--device", config.device]
    if config.workers is not None:
        volatile += ["--workers", str(config.workers)]
    more = config.extra_flags().get(task, [])
    return Part(task, network, (*flags, *more), tuple(volatile))


def _make_detection(network: NetworkName, config: SuiteConfig, *, coco: bool = False) -> Part:
    kind = network.name.partition(":")[0]
    detectors = COCO_DETECTORS if coco else DETECTORS
    if network.arch not in detectors:
        known = ", ".join(detectors)
        reason = f"there is no detector for {network.arch or network.name}, only for {known}"
        return Part("detect", network, (), skipped=reason)
    detector = detectors[network.arch]
    # Random weights are what detect.py calls scratch: norms are trained, nothing is fixed.
    is_random = kind in ("random", "untrained")
    start = ["--init", "scratch"] if is_random else ["--weights", network.name]
    name = network.label.replace("/", "-").replace(":", "-")
    output = runs_root() / "detect" / f"{detector.replace('/', '-')}-{name}"
    flags = ["--cfg", detector, *start, "--output", str(output)]
    flags += ["--seed", str(config.seed), "--trials", str(config.trials)]
    if coco and config.coco_root is not None:
        flags += ["--coco-root", config.coco_root]
    elif config.voc_root is not None:
        flags += ["--voc-root", config.voc_root]
    more = config.extra_flags().get("detect", [])
    return Part("detect", network, (*flags, *more), ("--device", config.device))


def plan(config: SuiteConfig) -> list[Part]:
    """All parts, task by task: cheapest task first."""
    networks = [find_network(name) for name in config.weights or (None,)]
    parts = []
    for task in config.chosen_tasks:
        parts += [make_part(task, network, config) for network in networks]
        if task == "detect" and config.coco_root is not None:
            parts += [_make_detection(network, config, coco=True) for network in networks]
    return parts


class Runner:
    """Runs one process at a time, and hands signals on to it."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[bytes] | None = None
        self.stopped = False
        self.waiting_for = ""  # a part at which a process of another suite is

    def __enter__(self) -> "Runner":
        self._previous = {number: signal.signal(number, self._pass_on) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        if self.waiting_for:
            raise self._not_begun()
        if self.child is not None and self.child.poll() is None:
            self.child.send_signal(number)

    def _not_begun(self) -> Interrupted:
        return Interrupted(f"stopped before {self.waiting_for}: run the same command again")

    @contextlib.contextmanager
    def alone(self, part: Part) -> Iterator[int]:
        """Waits for a process at the same part: that of a suite that was killed goes on.

        Gives a descriptor to hand on, with which the child keeps the lock as long as it lives.
        """
        file = part.record.with_name(f".{part.record.stem}.lock")
        file.parent.mkdir(parents=True, exist_ok=True)

        def tell() -> None:
            self.waiting_for = part.label
            if self.stopped:  # before the handler knew that it has to end the wait
                raise self._not_begun()
            say(f"{part.label}: another process is at it: waiting for its end")

        with open_locked(file, "w", on_wait=tell) as held:
            self.waiting_for = ""
            yield held.fileno()

    def run(self, command: Sequence[str], keep: Sequence[int] = ()) -> int:
        """The exit code; 75 if the suite was told to stop meanwhile.

        The child has a session of its own, so that Ctrl-C reaches it once, through the suite.

        Args:
            command: its words.
            keep: descriptors that the child gets too.
        """
        self.child = subprocess.Popen(command, start_new_session=True, pass_fds=keep)
        if self.stopped:  # between two parts
            self.child.terminate()
        code = self.child.wait()
        return EXIT_INTERRUPTED if self.stopped and code != 0 else code


def _is_finished(part: Part) -> bool:
    try:
        return bool(json.loads(part.record.read_text("utf-8"))["exit_code"] == 0)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def run_part(part: Part, runner: Runner) -> int:
    """Runs it and keeps its record; the exit code."""
    started = time.monotonic()
    with runner.alone(part) as lock:
        code = runner.run(part.command, keep=[lock])
    if code == EXIT_INTERRUPTED:
        raise Interrupted(f"stopped in {part.label}: run the same command again to go on")
    record: dict[str, Any] = {
        "task": part.task,
        "weights": part.network.name,
        "weights_identity": part.network.identity,
        "command": part.command,
        "exit_code": code,
        "seconds": round(time.monotonic() - started, 1),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    write_json(part.record, record)
    return code


def run_suite(config: SuiteConfig) -> int:
    """The command: 0 if all went well, 1 if parts failed.

    Raises:
        Interrupted: a task was stopped and has saved its work.
    """
    parts = plan(config)
    failed: list[str] = []
    skipped: list[str] = []
    with Runner() as runner:
        for number, part in enumerate(parts, start=1):
            head = f"[{number}/{len(parts)}] {part.label}"
            if part.skipped:
                skipped.append(f"{part.label}: {part.skipped}")
                say(f"{head}: left out, {part.skipped}")
            elif _is_finished(part) and not config.again:
                say(f"{head}: finished before (--again runs it again)")
            else:
                say(f"{head}: {' '.join(part.command[2:])}")
                code = run_part(part, runner)
                if code != 0:
                    failed.append(f"{part.label} (exit code {code})")
        if config.report:
            code = runner.run([sys.executable, "-P", "-m", "transfer.report"])
            if code == EXIT_INTERRUPTED:
                raise Interrupted("stopped while the report was written: run the command again")
            if code != 0:
                failed.append(f"report (exit code {code})")
    return _conclude(parts, skipped, failed)


def _conclude(parts: Sequence[Part], skipped: Sequence[str], failed: Sequence[str]) -> int:
    """Says how it went; the exit code."""
    say(f"{len(parts)} parts, {len(skipped)} left out, {len(failed)} failed")
    for line in skipped:
        say(f"left out: {line}")
    for line in failed:
        say(f"FAILED: {line}")
    return 1 if failed else 0

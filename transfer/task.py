"""What every transfer command works with: a network, images, a run folder, and result rows."""

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from instdisc.cli import to_dict, volatile_fields
from instdisc.errors import UserError, some_of
from instdisc.images.locations import DataLocation, locate_data
from instdisc.images.sets import ImageSet, Split, has_split, load_images
from instdisc.names import DATA_VARIABLE
from instdisc.networks.weights import Weights, open_weights
from instdisc.runs.folders import runs_root, write_json
from instdisc.runs.locks import lock_folder
from instdisc.runs.log import LOGGER, boxed, setup_logging
from instdisc.runs.results import Result, append_results, config_hash
from instdisc.training import dist
from instdisc.training.dist import Process
from transfer.config import TransferConfig
from transfer.suites.settings import FIELDS_WITHOUT_EFFECT

# Commands that keep what is half done in their folder, and must have it to themselves.
EXCLUSIVE = ("semisup", "linear", "voc_svm")


def demo_banner(cure: str) -> str:
    """What a command says before it measures anything on the embedded images."""
    return boxed(
        "DEMO DATA. These numbers are of the small images that come with the project: they say "
        f"that the code works, and nothing about the method. Name real data with {cure}."
    )


@dataclasses.dataclass(frozen=True)
class Task:
    """A transfer command at work.

    Attributes:
        name: what result rows call the command: knn, linear, voc_svm, ...
        config: its configuration.
        process: this process.
        weights: the network, in eval mode, on the process's device.
        location: where the images are.
        held: what is given back at the end: the lock of the run folder.
    """

    name: str
    config: TransferConfig
    process: Process
    weights: Weights
    location: DataLocation
    held: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    def claim(self) -> contextlib.ExitStack:
        """Locks the run folder; closing what it returns gives the folder back."""
        if self.is_main:
            self.held.enter_context(lock_folder(self.output))
        return self.held

    @property
    def is_main(self) -> bool:
        """Whether this process writes."""
        return self.process.is_main

    def open_untrained(self) -> "Task | None":
        """The same task for the network as it was before training, to be measured beside it.

        Only on the embedded images, where it takes seconds, and for a network of a run.
        """
        file, settings = self.weights.file, self.weights.pretraining.get("config") or {}
        if not self.location.is_demo or file is None or "objective" not in settings:
            return None
        config = dataclasses.replace(self.config, weights=f"untrained:{file}", output=None)
        weights = open_weights(config.weights)
        weights.to(self.process.device)
        return Task(self.name, config, self.process, weights, self.location)

    @cached_property
    def weights_hash(self) -> str:
        """SHA-256 of the network's tensors as they were opened."""
        return self.weights.hash

    @cached_property
    def output(self) -> Path:
        """The folder of this run."""
        name = self.weights.name.replace("/", "-").replace(":", "-")
        return self.config.output or runs_root() / self.name / name

    def load_split(self, split: Split) -> ImageSet:
        """The images of a split, which the first process lists for all."""
        if not has_split(self.location, split):
            raise UserError(
                f"{self.location.root} has no {split}/ beside train/: "
                "expected <data>/train/<class>/<image> and <data>/val/<class>/<image>"
            )
        skip_bad = self.config.skip_bad_images
        return dist.from_first(lambda: load_images(self.location, split, skip_bad=skip_bad))

    def load_train_and_val(self) -> tuple[ImageSet, ImageSet]:
        """Both splits, with the labels of val in terms of the classes of train."""
        train, val = self.load_labelled("train"), self.load_labelled("val")
        return train, align_labels(val, train.classes)

    def load_labelled(self, split: Split) -> ImageSet:
        """The images of a split, which must have classes."""
        images = self.load_split(split)
        if not images.is_labelled:
            raise UserError(
                f"the {images.split} images of {self.location.root} have no classes, which knn, "
                "linear, semisup, fewshot, and retrieve without --query need: put each image into "
                "the folder of its class (ImageNet and Places205: python -m "
                "instdisc.images.arrange --help), or add a label column to a list"
            )
        return images

    def result(
        self,
        *,
        protocol: str,
        metric: str,
        value: float,
        images: Sequence[ImageSet],
        details: Mapping[str, Any] | None = None,
    ) -> Result:
        """A row for one number.

        Args:
            protocol: how it was measured, in words that two equal measurements share.
            metric: top1, top5, ...
            value: the number, in percent where it is one.
            images: all that it was measured with; training images first.
            details: anything a reader may ask for.
        """
        volatile = volatile_fields(type(self.config))
        kept = {k: v for k, v in to_dict(self.config).items() if k not in volatile}
        return Result(
            task=self.name,
            protocol=protocol,
            arch=self.weights.backbone.arch,
            weights=self.weights.name,
            weights_hash=self.weights_hash,
            dataset=images[0].dataset,
            data_fingerprint=joint_fingerprint(images),
            metric=metric,
            value=value,
            seed=self.config.seed,
            config_hash=config_hash({"task": self.name, **kept}),
            details={**self._facts, **(details or {})},
        )

    @cached_property
    def _facts(self) -> dict[str, Any]:
        """What a reader of any row may ask: its folder, its device, what the network has seen."""
        device = self.process.device
        return {
            "folder": os.path.relpath(self.output, runs_root()),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            "pretraining": pretraining_facts(self.weights.pretraining),
        }

    def write_results(self, results: Sequence[Result]) -> None:
        """Appends rows to the results of the runs folder, by the first process."""
        if self.is_main and results:
            path = append_results(results)
            LOGGER.info(f"{len(results)} result rows added to {path}")


def pretraining_facts(pretraining: Mapping[str, Any]) -> dict[str, Any]:
    """What tells two pretrainings apart: settings, data set, and how far they came.

    Rows that agree in all of it but the seed are repetitions of one measurement.
    """
    settings = pretraining.get("config") or {}
    facts = {name: value for name, value in settings.items() if name not in FIELDS_WITHOUT_EFFECT}
    for name in ("dataset", "data_fingerprint", "epoch", "imported_from", "sha256"):
        if name in pretraining:
            facts[name] = pretraining[name]
    return facts


def joint_fingerprint(images: Sequence[ImageSet]) -> str:
    """One fingerprint of several sets; of a single one it is its own."""
    if len(images) == 1:
        return images[0].fingerprint
    parts = "\n".join(part.fingerprint for part in images)
    return hashlib.sha256(parts.encode()).hexdigest()


def align_labels(images: ImageSet, classes: Sequence[str]) -> ImageSet:
    """The same images with labels that count in `classes`, which must hold all of theirs.

    Folder names make the labels: without this a missing class folder would shift all after it.
    """
    if images.classes == tuple(classes):
        return images
    place = {name: label for label, name in enumerate(classes)}
    unknown = [name for name in images.classes if name not in place]
    if unknown:
        raise UserError(
            f"{images.split}/ of {images.dataset} has classes that train/ has not "
            f"({some_of(unknown)}): make the class folders agree"
        )
    table = np.array([place[name] for name in images.classes], dtype=np.int64)
    return dataclasses.replace(images, classes=tuple(classes), labels=table[images.labels])


def find_location(named: str | None, weights: Weights) -> DataLocation:
    """The data that was named; else what the network was pretrained on; else the demo set."""
    if named is not None or os.environ.get(DATA_VARIABLE) or weights.data is None:
        return locate_data(named)
    return locate_data(weights.data, flag="--data is not given, and the pretraining data")


@contextlib.contextmanager
def open_task(
    name: str,
    config: TransferConfig,
    locate: Callable[[str | None, Weights], DataLocation] = find_location,
) -> Iterator[Task]:
    """Opens network, data location and run folder, and says what it found.

    At the end it gives the run folder back, and leaves the process group.

    Args:
        name: of the command.
        config: its flags.
        locate: finds the data that were named, or what stands for them.
    """
    with dist.joined(config.device, config.threads) as process:
        setup_logging(None, is_main=process.is_main)
        weights = open_weights(config.weights, data=config.data)
        task = Task(name, config, process, weights, locate(config.data, weights))
        weights.to(process.device)
        with task.held:
            if name in EXCLUSIVE:
                task.claim()
            setup_logging(task.output / "log.txt", is_main=process.is_main)
            if process.is_main:
                write_json(task.output / "config.json", to_dict(config))
            if task.location.is_demo and process.is_main:
                LOGGER.warning(demo_banner(config.REAL_DATA))
            origin = weights.file or weights.name
            LOGGER.info(f"{name}: {weights.backbone.arch} of {origin} on {process.device}")
            yield task

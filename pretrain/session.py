"""What a run works with: its folder, its images, its checkpoint, and the signals that end it."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np

from instdisc.cli import to_dict, volatile_fields
from instdisc.errors import UserError
from instdisc.images.locations import locate_data
from instdisc.images.sets import (
    ImageSet,
    bad_images_message,
    find_bad_images,
    has_split,
    load_images,
    random_subset,
)
from instdisc.images.transforms import InputSpec
from instdisc.networks.backbones import Embedding, build_untrained, num_parameters
from instdisc.runs.checkpoint import load_checkpoint, load_last
from instdisc.runs.folders import provenance, runs_root, write_json
from instdisc.runs.locks import empty_folder
from instdisc.runs.log import LOGGER, boxed, setup_logging
from instdisc.training import dist
from instdisc.training.dist import Process
from pretrain.config import PretrainConfig
from pretrain.monitor import Monitor

DEMO_BANNER = boxed(
    "DEMO DATA. No data set was named, so this run uses the small images that come with the "
    "project. Its numbers say that the code works, and nothing about the method. Name real data "
    "with --data DIR or INSTDISC_DATA."
)
# Pixel statistics of the archives of small images; everything else uses ImageNet's.
STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "fashion-mnist": ((0.2860,) * 3, (0.3530,) * 3),
}


class Session:
    """A run's folder and data, opened and checked before anything is computed."""

    def __init__(self, config: PretrainConfig, process: Process) -> None:
        self.config = config
        self.process = process
        self.output = config.output or runs_root() / "pretrain" / config.arch
        self.last_checkpoint = self.output / "last.pt"
        self.bad_images_file = self.output / "bad_images.txt"

    @property
    def is_main(self) -> bool:
        """Whether this process writes."""
        return self.process.is_main

    @functools.cached_property
    def train(self) -> ImageSet:
        """The training images, scanned for unreadable ones."""
        return self._open_train()

    @functools.cached_property
    def spec(self) -> InputSpec:
        """Image size and pixel statistics."""
        statistics = STATISTICS.get(self.train.dataset)
        mean, std = statistics or (InputSpec.mean, InputSpec.std)
        config = self.config
        return InputSpec(config.image_size, mean, std, config.crop_ratio)

    @functools.cached_property
    def monitor(self) -> Monitor | None:
        """What measures the features during training; kNN where there are validation images."""
        config = self.config
        location = locate_data(config.data)
        if not config.monitor_every:
            return None
        if not has_split(location, "val"):
            LOGGER.info("no val/ beside train/: the monitor measures RankMe, and no kNN accuracy")
            return Monitor(config, self.train, None, self.spec, self.process)
        val = load_images(location, "val", skip_bad=config.skip_bad_images)
        if val.classes != self.train.classes:
            raise UserError(
                f"train/ and val/ of {location.root} have different classes: "
                "make them agree, or turn the monitor off with --monitor-every 0"
            )
        return Monitor(config, self.train, val, self.spec, self.process)

    def _open_train(self) -> ImageSet:
        config = self.config
        location = locate_data(config.data)
        if location.is_demo and self.is_main:
            LOGGER.warning(DEMO_BANNER)
        if not self.is_main:
            dist.barrier()  # the first process makes the demo images
        images = load_images(location, "train", skip_bad=config.skip_bad_images)
        if self.is_main:
            dist.barrier()
        images = random_subset(images, config.train_fraction, config.seed)
        bad = find_bad_images(images)
        names = tuple(images.name(i) for i in bad)
        if bad and not config.skip_bad_images:
            raise UserError(bad_images_message(names))
        if bad:
            images = images.subset(np.setdiff1d(np.arange(len(images)), bad))
            images = dataclasses.replace(images, skipped=images.skipped + names)
        n = len(images)
        share = self.process.world_size * config.accumulate
        if n < 2:
            raise UserError(f"{config.data} has one training image: at least two are needed")
        if config.batch_size > n:
            raise UserError(
                f"--batch-size {config.batch_size} is more than the {n} images: lower it"
            )
        if config.batch_size % share:
            raise UserError(
                f"--batch-size {config.batch_size} cannot be shared by {self.process.world_size} "
                f"processes with --accumulate {config.accumulate}: make it a multiple of {share}"
            )
        if config.objective in ("nce", "sampled-softmax") and config.num_negatives > n:
            LOGGER.info(
                f"m is {config.num_negatives}, more than the {n} images: noise is drawn with "
                "replacement, and --objective softmax over all of them would cost less"
            )
        return images

    def build_model(self) -> Embedding:
        """The network at its random initialisation, the same on every process."""
        return build_untrained(to_dict(self.config))

    def find_checkpoint(self) -> dict[str, Any] | None:
        """The state to go on from, checked to belong to this run; None for a fresh start."""
        config = self.config
        if config.overwrite:
            self._delete_run()
        path = self.last_checkpoint if config.resume in ("auto", "never") else Path(config.resume)
        if config.resume == "never":
            if path.exists():
                raise UserError(
                    f"{self.output} holds a run: choose another --output, or --overwrite"
                )
            return None
        # With a sharded bank no process wants all rows in its memory: they stay in the file.
        mapped = config.bank_placement == "sharded"
        if config.resume == "auto":
            state = load_last(path, "train", mapped=mapped, rename=self.is_main)
        else:
            state = load_checkpoint(path, "train", mapped=mapped)
        if state is not None:
            self._check_same_run(state, path)
        return state

    def _delete_run(self) -> None:
        if self.output.exists() and any(self.output.glob("[!.]*")):
            if not (self.output / "config.json").exists():
                raise UserError(
                    f"{self.output} is not a run folder, so --overwrite leaves it alone"
                )
            if self.is_main:
                empty_folder(self.output)
        dist.barrier()

    def _check_same_run(self, state: dict[str, Any], path: Path) -> None:
        # An option that is younger than the checkpoint had its default's effect.
        ours, theirs = to_dict(self.config), {**to_dict(PretrainConfig()), **state["config"]}
        different = [
            f"{name} was {theirs.get(name)}, is {value}"
            for name, value in ours.items()
            if theirs.get(name) != value and name not in volatile_fields(PretrainConfig)
        ]
        remedy = "choose another --output, or --overwrite to start again"
        if different:
            raise UserError(f"{path} is of another run ({'; '.join(different)}): {remedy}")
        if state["data_fingerprint"] != self.train.fingerprint:
            raise UserError(
                f"{path} was trained on another list of images, and a bank row means an image: "
                f"restore the images, or {remedy}"
            )

    def open_folder(self) -> None:
        """Writes config.json and starts log.txt; call when all arguments have been checked."""
        setup_logging(self.output / "log.txt", is_main=self.is_main)
        if self.is_main:
            write_json(self.output / "config.json", to_dict(self.config))
            write_json(self.output / "provenance.json", provenance())
            for name in self.train.skipped:
                self.record_bad_image(f"{name} is not a readable image")

    def record_bad_image(self, message: str) -> None:
        """Keeps the name of an image that was skipped."""
        LOGGER.warning(f"skipped: {message}")
        with self.bad_images_file.open("a", encoding="utf-8") as file:
            file.write(message + "\n")

    def describe(self, model: Embedding) -> str:
        """The run in two lines."""
        config, images = self.config, self.train
        softmax = math.log(len(images))
        return (
            f"{config.arch} ({num_parameters(model) / 1e6:.1f}M parameters) on {len(images):,} "
            f"images of {images.dataset}, {config.image_size} px, {self.process.world_size} "
            f"process(es) on {self.process.device}\n"
            f"{config.objective}, tau {config.temperature}, batch {config.batch_size}, "
            f"{config.epochs} epochs; guessing gives a softmax loss of ln n = {softmax:.2f}"
        )

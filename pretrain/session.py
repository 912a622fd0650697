"""What a run works with: its folder, its images, its checkpoint, and the signals that end it."""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

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
    share_lists,
)
from instdisc.images.transforms import InputSpec
from instdisc.networks.backbones import Embedding, build_untrained, num_parameters
from instdisc.runs.background import BackgroundWriter
from instdisc.runs.checkpoint import (
    DamagedFile,
    load_checkpoint,
    load_last,
    previous_of,
    set_aside,
)
from instdisc.runs.folders import provenance, runs_root, write_json
from instdisc.runs.locks import empty_folder
from instdisc.runs.log import LOGGER, boxed, setup_logging
from instdisc.runs.row_files import StoredRows, open_rows
from instdisc.training import dist
from instdisc.training.dist import Process
from instdisc.training.draws import draws_of
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
        self.output = config.output or runs_root() / "pretrain" / config.arch.replace(":", "-")
        self.last_checkpoint = self.output / "last.pt"
        self.bad_images_file = self.output / "bad_images.txt"
        self.writer = BackgroundWriter()

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
    def val(self) -> ImageSet | None:
        """Images for the kNN accuracy; None where none have classes, or none are wanted."""
        config, train = self.config, self.train
        location = locate_data(config.data)
        if not config.monitor_every:
            return None
        alone = "the monitor measures RankMe, and no kNN accuracy"
        if not has_split(location, "val"):
            LOGGER.info(f"no val/ beside train/: {alone}")
            return None
        if not train.is_labelled:
            LOGGER.info(f"the images of {location.root} have no classes: {alone}")
            return None
        skip_bad = config.skip_bad_images
        val = dist.from_first(lambda: load_images(location, "val", skip_bad=skip_bad))
        if not val.is_labelled:
            LOGGER.warning(
                f"val/ of {location.root} has no class folders, so {alone}: put each image into "
                "the folder of its class (for ImageNet python -m instdisc.images.arrange does)"
            )
            return None
        if val.classes != train.classes:
            raise UserError(
                f"train/ and val/ of {location.root} have different classes: "
                "make them agree, or turn the monitor off with --monitor-every 0"
            )
        return val

    @functools.cached_property
    def monitor(self) -> Monitor | None:
        """What measures the features during training; kNN where there are validation images."""
        if not self.config.monitor_every:
            return None
        return Monitor(self.config, self.train, self.val, self.spec, self.process)

    def _list_train(self) -> ImageSet:
        """Lists the training images and looks for unreadable ones; the first process, for all."""
        config = self.config
        images = load_images(locate_data(config.data), "train", skip_bad=config.skip_bad_images)
        images = random_subset(images, config.train_fraction, config.seed)
        bad = find_bad_images(images)
        names = tuple(images.name(i) for i in bad)
        if bad and not config.skip_bad_images:
            raise UserError(bad_images_message(names))
        if bad:
            images = images.subset(np.setdiff1d(np.arange(len(images)), bad))
            images = dataclasses.replace(images, skipped=images.skipped + names)
        return share_lists(images)

    def _open_train(self) -> ImageSet:
        config = self.config
        if locate_data(config.data).is_demo and self.is_main:
            LOGGER.warning(DEMO_BANNER)
        images = dist.from_first(self._list_train)
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
        """The state to go on from, checked to belong to this run; None for a fresh start.

        The first process, which holds the folder's lock, reads it before the others do.
        """
        config = self.config
        path = self.last_checkpoint if config.resume in ("auto", "never") else Path(config.resume)
        with dist.first_process_first(self.process):
            if config.overwrite:
                self._delete_run()
            state = self._load_state(path)
        step = -1 if state is None else state["step"]
        steps = dist.all_gather_rows(torch.tensor([step], device=self.process.device)).tolist()
        if len(set(steps)) > 1:
            raise UserError(
                f"the processes see different checkpoints as {path} (steps {steps}, -1 for none): "
                "put --output on a disk that they share"
            )
        if state is not None:
            self._check_same_run(state, path)
            state = self._open_bank(state, path)
        return state

    def _open_bank(self, state: dict[str, Any], path: Path) -> dict[str, Any]:
        """The state with its rows found to be whole; that of the save before, if they are not."""
        rows, damage = self._find_damage(state["bank"], path)
        if damage is None:
            return {**state, "bank": rows}
        older = previous_of(path)
        if self.config.resume != "auto" or not older.exists():
            raise damage
        with dist.first_process_first(self.process):
            state = load_checkpoint(older, "train", mapped=True)
        self._check_same_run(state, older)
        rows, damage_too = self._find_damage(state["bank"], older)
        if damage_too is not None:
            raise damage
        if self.is_main:
            set_aside(path)
            LOGGER.warning(f"{damage}; it is set aside ({path.name}.damaged), {older} is used")
        return {**state, "bank": rows}

    def _find_damage(self, entry: Any, path: Path) -> tuple[Any, UserError | None]:
        """The rows of a checkpoint, of which all processes read a part; all know what one finds."""
        rows: Any = None
        damage: UserError | None = None
        try:
            rows = open_rows(entry, path)
            if isinstance(rows, StoredRows):
                damage = rows.find_damage(self.process.rank, self.process.world_size)
        except DamagedFile as error:
            damage = error
        if dist.agree(damage is not None) and damage is None:
            damage = UserError(f"{path}: another process found its rows to be damaged")
        return rows, damage

    def _load_state(self, path: Path) -> dict[str, Any] | None:
        if self.config.resume == "never":
            if path.exists():
                raise UserError(
                    f"{self.output} holds a run: choose another --output, or --overwrite"
                )
            return None
        # With a sharded bank no process wants all rows in its memory: they stay in the file.
        mapped = self.config.bank_placement == "sharded"
        if self.config.resume == "auto":
            return load_last(path, "train", mapped=mapped)
        return load_checkpoint(path, "train", mapped=mapped)

    def _delete_run(self) -> None:
        if self.output.exists() and any(self.output.glob("[!.]*")):
            if not (self.output / "config.json").exists():
                raise UserError(
                    f"{self.output} is not a run folder, so --overwrite leaves it alone"
                )
            empty_folder(self.output)

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
        # Checkpoints without the word are of the time when every run drew sequences.
        theirs_drawn, ours_drawn = state.get("draws", "sequence"), draws_of(len(self.train))
        if theirs_drawn != ours_drawn:
            raise UserError(
                f"{path} has drawn order and noise by {theirs_drawn}, and this version draws those "
                f"of {len(self.train):,} images by {ours_drawn}: go on with the version that began "
                f"it (see provenance.json), or {remedy}"
            )

    def open_folder(self) -> None:
        """Writes config.json and starts log.txt; call when all arguments have been checked."""
        setup_logging(self.output / "log.txt", is_main=self.is_main)
        if self.is_main:
            write_json(self.output / "config.json", to_dict(self.config))
            write_json(self.output / "provenance.json", provenance())
            for name in self.train.skipped:
                self.record_bad_image(f"{name} is not a readable image")
        _ = self.val  # report what is wrong with it now, not after an epoch

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

"""Where linear probes get their features: stored rows, or images through the frozen network."""

import shutil
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from instdisc.errors import UserError
from instdisc.features.extract import extract_features
from instdisc.features.store import FeatureStore, unreadable
from instdisc.images.loading import Samples
from instdisc.images.sets import ImageSet
from instdisc.images.transforms import eval_transform, finetune_transform
from instdisc.names import Precision
from instdisc.runs.folders import runs_root
from instdisc.runs.log import LOGGER
from instdisc.training.dist import agree
from transfer.probing.pooled import StageFeatures, pooled_extractor
from transfer.probing.settings import LinearConfig
from transfer.probing.svm import ProbesOn
from transfer.task import Task


def choose_precision(config: LinearConfig, features: StageFeatures) -> Precision:
    """What was asked for; else half for feature maps, which are large, and what kNN has stored."""
    return config.precision or ("half" if features.maps else "float32")


class Source(Protocol):
    """What the probes see of a set of images."""

    is_stored: bool

    def readable(self, images: ImageSet) -> ImageSet:
        """The images that have features."""

    def samples(self, images: ImageSet, *, training: bool) -> Dataset[Any]:
        """Inputs of `build_model`'s model, by the places in `images`."""

    def rows(self, images: ImageSet) -> Tensor:
        """All stages of all images side by side, `(N, sum of D)`."""

    def build_model(self, probes: nn.Module) -> ProbesOn:
        """Probes behind what turns an input into features."""


class StoredRows(Dataset[tuple[Tensor, int, str]]):
    """Rows of a table: key (epoch, index) -> (row, index, no error)."""

    def __init__(self, table: Tensor, places: np.ndarray) -> None:
        self.table, self.places = table, places

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int, str]:
        return self.table[int(self.places[key[1]])], key[1], ""


class StoredSource:
    """Features of whole splits, computed in one pass over the images and kept on disk."""

    is_stored = True

    def __init__(self, task: Task, config: LinearConfig, features: StageFeatures) -> None:
        self.features = features
        precision = choose_precision(config, features)
        self.extractor = pooled_extractor(features, precision)
        self.store = FeatureStore(
            task.weights_hash,
            task.weights.spec,
            task.process,
            batch_size=config.batch_size,
            workers=config.workers,
            precision=precision,
            skip_bad=config.skip_bad_images,
        )
        self.tables: dict[str, tuple[Tensor, np.ndarray]] = {}

    def readable(self, images: ImageSet) -> ImageSet:
        """All images of a split but the unreadable ones; computes the features of the split."""
        stored = self.store.load(self.extractor, images)
        LOGGER.info(f"pooled features of {images.split}: {stored.origin}")
        self.tables[images.split] = (stored.rows, images.names)
        if not len(stored.bad):
            return images
        LOGGER.warning(f"left out: {unreadable(images, stored.bad)}")
        return images.subset(np.delete(np.arange(len(images)), stored.bad))

    def samples(self, images: ImageSet, *, training: bool) -> StoredRows:
        """The rows of a part of a split that `readable` has gone through."""
        table, names = self.tables[images.split]
        places = np.searchsorted(names, images.names)  # image sets are sorted
        assert (names[places] == images.names).all(), "images without features"
        return StoredRows(table, places)

    def rows(self, images: ImageSet) -> Tensor:
        """Rows in the precision of the store."""
        samples = self.samples(images, training=False)
        return samples.table[torch.from_numpy(samples.places)]

    def build_model(self, probes: nn.Module) -> ProbesOn:
        """Probes on the parts of a row."""
        return ProbesOn(self.features.split, probes)


class StreamedSource:
    """Images, which go through the frozen network once per batch for all probes."""

    is_stored = False

    def __init__(self, task: Task, config: LinearConfig, features: StageFeatures) -> None:
        self.task, self.config, self.features = task, config, features

    def readable(self, images: ImageSet) -> ImageSet:
        """All images; an unreadable one ends the run when it is met."""
        return images

    def samples(self, images: ImageSet, *, training: bool) -> Samples:
        """Images as tensors: centre crops, unless training is to augment them."""
        spec = self.task.weights.spec
        augment = self.config.augment if training else "off"
        if augment == "off":
            return Samples(images, eval_transform(spec), spec, self.config.seed)
        view = finetune_transform(spec, colors=augment == "colors")
        return Samples(images, view, spec, self.config.seed)

    def rows(self, images: ImageSet) -> Tensor:
        """Rows of the centre crops."""
        return extract_features(
            pooled_extractor(self.features, "float32"),
            images,
            self.task.weights.spec,
            self.task.process,
            batch_size=self.config.batch_size,
            workers=self.config.workers,
            title="statistics",
        )

    def build_model(self, probes: nn.Module) -> ProbesOn:
        """The frozen network and the probes."""
        return ProbesOn(self.features, probes)


def build_source(
    task: Task, config: LinearConfig, features: StageFeatures, num_images: int
) -> StoredSource | StreamedSource:
    """Stored features, if wanted and if they fit."""
    width = sum(features.widths.values())
    size = num_images * width * (2 if choose_precision(config, features) == "half" else 4) / 1e9
    if config.augment != "off" or config.cache == "off":
        return StreamedSource(task, config, features)
    root = runs_root()
    root.mkdir(parents=True, exist_ok=True)
    room = shutil.disk_usage(root).free / 1e9
    fits = size < config.cache_gb and size < 0.9 * room
    # All processes must take the same way, and they may see different disks.
    if not agree(not fits):
        return StoredSource(task, config, features)
    reason = (
        f"{size:,.1f} GB of pooled features ({room:,.0f} GB free, --cache-gb {config.cache_gb:g})"
    )
    if config.cache == "on" or config.solver == "liblinear":
        raise UserError(f"no room for {reason}: raise --cache-gb, free space, or stream with sgd")
    LOGGER.info(f"{reason}: streaming the images instead")
    return StreamedSource(task, config, features)

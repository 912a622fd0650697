"""Features with their classes, ready for a neighbour search."""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from instdisc.errors import UserError
from instdisc.features.extract import build_extractor
from instdisc.features.store import FeatureStore, StoredFeatures, unreadable
from instdisc.images.sets import ImageSet
from instdisc.runs.log import LOGGER
from transfer.nearest.settings import KnnConfig, RetrieveConfig
from transfer.task import Task


@dataclasses.dataclass(frozen=True)
class LabelledRows:
    """Features with their classes: rows `(N, D)`, labels `(N,)`, and the images they are of."""

    rows: Tensor
    labels: Tensor
    images: ImageSet


def build_store(task: Task, config: KnnConfig | RetrieveConfig) -> FeatureStore:
    """The stored features of a task's network."""
    return FeatureStore(
        task.weights_hash,
        task.weights.spec,
        task.process,
        batch_size=config.batch_size,
        workers=config.workers,
        precision=config.precision,
        skip_bad=config.skip_bad_images,
    )


def load_rows(task: Task, store: FeatureStore, name: str, images: ImageSet) -> LabelledRows:
    """Features of that name of all readable images, computed if they are not stored yet."""
    stored = store.load(build_extractor(task.weights, name), images)
    LOGGER.info(f"{name} of {images.split}: {stored.origin}")
    return drop_bad(stored, images)


def drop_bad(stored: StoredFeatures, images: ImageSet) -> LabelledRows:
    """Features and labels of the readable images; all of them, without a copy, as a rule."""
    labels = torch.from_numpy(images.labels)
    if not len(stored.bad):
        return LabelledRows(stored.rows, labels, images)
    LOGGER.warning(f"left out: {unreadable(images, stored.bad)}")
    kept = np.delete(np.arange(len(images)), stored.bad)
    if not len(kept):
        raise UserError(f"no image of {images.root} can be read: name another folder")
    return LabelledRows(stored.rows[kept], labels[kept], images.subset(kept))


def to_device(bank: Tensor, device: torch.device) -> Tensor:
    """The bank on the GPU if it leaves room there for the search; else where it is."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if bank.nbytes > 0.7 * free:
            LOGGER.info(f"{bank.nbytes / 1e9:.1f} GB of features do not fit the GPU: using the CPU")
            return bank
    return bank.to(device)

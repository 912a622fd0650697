"""Features of every image of a data set, row by row with the names: for use outside this suite."""

import csv
import dataclasses
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from instdisc.errors import UserError
from instdisc.features.extract import build_extractor
from instdisc.features.store import FeatureStore, unreadable
from instdisc.images.locations import locate_data
from instdisc.images.sets import ImageSet, Split, has_split, load_images
from instdisc.networks.weights import Weights, open_weights
from instdisc.runs.folders import atomic_file
from instdisc.runs.log import LOGGER
from instdisc.training.dist import Process

SPLITS: tuple[Split, ...] = ("train", "val")


@dataclasses.dataclass(frozen=True)
class Embedded:
    """Features, and what each row is of.

    Attributes:
        features: `(N, D)`, float32 or float16; memory-mapped where one table holds them all.
        names: the image of each row: its path, or its record's name in an archive.
        splits: `train` or `val`, by row.
        classes: the name of its class, by row; empty where the images have none.
    """

    features: np.ndarray
    names: list[str]
    splits: list[str]
    classes: list[str]

    def save(self, path: Path) -> tuple[Path, Path]:
        """Writes PATH.npy and PATH.csv, each whole or not at all; returns both."""
        table, listing = paths_of(path)
        with atomic_file(table) as file:
            np.lib.format.write_array(file, self.features, allow_pickle=False)
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow(("image", "split", "class"))
        rows.writerows(zip(self.names, self.splits, self.classes, strict=True))
        with atomic_file(listing) as file:
            # A file's name may be no text: what is not is spelt out.
            file.write(text.getvalue().encode("utf-8", "backslashreplace"))
        return table, listing


def paths_of(path: Path) -> tuple[Path, Path]:
    """PATH.npy and PATH.csv."""
    return path.with_name(f"{path.name}.npy"), path.with_name(f"{path.name}.csv")


def embed_sets(
    weights: Weights,
    sets: Sequence[ImageSet],
    store: FeatureStore,
    *,
    features: str,
    normalize: bool,
) -> Embedded:
    """Features of all readable images of several sets, computed as far as they are not stored.

    Args:
        weights: the network, on the device of the store's process.
        sets: the images.
        store: where features are kept.
        features: backbone, embedding, or a stage, averaged over its map.
        normalize: give every row length one; else rows are what the network gives.
    """
    extractor = build_extractor(weights, features)
    if not normalize:
        what = f"{extractor.what}, not normalised"
        extractor = dataclasses.replace(extractor, what=what, unit=False)
    tables, found = [], []
    for images in sets:
        stored = store.load(extractor, images)
        LOGGER.info(f"{features} of {images.split}: {stored.origin}")
        table = stored.table
        if len(stored.bad):
            LOGGER.warning(f"left out: {unreadable(images, stored.bad)}")
            kept = np.delete(np.arange(len(images)), stored.bad)
            table, images = table[kept], images.subset(kept)
        tables.append(table)
        found.append(images)
    if not any(map(len, tables)):
        raise UserError(f"no image of {sets[0].root} can be read: name another folder")
    return Embedded(
        features=tables[0] if len(tables) == 1 else np.concatenate(tables),
        names=[images.name(row) for images in found for row in range(len(images))],
        splits=[images.split for images in found for _ in range(len(images))],
        classes=[images.classes[label] for images in found for label in images.labels],
    )


def embed(
    data: str | Path,
    weights: str | Path | None = None,
    *,
    features: str = "backbone",
    normalize: bool = False,
    batch_size: int = 256,
    workers: int = 0,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    skip_bad: bool = False,
) -> Embedded:
    """Features of every image of a data set, as transfer/embed.py writes them.

    They are kept in the runs folder: what was computed once, or before an interruption, is read.

    Args:
        data: what `--data` takes.
        weights: what `--weights` takes; None for the newest run.
        features: backbone, embedding, or one of the network's stages.
        normalize: give every row length one.
        batch_size: images per forward pass.
        workers: loader processes.
        device: where to compute.
        skip_bad: leave unreadable images out, instead of refusing.
    """
    network = open_weights(weights)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    process = Process(0, 1, torch.device(device))
    network.to(process.device)
    location = locate_data(str(data), flag="data")
    sets = [load_images(location, s, skip_bad=skip_bad) for s in SPLITS if has_split(location, s)]
    store = FeatureStore(
        network.hash,
        network.spec,
        process,
        batch_size=batch_size,
        workers=workers,
        skip_bad=skip_bad,
    )
    return embed_sets(network, sets, store, features=features, normalize=normalize)

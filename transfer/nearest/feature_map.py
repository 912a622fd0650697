"""A map of features: t-SNE of some images, each with a thumbnail. Imports no torch.

A task that has features writes it into its run folder; pages show it.
"""

import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from instdisc.runs.folders import atomic_file, write_text

TILE = 40  # pixels of a thumbnail
FORMAT = "instdisc/feature-map/1"
FILE, SHEET = "map.json", "map.jpg"
FEWEST = 5  # images; t-SNE of fewer says nothing
COLOURS = 10  # classes that have one; the largest
SEED = 0


@dataclasses.dataclass(frozen=True)
class Group:
    """The images of one class: where they are, and which thumbnails are theirs.

    Attributes:
        name: of the class.
        colour: 0 to COLOURS - 1; None for a class that shares the neutral one.
        points: x and y in 0 to 1, and the number of the thumbnail.
    """

    name: str
    colour: int | None
    points: Sequence[tuple[float, float, int]]


@dataclasses.dataclass(frozen=True)
class FeatureMap:
    """Points in the plane, their classes, and a sheet of thumbnails in the same order.

    Attributes:
        title: what it shows.
        points: x and y in 0 to 1, `(N, 2)`.
        labels: classes `(N,)`, numbers of `classes`.
        classes: their names.
        sheet: a JPEG of square thumbnails, `columns` to a row.
    """

    title: str
    points: np.ndarray
    labels: np.ndarray
    classes: Sequence[str]
    sheet: bytes

    tile = TILE

    @property
    def columns(self) -> int:
        """Thumbnails in a row of the sheet."""
        return count_columns(len(self.points))

    @property
    def groups(self) -> list[Group]:
        """Images by class, the largest classes first."""
        counts = np.bincount(self.labels, minlength=len(self.classes))
        order = [int(label) for label in np.argsort(-counts, kind="stable") if counts[label]]
        return [
            Group(
                self.classes[label],
                place if place < COLOURS else None,
                [(*self.points[i].tolist(), int(i)) for i in np.flatnonzero(self.labels == label)],
            )
            for place, label in enumerate(order)
        ]

    def save(self, folder: Path) -> None:
        """Writes both files, each whole or not at all."""
        stored = {
            "format": FORMAT,
            "title": self.title,
            "classes": list(self.classes),
            "points": np.round(self.points, 4).tolist(),
            "labels": self.labels.tolist(),
        }
        with atomic_file(folder / SHEET) as file:
            file.write(self.sheet)
        write_text(folder / FILE, json.dumps(stored) + "\n")


def load_map(file: Path) -> FeatureMap | None:
    """What `save` wrote; None where the files are missing, damaged, or somebody else's."""
    try:
        stored: dict[str, Any] = json.loads(file.read_text("utf-8"))
        if stored["format"] != FORMAT:
            return None
        points, labels = np.array(stored["points"], float), np.array(stored["labels"], int)
        classes, title = [str(name) for name in stored["classes"]], str(stored["title"])
        sheet = file.with_name(SHEET).read_bytes()
        with Image.open(io.BytesIO(sheet)) as image:
            width = image.width
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    whole = points.shape == (len(labels), 2) and len(labels) > 1 and len(classes) > 0
    if not whole or not ((points >= 0) & (points <= 1)).all() or sheet[:2] != b"\xff\xd8":
        return None
    known = labels.min() >= 0 and labels.max() < len(classes)
    if not known or width != TILE * count_columns(len(labels)):
        return None
    return FeatureMap(title, points, labels, classes, sheet)


def count_columns(count: int) -> int:
    """Of a sheet of so many thumbnails: about a square."""
    return int(np.ceil(np.sqrt(count)))


def choose(count: int, most: int) -> np.ndarray:
    """At most `most` of `count` images, drawn once for all networks, in order."""
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng(SEED).permutation(count)[:most])


def to_plane(features: np.ndarray) -> np.ndarray:
    """t-SNE by cosine of features `(N, D)`; x and y in 0 to 1, `(N, 2)`."""
    from sklearn.manifold import TSNE  # heavy to import

    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    perplexity = min(30.0, (len(unit) - 1) / 3)
    found = TSNE(perplexity=perplexity, init="pca", random_state=SEED).fit_transform(unit)
    low, high = found.min(axis=0), found.max(axis=0)
    return (found - low) / np.maximum(high - low, 1e-12)


def draw_sheet(images: Sequence[Image.Image]) -> bytes:
    """Thumbnails side by side, as a JPEG."""
    columns = count_columns(len(images))
    sheet = Image.new("RGB", (columns * TILE, -(-len(images) // columns) * TILE))
    for number, image in enumerate(images):
        tile = ImageOps.fit(image.convert("RGB"), (TILE, TILE), Image.Resampling.BILINEAR)
        sheet.paste(tile, (number % columns * TILE, number // columns * TILE))
    file = io.BytesIO()
    sheet.save(file, "JPEG", quality=75)
    return file.getvalue()


def make_map(
    title: str,
    features: np.ndarray,
    images: Sequence[Image.Image],
    labels: np.ndarray,
    classes: Sequence[str],
) -> FeatureMap:
    """The map of images whose features `(N, D)` are known."""
    points = to_plane(features)
    return FeatureMap(title, points, labels.astype(int), list(classes), draw_sheet(images))

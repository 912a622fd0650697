"""The embedded images: ten kinds of object drawn on the spot, so that every command runs offline.

Class is carried by shape and structure alone: place, size, turn, proportions, colours, polarity,
light and background vary independently of it. Light and background vary mildly, or else instance
discrimination (section 3 of the paper) would know the images by them and ignore the objects.

Per-pixel arithmetic keeps to + - * /, sqrt and comparisons, which IEEE 754 rounds alike everywhere;
sines and cosines are rounded before use. No reduction over floats, no matmul, no normal variates.
"""

import hashlib
import json
import math
import shutil
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from instdisc.errors import UserError

DEMO_VERSION = "v1"  # part of the folder names and of every seed: change it when pixels change
IMAGE_SIZE, SCENE_WIDTH, SCENE_HEIGHT = 72, 160, 120
_MIN_VISIBLE, _HIDDEN, _WHOLE = 0.2, 0.45, 0.97  # visible: less is unpainted, difficult, truncated
_DULL, _VIVID = (0.0, 0.25), (0.5, 0.8)  # saturation of backgrounds and of objects
_PAD = 36  # no object reaches further than this out of its picture

Plane = NDArray[np.float64]
Size = tuple[int, int]
Rng = np.random.Generator


class SceneObject(NamedTuple):
    """One annotated object; the box is 1-based and inclusive, as in VOC."""

    name: str
    box: tuple[int, ...]  # xmin, ymin, xmax, ymax
    visible: float  # share of its area that is in the picture and not covered
    mask: NDArray[np.bool_]  # (H, W), the visible pixels


def _rng(*key: object) -> Rng:
    """One generator per image, so that no image depends on which others were made before it."""
    digest = hashlib.sha256("/".join(map(str, (DEMO_VERSION, *key))).encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little")))


def _uniform(rng: Rng, low: float, high: float) -> float:
    return low + (high - low) * rng.random()


def _length(x: Plane, y: Plane) -> Plane:
    return np.sqrt(x * x + y * y)


def _box(x: Plane, y: Plane, half_width: float, half_height: float) -> Plane:
    return np.maximum(np.abs(x) - half_width, np.abs(y) - half_height)


def _repeat(t: Plane, step: float) -> Plane:
    """Distance to the nearest of three lines at -step, 0 and step."""
    return np.abs(t - np.clip(np.rint(t / step), -1, 1) * step)


def _half_planes(x: Plane, y: Plane, count: int, inradius: float) -> Plane:
    angles = [2 * math.pi * i / count for i in range(count)]
    normals = [(round(math.sin(a), 6), round(math.cos(a), 6)) for a in angles]
    return np.stack([x * s + y * c - inradius for s, c in normals])


# Signed distance to each kind's outline, negative inside, in units of its radius. A star's points
# lie outside at most one of five half planes; 0.743 = 1 / sqrt(1 + 0.9^2) undoes a chevron's slant.
_SHAPES: dict[str, Callable[[Plane, Plane], Plane]] = {
    "bars": lambda x, y: np.maximum(_repeat(y, 0.52) - 0.14, np.abs(x) - 0.8),
    "chevron": lambda x, y: np.maximum(
        (_repeat(y + np.abs(x) * 0.9 - 0.4, 0.56) - 0.15) * 0.743, np.abs(x) - 0.75
    ),
    "crescent": lambda x, y: np.maximum(_length(x, y) - 0.95, 0.7 - _length(x - 0.42, y)),
    "cross": lambda x, y: np.minimum(_box(x, y, 0.95, 0.26), _box(x, y, 0.26, 0.95)),
    "disc": lambda x, y: _length(x, y) - 0.9,
    "dots": lambda x, y: _length(_repeat(x, 0.58), _repeat(y, 0.58)) - 0.2,
    "lattice": lambda x, y: np.maximum(
        np.minimum(_repeat(x, 0.6), _repeat(y, 0.6)) - 0.12, _box(x, y, 0.72, 0.72)
    ),
    "ring": lambda x, y: np.abs(np.abs(_length(x, y) - 0.54) - 0.24) - 0.145,
    "star": lambda x, y: np.sort(_half_planes(x, y, 5, 0.32), axis=0)[-2],
    "triangle": lambda x, y: _half_planes(x, y, 3, 0.48).max(axis=0),
}
CLASS_NAMES = tuple(_SHAPES)


@lru_cache(maxsize=4)
def _grid(height: int, width: int) -> tuple[Plane, Plane]:
    rows, columns = np.mgrid[0:height, 0:width]
    return columns + 0.5, rows + 0.5


def _coverage(rng: Rng, name: str, size: Size, x: float, y: float, r: float) -> Plane:
    """Share of each pixel that the object covers, (H, W), at a random turn, stretch and weight."""
    turn = _uniform(rng, 0, 2 * math.pi)
    cos, sin = round(math.cos(turn), 6), round(math.sin(turn), 6)
    stretch, weight = _uniform(rng, 0.85, 1.15), _uniform(rng, -0.04, 0.04)
    columns, rows = _grid(*size)
    dx, dy = (columns - x) / r, (rows - y) / r
    distance = _SHAPES[name]((cos * dx + sin * dy) * stretch, (cos * dy - sin * dx) / stretch)
    return np.clip(0.5 - (distance - weight) * r, 0, 1)


def _colour(rng: Rng, luminance: float, saturation: tuple[float, float]) -> Plane:
    """A random hue at about the given luminance, (3, 1, 1)."""
    hue, strength = _uniform(rng, 0, 6), _uniform(rng, *saturation)
    pure = [min(max(2 - abs((hue - shift + 3) % 6 - 3), 0.0), 1.0) for shift in (0, 4, 2)]
    red, green, blue = rgb = [1 - strength + strength * part for part in pure]
    gain = luminance / (0.3 * red + 0.59 * green + 0.11 * blue)
    return np.array([min(c * gain, 1.0) for c in rgb]).reshape(3, 1, 1)


def _smooth(rng: Rng, cells: int, size: tuple[int, ...]) -> Plane:
    """Random values in [0, 1) on a coarse grid, interpolated bilinearly to (H, W)."""
    values = rng.random((cells, cells))
    for n in size:  # along one axis, then, transposed, along the other
        at = (np.arange(n) + 0.5) * (cells - 1) / n
        low = at.astype(np.intp)
        values = (values[low] + (values[low + 1] - values[low]) * (at - low)[:, None]).T
    return values


def _two_tone(rng: Rng, luminance: float, saturation: tuple[float, float], size: Size) -> Plane:
    first, second = _colour(rng, luminance, saturation), _colour(rng, luminance, saturation)
    return first + (second - first) * _smooth(rng, 2, size) * 0.55


def _background(rng: Rng, luminance: float, size: Size) -> Plane:
    """A faint two-colour gradient with a little cloud and a few specks."""
    image = _two_tone(rng, luminance, _DULL, size)
    image += (_smooth(rng, int(rng.integers(3, 9)), size) - 0.5) * _uniform(rng, 0, 0.08)
    columns, rows = _grid(*size)
    for _ in range(int(rng.integers(0, 5))):
        r = _uniform(rng, 0.03, 0.07) * min(size)
        dx, dy = columns - _uniform(rng, 0, size[1]), rows - _uniform(rng, 0, size[0])
        shade = min(max(luminance + _uniform(rng, -0.15, 0.15), 0.1), 0.9)
        share = np.clip(0.5 - (_length(dx, dy) - r), 0, 1)
        image += (_colour(rng, shade, _DULL) - image) * share
    return image


def _develop(rng: Rng, image: Plane) -> NDArray[np.uint8]:
    """Uneven light and sensor noise, then 8 bits: (3, H, W) to (H, W, 3)."""
    light = 1 + (_smooth(rng, 2, image.shape[1:]) - 0.5) * _uniform(rng, 0, 0.3)
    noise = rng.integers(-3, 4, size=image.shape) * rng.random()
    levels = np.clip(np.floor(image * light * 255 + noise + 0.5), 0, 255)
    return np.ascontiguousarray(levels.astype(np.uint8).transpose(1, 2, 0))


def _luminances(rng: Rng) -> tuple[float, float]:
    """Of background and object: well apart, either of them the lighter one."""
    contrast = _uniform(rng, 0.4, 0.55)
    low = _uniform(rng, 0.12, 0.88 - contrast)
    return (low, low + contrast) if rng.random() < 0.5 else (low + contrast, low)


def _paint_image(split: str, name: str, number: int) -> NDArray[np.uint8]:
    """One classification image, (72, 72, 3)."""
    rng = _rng("classification", split, name, number)
    size = IMAGE_SIZE, IMAGE_SIZE
    behind, front = _luminances(rng)
    image = _background(rng, behind, size)
    r = _uniform(rng, 0.55, 0.95) * IMAGE_SIZE / 2
    slack = max(IMAGE_SIZE / 2 - 0.9 * r, 0.0)
    x, y = (IMAGE_SIZE / 2 + _uniform(rng, -slack, slack) for _ in range(2))
    share = _coverage(rng, name, size, x, y, r)
    return _develop(rng, image + (_two_tone(rng, front, _VIVID, size) - image) * share)


def _paint_scene(split: str, number: int) -> tuple[NDArray[np.uint8], list[SceneObject]]:
    """One detection image, (120, 160, 3), and its objects from back to front."""
    rng = _rng("detection", split, number)
    size = SCENE_HEIGHT, SCENE_WIDTH
    behind, front = _luminances(rng)
    image = _background(rng, behind, size)
    padded = SCENE_HEIGHT + 2 * _PAD, SCENE_WIDTH + 2 * _PAD
    names: list[str] = []
    areas: list[int] = []
    shown: list[Plane] = []  # how much of each pixel each object still covers, (H, W)
    for turn in range(int(rng.integers(1, 5))):
        # The first object runs through the classes in order: a small set still has them all.
        index = number if turn == 0 else int(rng.integers(len(CLASS_NAMES)))
        name = CLASS_NAMES[index % len(CLASS_NAMES)]
        r = _uniform(rng, 16, 38)
        x, y = (_uniform(rng, 0.6 * r, n - 0.6 * r) for n in (SCENE_WIDTH, SCENE_HEIGHT))
        wide = _coverage(rng, name, padded, x + _PAD, y + _PAD, r)
        share = wide[_PAD:-_PAD, _PAD:-_PAD]
        paint = _two_tone(rng, front + (front - behind) * _uniform(rng, -0.15, 0.1), _VIVID, size)
        uncovered = [*(plane * (1 - share) for plane in shown), share]
        area = int((wide >= 0.5).sum())
        needed = [_MIN_VISIBLE * n for n in (*areas, area)]
        if any((p >= 0.5).sum() < n for p, n in zip(uncovered, needed, strict=True)):
            continue  # it would hide another object, or hardly be in the picture
        names, areas, shown = [*names, name], [*areas, area], uncovered
        image += (paint - image) * share
    objects = []
    for name, area, plane in zip(names, areas, shown, strict=True):
        rows, columns = (plane >= 0.5).nonzero()
        box = tuple(int(e) + 1 for e in (columns.min(), rows.min(), columns.max(), rows.max()))
        objects.append(SceneObject(name, box, len(rows) / area, plane >= 0.5))
    return _develop(rng, image), objects


def _annotation(image_id: str, objects: list[SceneObject]) -> bytes:
    """The VOC XML of one image."""
    root = ET.Element("annotation")

    def add(parent: ET.Element, **fields: object) -> None:
        for tag, value in fields.items():
            ET.SubElement(parent, tag).text = str(value)

    add(root, folder="VOC2007", filename=f"{image_id}.jpg")
    add(ET.SubElement(root, "source"), database="instdisc demo", annotation="drawn", image="drawn")
    add(ET.SubElement(root, "size"), width=SCENE_WIDTH, height=SCENE_HEIGHT, depth=3)
    add(root, segmented=0)
    for thing in objects:
        node = ET.SubElement(root, "object")
        add(node, name=thing.name, pose="Unspecified")
        add(node, truncated=int(thing.visible < _WHOLE), difficult=int(thing.visible < _HIDDEN))
        corners = zip(("xmin", "ymin", "xmax", "ymax"), thing.box, strict=True)
        add(ET.SubElement(node, "bndbox"), **dict(corners))
    ET.indent(root, "\t")
    return ET.tostring(root) + b"\n"


def _publish(root: Path, name: str, build: Callable[[Path], None]) -> Path:
    """Builds in a scratch folder beside the target and renames: the target is whole or absent."""
    target = root / name
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    except OSError as error:
        raise UserError(
            f"cannot write to {root} ({error.strerror}): name another folder"
        ) from error
    try:
        build(scratch / name)  # one level down: mkdtemp's own folder is closed to other users
        try:
            (scratch / name).rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process was first, with the same pixels
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _folder_name(kind: str, counts: tuple[int, int], usual: tuple[int, int]) -> str:
    return f"{kind}-{DEMO_VERSION}" + ("" if counts == usual else f"-{counts[0]}x{counts[1]}")


def write_classification(
    root: Path, *, train_per_class: int = 200, val_per_class: int = 40
) -> Path:
    """Makes the image folder `{train,val}/<class>/<id>.png` under root unless it is there."""
    counts = train_per_class, val_per_class

    def build(folder: Path) -> None:
        for split, count in zip(("train", "val"), counts, strict=True):
            for name in CLASS_NAMES:
                (folder / split / name).mkdir(parents=True)
                for i in range(count):
                    path = folder / split / name / f"{name}_{i:04d}.png"
                    Image.fromarray(_paint_image(split, name, i)).save(path, compress_level=1)

    return _publish(root, _folder_name("classification", counts, (200, 40)), build)


def write_detection(root: Path, *, num_trainval: int = 160, num_test: int = 60) -> Path:
    """Makes a VOC devkit, `VOC2007/{JPEGImages,Annotations,ImageSets/Main}`, unless it is there."""
    counts = num_trainval, num_test

    def build(folder: Path) -> None:
        base = folder / "VOC2007"
        images, notes, lists = base / "JPEGImages", base / "Annotations", base / "ImageSets/Main"
        for part in (images, notes, lists):
            part.mkdir(parents=True)
        for split, count, start in zip(
            ("trainval", "test"), counts, (1, 1 + counts[0]), strict=True
        ):
            ids = [f"{start + i:06d}" for i in range(count)]
            for i, image_id in enumerate(ids):
                pixels, objects = _paint_scene(split, i)
                Image.fromarray(pixels).save(images / f"{image_id}.jpg", quality=95)
                (notes / f"{image_id}.xml").write_bytes(_annotation(image_id, objects))
            (lists / f"{split}.txt").write_text("".join(f"{image_id}\n" for image_id in ids))

    return _publish(root, _folder_name("detection", counts, (160, 60)), build)


def _run_lengths(mask: NDArray[np.bool_]) -> list[int]:
    """Lengths of the runs of 0, 1, 0, ... down the columns, as COCO writes masks."""
    pixels = mask.T.ravel()
    changes = np.flatnonzero(np.diff(pixels, prepend=False))
    return np.diff(np.concatenate([[0], changes, [pixels.size]])).tolist()


def write_segmentation(root: Path, *, num_train: int = 160, num_val: int = 60) -> Path:
    """Makes the same scenes with masks, in COCO's layout and format, unless they are there."""
    counts = num_train, num_val

    def build(folder: Path) -> None:
        (folder / "annotations").mkdir(parents=True)
        for part, split, count in zip(("train", "val"), ("trainval", "test"), counts, strict=True):
            images: list[dict[str, object]] = []
            annotations: list[dict[str, object]] = []
            (folder / f"{part}2017").mkdir()
            for i in range(count):
                pixels, objects = _paint_scene(split, i)
                name = f"{i + 1:012d}.jpg"
                Image.fromarray(pixels).save(folder / f"{part}2017" / name, quality=95)
                size = {"height": SCENE_HEIGHT, "width": SCENE_WIDTH}
                images.append({"id": i + 1, "file_name": name, **size})
                for thing in objects:
                    x1, y1, x2, y2 = thing.box
                    annotations.append(
                        {
                            "id": len(annotations) + 1,
                            "image_id": i + 1,
                            "category_id": CLASS_NAMES.index(thing.name) + 1,
                            "iscrowd": 0,
                            "bbox": [x1 - 1, y1 - 1, x2 - x1 + 1, y2 - y1 + 1],
                            "area": int(thing.mask.sum()),
                            "segmentation": {
                                "size": [SCENE_HEIGHT, SCENE_WIDTH],
                                "counts": _run_lengths(thing.mask),
                            },
                        }
                    )
            categories = [{"id": i + 1, "name": name} for i, name in enumerate(CLASS_NAMES)]
            content = {"images": images, "annotations": annotations, "categories": categories}
            file = folder / "annotations" / f"instances_{part}2017.json"
            file.write_text(json.dumps(content) + "\n", encoding="utf-8")

    return _publish(root, _folder_name("segmentation", counts, (160, 60)), build)

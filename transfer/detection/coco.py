"""Data sets in COCO's format: reading and validating instances_*.json.

    ROOT/annotations/instances_train2017.json, instances_val2017.json
    ROOT/train2017/000000000009.jpg, val2017/...

or any other file of that format, with its own classes. Boxes stay as the file has them, (x, y,
width, height); Detectron2's mapper clips them to the image, since official ones leave it by a
fraction of a pixel. Run lengths of masks are decoded and added up here: pycocotools, which is C,
trusts them. Nothing here imports detectron2.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask as mask_tools

from instdisc.errors import UserError

XYWH_ABS = 1  # the value of detectron2.structures.BoxMode.XYWH_ABS, an IntEnum
MAX_BYTES = 2 << 30  # of a file; instances_train2017.json has 0.45e9
MAX_ID = 2**53  # pycocotools keeps ids as floats
MAX_SIDE = 65_535  # of an image, as in JPEG
MIN_NUMBERS = 6  # of a polygon: three points
MAX_DIGITS = 7  # of one run length in a compressed mask: 35 bits
Record = dict[str, Any]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class CocoSplit:
    """One annotation file and its images.

    Attributes:
        file: the JSON.
        images: the folder that `file_name` is relative to.
        name: what result rows call it.
    """

    file: Path
    images: Path
    name: str


@dataclass(frozen=True)
class CocoContent:
    """What a file holds, checked.

    Attributes:
        records: an image each, in Detectron2's spelling, by rising image id.
        categories: (id, name) by rising id; a class's position is its `category_id` in records.
        fingerprint: SHA-256 of the file.
    """

    records: list[Record]
    categories: tuple[tuple[int, str], ...]
    fingerprint: str


def read_coco(split: CocoSplit, *, with_masks: bool) -> CocoContent:
    """Reads and validates a file; every image must be there.

    Args:
        split: the file and its images.
        with_masks: whether each object must have a mask; otherwise masks are not looked at.
    """
    where = split.file
    content, digest = _parse(where)
    categories = _categories(content["categories"], where)
    contiguous = {number: place for place, (number, _) in enumerate(categories)}
    records = {record["image_id"]: record for record in _images(content["images"], split)}
    for position, entry in enumerate(content["annotations"], start=1):
        shown = f"{where}: annotation {position}"
        if not isinstance(entry, dict):
            raise UserError(f"{shown} is not an object: expected image_id, category_id, bbox, ...")
        image_id, category = entry.get("image_id"), entry.get("category_id")
        if not _is_id(image_id) or image_id not in records:
            raise UserError(f"{shown} has image_id {_brief(image_id)}, which no image of it has")
        if not _is_id(category) or category not in contiguous:
            raise UserError(
                f"{shown} has category_id {_brief(category)}, which is none of its "
                f"{len(categories)} categories: is it of another data set?"
            )
        record = records[image_id]
        height, width = record["height"], record["width"]
        box = _box(entry.get("bbox"), shown, width, height)
        crowd = entry.get("iscrowd", 0)
        if crowd not in (0, 1):
            raise UserError(f"{shown} has iscrowd {_brief(crowd)}: expected 0 or 1")
        annotation: dict[str, Any] = {
            "bbox": box,
            "bbox_mode": XYWH_ABS,
            "category_id": contiguous[category],
            "iscrowd": int(crowd),
        }
        if with_masks:
            annotation["segmentation"] = _mask(entry.get("segmentation"), shown, height, width)
        annotation["area"] = _area(entry.get("area"), annotation, shown, height, width)
        record["annotations"].append(annotation)
    ordered = [records[number] for number in sorted(records)]
    return CocoContent(ordered, categories, digest)


def to_ground_truth(
    records: Sequence[Record], categories: Sequence[tuple[int, str]]
) -> dict[str, Any]:
    """Records as the dict that pycocotools evaluates against, with the file's own ids.

    Objects are numbered from 1: to pycocotools, a detection that matched object 0 matched none.
    """
    annotations: list[dict[str, Any]] = []
    for record in records:
        for annotation in record["annotations"]:
            annotations.append(
                {
                    **{key: annotation[key] for key in ("bbox", "area", "iscrowd")},
                    **{key: annotation[key] for key in ("segmentation",) if key in annotation},
                    "id": len(annotations) + 1,
                    "image_id": record["image_id"],
                    "category_id": categories[annotation["category_id"]][0],
                }
            )
    images = [
        {"id": record["image_id"], "height": record["height"], "width": record["width"]}
        for record in records
    ]
    named = [{"id": number, "name": name} for number, name in categories]
    return {"images": images, "categories": named, "annotations": annotations}


def run_lengths(text: str) -> Ints | None:
    """Run lengths of a compressed mask; None where the text is not one.

    A number is written in digits of 5 bits from the lowest, each the character 48 + digit, plus 32
    if more digits follow; bit 4 of the last digit is the sign. From the fourth number on it is the
    difference to the number before the last.
    """
    try:
        digits = np.frombuffer(text.encode("ascii"), np.uint8).astype(np.int64) - 48
    except UnicodeEncodeError:
        return None
    if not digits.size or digits.min() < 0 or digits.max() > 63 or digits[-1] & 32:
        return None
    ends = np.flatnonzero(digits & 32 == 0)
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > MAX_DIGITS:
        return None
    place = np.arange(len(digits)) - np.repeat(starts, lengths)
    numbers = np.add.reduceat((digits & 31) << (5 * place), starts)
    negative = digits[ends] & 16 != 0
    numbers[negative] -= 1 << (5 * lengths[negative])
    for first in (1, 2):
        numbers[first::2] = np.cumsum(numbers[first::2])
    return numbers


def _parse(file: Path) -> tuple[dict[str, list[Any]], str]:
    """The three lists of a file, and its SHA-256."""
    try:
        size = file.stat().st_size
        if size > MAX_BYTES:
            raise UserError(f"{file} has {size:,} bytes, more than {MAX_BYTES:,}: cut it in parts")
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from None
    try:
        content = json.loads(data)
    except RecursionError:
        raise UserError(f"{file} is nested too deeply: is it a COCO annotation file?") from None
    except ValueError as error:  # also bad UTF-8, and numbers of thousands of digits
        raise UserError(f"{file} is not JSON: {' '.join(str(error).split())[:200]}") from None
    lists = ("images", "annotations", "categories")
    absent = [
        k for k in lists if not (isinstance(content, dict) and isinstance(content.get(k), list))
    ]
    if absent:
        raise UserError(
            f"{file} has no list of {', '.join(absent)}: expected COCO's instances_*.json (not "
            "captions, panoptic, image_info or results)"
        )
    return content, hashlib.sha256(data).hexdigest()


def _is_id(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_ID


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _categories(entries: Sequence[Any], where: Path) -> tuple[tuple[int, str], ...]:
    found: dict[int, str] = {}
    for entry in entries:
        number = entry.get("id") if isinstance(entry, dict) else None
        name = entry.get("name") if isinstance(entry, dict) else None
        if not _is_id(number) or not isinstance(name, str) or not name.strip():
            raise UserError(f"{where}: category {_brief(entry)} needs a whole `id` and a `name`")
        if number in found or name in found.values():
            raise UserError(f"{where}: category {name!r} ({number}) occurs twice: make both unique")
        found[number] = name
    if not found:
        raise UserError(f"{where} has no categories: the classes are taken from them")
    return tuple(sorted(found.items()))


def _images(entries: Sequence[Any], split: CocoSplit) -> list[Record]:
    where = split.file
    records: list[Record] = []
    seen: set[int] = set()
    names: list[PurePosixPath] = []
    for entry in entries:
        entry = entry if isinstance(entry, dict) else {}
        number, name = entry.get("id"), entry.get("file_name")
        height, width = entry.get("height"), entry.get("width")
        if not _is_id(number) or not isinstance(name, str):
            raise UserError(f"{where}: image {_brief(entry)} needs a whole `id` and a `file_name`")
        if number in seen:
            raise UserError(f"{where}: image id {number} occurs twice: make them unique")
        if not all(_is_id(side) and 1 <= side <= MAX_SIDE for side in (height, width)):
            raise UserError(
                f"{where}: image {number} has height {_brief(height)} and width {_brief(width)}: "
                f"expected whole numbers from 1 to {MAX_SIDE}"
            )
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise UserError(f"{where}: image {number} has file_name {name!r}, outside its folder")
        seen.add(number)
        names.append(path)
        records.append(
            {
                "file_name": str(split.images / path),
                "image_id": number,
                "height": height,
                "width": width,
                "annotations": [],
            }
        )
    if not records:
        raise UserError(f"{where} lists no images")
    _check_presence(names, split)
    return records


def _check_presence(names: Sequence[PurePosixPath], split: CocoSplit) -> None:
    """One listing of each folder instead of a question for each image, maybe over NFS."""
    listings: dict[PurePosixPath, frozenset[str]] = {}
    for folder in {name.parent for name in names}:
        try:
            listings[folder] = frozenset(path.name for path in (split.images / folder).iterdir())
        except (OSError, ValueError):  # ValueError: a NUL in its name
            listings[folder] = frozenset()
    missing = [name for name in names if name.name not in listings[name.parent]]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(names)} images of {split.file} are not in {split.images}, the "
            f"first: {str(missing[0])!r}: complete them, or is the file of another data set?"
        )


def _numbers(values: Any) -> list[float] | None:
    """A list of finite numbers; None where it is not one."""
    if not isinstance(values, list):
        return None
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if (isinstance(value, int) and abs(value) >= MAX_ID) or not math.isfinite(value):
            return None
    return values


def _box(value: Any, shown: str, width: int, height: int) -> list[float]:
    box = _numbers(value)
    if box is None or len(box) != 4 or box[2] < 0 or box[3] < 0:
        raise UserError(f"{shown} has bbox {_brief(value)}: expected [x, y, width, height]")
    x, y, w, h = box
    if x > width or y > height or x + w < 0 or y + h < 0 or max(w, h) > 2 * MAX_SIDE:
        raise UserError(f"{shown} has bbox {_brief(value)}, outside its {width}x{height} image")
    return box


def _area(value: Any, annotation: Mapping[str, Any], shown: str, height: int, width: int) -> float:
    """As the file says; some tools leave it out: the mask's, or the box's where there is none."""
    if value is not None:
        area = _numbers([value])
        if area is None or area[0] < 0:
            raise UserError(f"{shown} has area {_brief(value)}: expected a number from 0")
        return area[0]
    if "segmentation" not in annotation:
        return float(annotation["bbox"][2] * annotation["bbox"][3])
    mask = annotation["segmentation"]
    if isinstance(mask, list):
        mask = mask_tools.merge(mask_tools.frPyObjects(mask, height, width))
    return float(mask_tools.area(mask))


def _mask(value: Any, shown: str, height: int, width: int) -> Any:
    """Polygons as they are, run lengths compressed."""
    if isinstance(value, dict):
        return _runs(value, shown, height, width)
    if value is None or value == []:
        raise UserError(
            f"{shown} has no mask, and the config learns masks: give MODEL.MASK_ON False or a "
            "Faster R-CNN config"
        )
    if not isinstance(value, list):
        raise UserError(f"{shown} has a segmentation that is neither polygons nor run lengths")
    kept = []
    for polygon in value:
        points = _numbers(polygon)
        if points is None or len(points) % 2:
            raise UserError(
                f"{shown} has polygon {_brief(polygon)}: expected [x1, y1, x2, y2, ...]"
            )
        xs, ys = points[0::2], points[1::2]
        far = any(not -width <= x <= 2 * width for x in xs)
        if far or any(not -height <= y <= 2 * height for y in ys):
            raise UserError(f"{shown} has a polygon far outside its {width}x{height} image")
        if len(points) >= MIN_NUMBERS:  # two points have no inside; Detectron2 drops them too
            kept.append(points)
    if not kept:
        raise UserError(f"{shown} has empty polygons: expected at least one of three points")
    return kept


def _runs(value: Mapping[str, Any], shown: str, height: int, width: int) -> dict[str, Any]:
    size, counts = value.get("size"), value.get("counts")
    if size != [height, width]:
        raise UserError(
            f"{shown} has a mask of size {_brief(size)}, and its image is "
            f"[{height}, {width}] (height, width): is it of another data set?"
        )
    if isinstance(counts, list):
        lengths = counts if all(_is_id(count) for count in counts) else None
        total = sum(lengths) if lengths is not None else -1
    else:
        decoded = run_lengths(counts) if isinstance(counts, str) else None
        total = -1 if decoded is None or decoded.min() < 0 else int(decoded.sum())
    if total != height * width:
        raise UserError(
            f"{shown} has a mask whose run lengths do not add up to {height} x {width} pixels: "
            "write it anew"
        )
    if isinstance(counts, list):
        packed = mask_tools.frPyObjects({"size": size, "counts": counts}, height, width)
        counts = packed["counts"].decode("ascii")
    return {"size": size, "counts": counts}

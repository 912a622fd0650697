"""Data sets in the layout of the VOC devkit: where they are, reading, validating (section 4.4).

    VOCdevkit/VOC2007/Annotations/000005.xml
                      ImageSets/Main/trainval.txt
                      JPEGImages/000005.jpg

Boxes leave this module as Detectron2's own VOC loader has them: the devkit's pixel indices are
1-based and inclusive, a box that covers a W x H image is (1, 1, W, H) there and (0, 0, W, H) here.
Nothing here imports detectron2, so the commands that only need the annotations start fast.
"""

import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypedDict
from xml.etree import ElementTree
from xml.parsers import expat

import numpy as np
from PIL import Image

from instdisc.errors import UserError
from instdisc.images.demo import write_detection
from instdisc.names import VOC_VARIABLE
from instdisc.runs.folders import runs_root
from instdisc.untrusted.limits import DEEPEST, read_limited

# In the customary order: a class's position is its category id in every published VOC model.
VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)
XYXY_ABS = 0  # the value of detectron2.structures.BoxMode.XYXY_ABS, an IntEnum
LARGEST_ANNOTATION = 1 << 24  # bytes of one image's file
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp")  # the devkit has .jpg only
NAME = re.compile(r"voc_(?P<year>[0-9]+)_(?P<split>\w+)")  # what configs call a list


class Annotation(TypedDict):
    """One object, in Detectron2's spelling."""

    bbox: list[float]
    bbox_mode: int
    category_id: int
    difficult: bool


class Record(TypedDict):
    """One image, in Detectron2's spelling."""

    file_name: str
    image_id: str
    height: int
    width: int
    annotations: list[Annotation]


@dataclass(frozen=True)
class VocSplit:
    """One list of one year of a data set in VOC layout.

    Attributes:
        root: VOCdevkit, the folder that holds it, or the folder of the year itself.
        year: 2007 or 2012; any value for another data set whose own folder is `root`.
        split: name of the list in ImageSets/Main, such as `trainval`.
    """

    root: Path
    year: int | str
    split: str

    @cached_property
    def folder(self) -> Path:
        """The folder that holds Annotations, ImageSets and JPEGImages."""
        root, name = Path(self.root), f"VOC{self.year}"
        for folder in (root / name, root / "VOCdevkit" / name):
            if folder.is_dir():
                return folder
        # The folder itself may have any name but that of another year.
        own_name = root.resolve().name
        another_year = own_name.startswith("VOC2") and own_name != name
        if (root / "Annotations").is_dir() and not another_year:
            return root
        raise UserError(
            f"no VOC data set of year {self.year} at {root}: expected "
            f"VOCdevkit/{name}/{{Annotations/ID.xml, ImageSets/Main/{self.split}.txt, "
            "JPEGImages/ID.jpg}, and the root to be VOCdevkit, its parent, or that last folder"
        )

    @cached_property
    def ids(self) -> list[str]:
        """Image ids in the order of the list; a second column (+1, 0, -1) is passed over."""
        path = self.folder / "ImageSets" / "Main" / f"{self.split}.txt"
        if not path.is_file():
            known = sorted(p.stem for p in path.parent.glob("*.txt") if "_" not in p.stem)
            raise UserError(f"no list {path}: lists there are {', '.join(known) or 'none'}")
        lines = read_limited(path).decode("utf-8", "replace").splitlines()
        ids = []
        for number, fields in enumerate(map(str.split, lines), start=1):
            if not fields:
                continue
            labelled = len(fields) == 2 and fields[1] in {"1", "+1", "-1", "0"}
            if (len(fields) > 1 and not labelled) or {"/", "\\"} & set(fields[0]):
                raise UserError(f"{path}:{number}: expected `id` or `id +1|0|-1` on a line")
            ids.append(fields[0])
        if not ids:
            raise UserError(f"{path} is empty: expected one image id a line")
        if len(set(ids)) < len(ids):
            twice, _ = Counter(ids).most_common(1)[0]
            raise UserError(f"{path} names {twice} twice: remove the repeated lines")
        return ids

    def annotation_path(self, image_id: str) -> Path:
        """Where the annotation of an image lies."""
        return self.folder / "Annotations" / f"{image_id}.xml"

    @cached_property
    def image_paths(self) -> dict[str, Path]:
        """The image file of each id, in the order of the list."""
        folder = self.folder / "JPEGImages"
        if not folder.is_dir():
            raise UserError(f"no folder {folder}: the images of the data set belong there")
        # One listing instead of a question per image and suffix: 16,000 images, maybe over NFS.
        images = (path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
        # Where an id has several files the .jpg wins, always the same one.
        found = {path.stem: path for path in sorted(images, key=_suffix_rank, reverse=True)}
        missing = [i for i in self.ids if i not in found]
        if missing:
            raise UserError(
                f"{len(missing)} of {len(self.ids)} images of {self.split} are missing, the first: "
                f"{folder / missing[0]}.jpg: complete the data set or shorten the list"
            )
        return {i: found[i] for i in self.ids}


@dataclass(frozen=True)
class VocSource:
    """Where the images are.

    Attributes:
        root: VOCdevkit, its parent, or one data set's own folder.
        is_demo: whether they are the embedded ones.
        clip: pixels by which a box may leave its image, and is clipped to it.
    """

    root: Path
    is_demo: bool
    clip: int = 0

    def splits(self, names: Sequence[str]) -> list[VocSplit]:
        """The lists that a config names, such as voc_2007_trainval."""
        found = []
        for name in names:
            match = NAME.fullmatch(name)
            if match is None:
                raise UserError(f"data set {name}: expected voc_YEAR_LIST, as voc_2007_trainval")
            split = VocSplit(self.root, match["year"], match["split"])
            _ = split.ids  # fails here, before any work, if a list is missing
            found.append(split)
        return found


def named_root(named: str | None, flag: str, inside: str, expected: str) -> Path | None:
    """The folder of a flag or of DETECTRON2_DATASETS; None if neither names one.

    Args:
        named: what the flag says.
        flag: its name.
        inside: the folder of the variable's in which Detectron2 looks for this data set.
        expected: what should be there, for the message of an error.
    """
    if named is None:
        named, flag = os.environ.get(VOC_VARIABLE), VOC_VARIABLE
        if named and inside and (Path(named) / inside).is_dir():
            named = str(Path(named) / inside)
    if not named or named == "demo":
        return None
    root = Path(named).expanduser()
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise UserError(f"{flag} {root} {what}: expected {expected}")
    return root


def locate_voc(named: str | None) -> VocSource:
    """The folder that --voc-root or DETECTRON2_DATASETS names; the embedded set if neither does."""
    expected = (
        "VOCdevkit/VOC2007/{Annotations/ID.xml, ImageSets/Main/trainval.txt, JPEGImages/ID.jpg}, "
        "and the root to be VOCdevkit, its parent, or that last folder"
    )
    root = named_root(named, "--voc-root", "", expected)
    if root is None:
        return VocSource(write_detection(runs_root() / "demo-data"), is_demo=True)
    return VocSource(root, is_demo=False)


def read_voc(
    root: Path | str,
    year: int | str,
    split: str,
    class_names: Sequence[str] | None = None,
    *,
    with_images: bool = True,
    clip: int = 0,
) -> list[Record]:
    """Reads and validates a split as Detectron2's standard records.

    Args:
        root: as in `VocSplit`.
        year: as in `VocSplit`.
        split: as in `VocSplit`.
        class_names: category id -> name; the 20 of VOC unless told (see `find_class_names`).
        with_images: False reads annotations whose images are absent, for evaluation alone.
        clip: a box that leaves its image by so many pixels at most is clipped, not refused.
    """
    source = VocSplit(Path(root), year, split)
    names = VOC_CLASSES if class_names is None else tuple(class_names)
    categories = {name: i for i, name in enumerate(names)}
    images = source.image_paths if with_images else {}
    records: list[Record] = []
    for image_id, tree in _parse_split(source):
        image = images.get(image_id, source.folder / "JPEGImages" / f"{image_id}.jpg")
        where = source.annotation_path(image_id)
        width, height = _image_size(tree, where, image if with_images else None)
        annotations: list[Annotation] = []
        for number, node in enumerate(tree.findall("object"), start=1):
            name = _text(node, "name", where)
            if name not in categories:
                raise UserError(
                    f"{where}: unknown class {name!r} in object {number}: "
                    f"expected one of {', '.join(names)}"
                )
            annotations.append(
                {
                    "bbox": _box(node, where, number, width, height, clip),
                    "bbox_mode": XYXY_ABS,
                    "category_id": categories[name],
                    "difficult": _is_difficult(node),
                }
            )
        records.append(
            {
                "file_name": str(image),
                "image_id": image_id,
                "height": height,
                "width": width,
                "annotations": annotations,
            }
        )
    return records


def find_class_names(root: Path | str, year: int | str, splits: Iterable[str]) -> tuple[str, ...]:
    """Class names that the annotations use: VOC's 20 if there are no others, else sorted."""
    sources = [VocSplit(Path(root), year, split) for split in splits]
    return _class_names(root, [found for source in sources for found in _read_presence(source)])


def read_targets(splits: Sequence[VocSplit]) -> tuple[tuple[str, ...], list[np.ndarray]]:
    """The classes of lists, and each list as classification: targets `(images, classes)` of int8.

    1 where an image has the class, 0 where it has not, and -1, to be ignored, where all its objects
    of the class are difficult: the rule of the devkit's own lists. Images in the order of `ids`.
    """
    found = [_read_presence(split) for split in splits]
    names = _class_names(splits[0].root, [image for images in found for image in images])
    kinds = {None: 0, False: -1, True: 1}
    tables = [[[kinds[image.get(name)] for name in names] for image in images] for images in found]
    return names, [np.array(table, np.int8) for table in tables]


def _read_presence(split: VocSplit) -> list[dict[str, bool]]:
    """For every image the classes it has, and whether one of their objects is not difficult."""
    images = []
    for image_id, tree in _parse_split(split):
        where, found = split.annotation_path(image_id), dict[str, bool]()
        for node in tree.findall("object"):
            name = _text(node, "name", where)
            found[name] = found.get(name, False) or not _is_difficult(node)
        images.append(found)
    return images


def _class_names(root: Path | str, images: Iterable[dict[str, bool]]) -> tuple[str, ...]:
    found = {name for image in images for name in image}
    if not found:
        raise UserError(f"no annotated objects in {root}: the class names are taken from them")
    return VOC_CLASSES if found <= set(VOC_CLASSES) else tuple(sorted(found))


def _is_difficult(node: ElementTree.Element) -> bool:
    # Some data sets leave the flag out; the devkit's own meaning of none is no.
    return (node.findtext("difficult") or "0").strip() == "1"


def fingerprint(split: VocSplit) -> str:
    """SHA-256 of the ids in order and the bytes of their annotations."""
    digest = hashlib.sha256()
    for image_id in split.ids:
        data = _read_annotation(split, image_id)
        # With the length between them, no two splits give the same stream.
        digest.update(f"{image_id} {len(data)}\n".encode())
        digest.update(data)
    return digest.hexdigest()


def _suffix_rank(path: Path) -> tuple[int, str]:
    return IMAGE_SUFFIXES.index(path.suffix.lower()), path.suffix


def _parse_split(split: VocSplit) -> Iterator[tuple[str, ElementTree.Element]]:
    for image_id in split.ids:
        data = _read_annotation(split, image_id)
        yield image_id, _parse_xml(data, split.annotation_path(image_id))


def _read_annotation(split: VocSplit, image_id: str) -> bytes:
    try:
        return read_limited(split.annotation_path(image_id), LARGEST_ANNOTATION)
    except FileNotFoundError:
        absent = [i for i in split.ids if not split.annotation_path(i).is_file()]
        raise UserError(
            f"{len(absent)} of {len(split.ids)} images of {split.split} have no annotation, "
            f"the first: {split.annotation_path(absent[0])}: complete the data set"
        ) from None


def _parse_xml(data: bytes, where: Path) -> ElementTree.Element:
    """Parses an annotation; refuses document types, and with them every kind of entity."""

    def refuse(*_: object) -> None:
        raise UserError(f"{where} has a DOCTYPE: refused, VOC annotations need none")

    def enter(tag: str, _: object) -> None:
        above.append(tag)
        if len(above) > DEEPEST:
            raise UserError(f"{where} is nested more than {DEEPEST} deep: is it a VOC annotation?")

    def leave(_: str) -> None:
        above.pop()

    above: list[str] = []
    # A first pass with no handlers but these: entities can only be declared inside a DOCTYPE,
    # and ElementTree, which builds the tree, would expand them.
    guard = expat.ParserCreate(namespace_separator="}")  # as ElementTree's own
    guard.StartDoctypeDeclHandler = refuse
    guard.StartElementHandler, guard.EndElementHandler = enter, leave
    try:
        guard.Parse(data, True)
        return ElementTree.fromstring(data)
    except UserError:
        raise
    except (expat.ExpatError, SyntaxError, LookupError, ValueError) as error:  # also bad encodings
        raise UserError(f"{where} is not XML: {error}") from None


def _text(node: ElementTree.Element, tag: str, where: Path) -> str:
    text = (node.findtext(tag) or "").strip()
    if not text:
        raise UserError(f"{where} has no <{tag}> in <{node.tag}>: is it a VOC annotation?")
    return text


def _number(node: ElementTree.Element, tag: str, where: Path) -> float:
    text = _text(node, tag, where)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{where}: <{tag}> is {text!r}: expected a number")
    return value


def _image_size(tree: ElementTree.Element, where: Path, image: Path | None) -> tuple[int, int]:
    size = tree.find("size")
    if size is not None:
        width, height = int(_number(size, "width", where)), int(_number(size, "height", where))
        if width > 0 and height > 0:
            return width, height
    if image is None:
        raise UserError(f"{where} has no <size>: expected <width> and <height> in it")
    try:  # Some tools leave it out, or write zeros: ask the image.
        with Image.open(image) as opened:
            return opened.size
    except OSError as error:
        raise UserError(f"{where} has no <size>, and {image} is unreadable: {error}") from None


def _box(
    node: ElementTree.Element, where: Path, number: int, width: int, height: int, clip: int
) -> list[float]:
    bounds = node.find("bndbox")
    if bounds is None:
        raise UserError(f"{where}: object {number} has no <bndbox>: is it a VOC annotation?")
    x1, y1, x2, y2 = (_number(bounds, tag, where) for tag in ("xmin", "ymin", "xmax", "ymax"))
    shown = f"{where}: object {number} at ({x1:g}, {y1:g}, {x2:g}, {y2:g})"
    if x2 < x1 or y2 < y1:
        raise UserError(f"{shown} has xmax < xmin or ymax < ymin: correct the annotation")
    outside = max(1 - x1, 1 - y1, x2 - width, y2 - height)
    if outside > clip:
        hint = ", or --clip-boxes 1" if outside <= 1 else ""
        raise UserError(
            f"{shown} lies outside its {width}x{height} image: VOC boxes go from 1 to the width or "
            f"height, both included: correct it{hint}"
        )
    x1, y1, x2, y2 = max(x1, 1.0), max(y1, 1.0), min(x2, width), min(y2, height)
    if x2 < x1 or y2 < y1:
        raise UserError(f"{shown} has nothing in its {width}x{height} image: correct it")
    return [x1 - 1.0, y1 - 1.0, x2, y2]

"""Files of proposals: what Detectron2 reads, and those of other tools (the paper, section 4.4).

The file is what Detectron2's `load_proposals_into_dataset` reads: a pickled dict of `ids` (strings
such as "000005"), `boxes` (float32 (K, 4), continuous coordinates as in `voc`),
`objectness_logits` and `bbox_mode`. Detectron2 sorts by the scores, which turns ties around, and
then cuts at TOPK, so every file written here has strictly falling scores. Pickles are read without
running anything: numbers, strings, lists, dicts and arrays come out, all else is refused.
"""

import functools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from instdisc.errors import UserError
from instdisc.runs.folders import atomic_file
from instdisc.untrusted.containers import load_plain_pickle
from instdisc.untrusted.matlab import read_mat
from transfer.detection.voc import XYXY_ABS

XYWH_ABS = 1  # detectron2.structures.BoxMode.XYWH_ABS
Array = NDArray[np.float32]
# What a file raises that has other things in the places of boxes, ids and scores.
ODD = (TypeError, LookupError, AttributeError, ArithmeticError, ValueError)


@dataclass(frozen=True)
class Proposals:
    """Boxes (K, 4) and strictly falling scores (K,) of each image."""

    ids: list[str]
    boxes: list[Array]
    scores: list[Array]

    @classmethod
    def build(
        cls, ids: Sequence[str], boxes: Sequence[ArrayLike], scores: Sequence[ArrayLike] | None
    ) -> "Proposals":
        """From boxes in any order; without scores, or if all are equal, the first is the best."""
        counts = {len(ids), len(boxes), len(ids if scores is None else scores)}
        if len(counts) > 1 or len(set(ids)) < len(ids):
            raise UserError("proposals need one array of boxes, and of scores, for each unique id")
        pairs = [
            _falling(image_id, np.asarray(own, np.float32), None if scores is None else scores[i])
            for i, (image_id, own) in enumerate(zip(ids, boxes, strict=True))
        ]
        return cls(list(ids), [pair[0] for pair in pairs], [pair[1] for pair in pairs])

    def select(self, ids: Sequence[str]) -> "Proposals":
        """Those of some images, in their order."""
        row = {image_id: i for i, image_id in enumerate(self.ids)}
        missing = [i for i in ids if i not in row]
        if missing:
            raise UserError(
                f"{len(missing)} of {len(ids)} images have no proposals, the first: {missing[0]}: "
                "were they made for another split or data set?"
            )
        rows = [row[i] for i in ids]
        return Proposals(list(ids), [self.boxes[i] for i in rows], [self.scores[i] for i in rows])


def _falling(image_id: str, boxes: Array, scores: ArrayLike | None) -> tuple[Array, Array]:
    boxes = boxes.reshape(0, 4) if not boxes.size else boxes
    values = np.zeros(len(boxes)) if scores is None else np.asarray(scores, np.float32).reshape(-1)
    if boxes.ndim != 2 or boxes.shape[1] != 4 or len(values) != len(boxes):
        raise UserError(f"image {image_id} has boxes {boxes.shape}, scores {values.shape}")
    if not (np.isfinite(boxes).all() and np.isfinite(values).all()):
        raise UserError(f"proposals of image {image_id} are NaN or infinite")
    if len(values) == 0 or values.min() == values.max():
        return boxes, np.arange(len(boxes), 0, -1, dtype=np.float32)
    order = np.argsort(-values, kind="stable")
    falling = values[order].astype(np.float32)
    if (falling[1:] >= falling[:-1]).any():
        for i in range(1, len(falling)):  # the smallest step down that tells equals apart
            falling[i] = min(falling[i], np.nextafter(falling[i - 1], np.float32(-np.inf)))
    return boxes[order], falling


def write_proposals(
    path: Path,
    ids: Sequence[str],
    boxes: Sequence[ArrayLike],
    scores: Sequence[ArrayLike] | None = None,
) -> None:
    """Writes what Detectron2 reads; without scores the first box of an image is the best."""
    proposals = Proposals.build(ids, boxes, scores)
    content = {
        "ids": proposals.ids,
        "boxes": proposals.boxes,
        "objectness_logits": proposals.scores,
        "bbox_mode": XYXY_ABS,
    }
    with atomic_file(path) as stream:
        pickle.dump(content, stream, protocol=4)


def read_proposals(path: Path) -> Proposals:
    """Reads a proposal file without running anything that it may contain."""
    return from_detectron_pkl(path)


Reader = Callable[..., Proposals]


def _refusing_odd(reader: Reader) -> Reader:
    """One line instead of a traceback for a file with odd content."""

    @functools.wraps(reader)
    def read(path: Path, ids: Sequence[str] | None = None) -> Proposals:
        try:
            return reader(path, ids)
        except UserError:
            raise
        except ODD as error:
            raise UserError(f"{path} is no proposal file that is known: {error}") from None

    return read


@_refusing_odd
def from_detectron_pkl(path: Path, ids: Sequence[str] | None = None) -> Proposals:
    """Reads proposals of Detectron or Detectron2, boxes taken as Detectron2 takes them.

    Args:
        path: pickled dict with boxes, ids or indexes, scores or objectness_logits.
        ids: the images wanted, in order; also tells what a number such as 5 stands for ("000005").
    """
    content = load_plain_pickle(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} is no proposal file: expected a pickled dict")
    numbers = content.get("ids", content.get("indexes"))
    boxes, scores = content.get("boxes"), content.get("objectness_logits", content.get("scores"))
    if numbers is None or boxes is None:
        raise UserError(f"{path} has {sorted(map(str, content))}: expected ids, boxes, scores")
    arrays = [_as_boxes(own, path) for own in boxes]
    if content.get("bbox_mode", XYXY_ABS) == XYWH_ABS:
        arrays = [np.concatenate([a[:, :2], a[:, :2] + a[:, 2:]], axis=1) for a in arrays]
    elif content.get("bbox_mode", XYXY_ABS) != XYXY_ABS:
        raise UserError(f"{path} has bbox_mode {content['bbox_mode']}: expected XYXY or XYWH")
    spelling = {str(int(i)): i for i in ids or () if i.isdecimal()}
    spelling.update((i, i) for i in ids or ())
    names = [spelling.get(n, n) for n in map(str, numbers)]
    proposals = Proposals.build(names, arrays, scores)
    return proposals if ids is None else proposals.select(ids)


@_refusing_odd
def from_mat(path: Path, ids: Sequence[str] | None = None) -> Proposals:
    """Reads MATLAB files of selective search; which of two layouts is seen from the content.

    - all images: cell arrays `boxes`, each (K, 4) [y1 x1 y2 x2], 1-based, and `images`, the ids;
      without `images` the boxes are in the order of `ids`
    - one image, as Fast R-CNN's demo has it: `boxes`, (K, 4) [x1 y1 x2 y2], 0-based, and the id in
      the file's name (000004_boxes.mat)

    Both count the last pixel as inside, so the right and lower edges are one further.
    """
    content = read_mat(path)
    boxes = content.get("boxes")
    if boxes is None:
        raise UserError(f"{path} has no variable `boxes`: is it from selective search?")
    if boxes.dtype != object:
        name = Path(path).stem.removesuffix("_boxes")
        inclusive = _as_boxes(boxes, path) + np.array([0, 0, 1, 1], np.float32)
        proposals = Proposals.build([name], [inclusive], None)
        return proposals if ids is None else proposals.select([i for i in ids if i == name] or ids)
    cells = [_as_boxes(cell, path) for cell in boxes.ravel()]
    if any(cell.size and cell.min() < 1 for cell in cells):
        raise UserError(f"{path} has coordinates below 1: expected 1-based [y1 x1 y2 x2]")
    cells = [cell[:, [1, 0, 3, 2]] - np.array([1, 1, 0, 0], np.float32) for cell in cells]
    if "images" in content:
        names = [str(np.ravel(cell)[0]).strip() for cell in content["images"].ravel()]
        proposals = Proposals.build(names, cells, None)
        return proposals if ids is None else proposals.select(ids)
    if ids is None or len(ids) != len(cells):
        raise UserError(f"{path} has {len(cells)} images and no ids: expected as many in the split")
    return Proposals.build(ids, cells, None)


def _as_boxes(values: ArrayLike, path: Path) -> Array:
    try:
        boxes = np.asarray(values, np.float32)
    except (TypeError, ValueError):
        raise UserError(f"{path} has boxes that are not numbers: expected (K, 4)") from None
    if boxes.size and (boxes.ndim != 2 or boxes.shape[1] != 4):
        raise UserError(f"{path} has boxes of shape {boxes.shape}: expected (K, 4)")
    return boxes.reshape(-1, 4)

"""The images of a detection run: which data set, its records, and batches that have no history."""

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetMapper
from detectron2.data.detection_utils import SizeMismatchError
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler

from instdisc.errors import UserError
from instdisc.images.demo import write_detection
from instdisc.images.loading import build_loader, epoch_order
from instdisc.names import VOC_VARIABLE
from instdisc.runs.folders import runs_root
from instdisc.training.seed import derive_seed
from transfer.detection.proposal_files import Proposals, read_proposals
from transfer.detection.proposals import check_proposals, make_proposals, proposal_file
from transfer.detection.voc import VocSplit, find_class_names, fingerprint, read_voc

NAME = re.compile(r"voc_(?P<year>[0-9]+)_(?P<split>\w+)")


@dataclasses.dataclass(frozen=True)
class VocSource:
    """Where the images are.

    Attributes:
        root: VOCdevkit, its parent, or one data set's own folder.
        is_demo: whether they are the embedded ones.
    """

    root: Path
    is_demo: bool

    def splits(self, names: Sequence[str]) -> list[VocSplit]:
        """The lists that a config names, such as voc_2007_trainval."""
        found = []
        for name in names:
            match = NAME.fullmatch(name)
            if match is None:
                raise UserError(f"data set {name}: expected voc_YEAR_LIST, as voc_2007_trainval")
            split = VocSplit(self.root, match["year"], match["split"])
            _ = split.ids  # a missing list is told here, before any work is done
            found.append(split)
        return found


def locate_voc(named: str | None) -> VocSource:
    """The folder that --voc-root or DETECTRON2_DATASETS names; the embedded set if neither does."""
    flag = "--voc-root"
    if named is None:
        named, flag = os.environ.get(VOC_VARIABLE), VOC_VARIABLE
    if not named or named == "demo":
        return VocSource(write_detection(runs_root() / "demo-data"), is_demo=True)
    root = Path(named).expanduser()
    if not root.is_dir():
        what = "is not a folder" if root.exists() else "does not exist"
        raise UserError(
            f"{flag} {root} {what}: expected VOCdevkit/VOC2007/{{Annotations/ID.xml, "
            "ImageSets/Main/trainval.txt, JPEGImages/ID.jpg}, and the root to be VOCdevkit, its "
            "parent, or that last folder"
        )
    return VocSource(root, is_demo=False)


@dataclasses.dataclass(frozen=True)
class VocData:
    """Everything a run learns from and is tested on.

    Attributes:
        is_demo: whether it is the embedded set.
        class_names: category id -> name.
        train: records to learn from, with proposals where the detector needs them.
        test: records to evaluate on.
        num_listed: training images with those that have no object to learn, which `train` lacks.
        fingerprint: SHA-256 over the lists and annotations of both.
        splits: what rows call them: "voc07-trainval -> voc07-test".
    """

    is_demo: bool
    class_names: tuple[str, ...]
    train: list[dict[str, Any]]
    test: list[dict[str, Any]]
    num_listed: int
    fingerprint: str
    splits: str


def load_voc_data(cfg: CfgNode, source: VocSource, *, make_missing: bool) -> VocData:
    """Reads and checks both splits, and the proposals if the config wants them.

    Args:
        cfg: names the lists and the proposal files.
        source: where they are.
        make_missing: run selective search where there are no proposals.
    """
    train, test = source.splits(cfg.DATASETS.TRAIN), source.splits(cfg.DATASETS.TEST)
    names: tuple[str, ...] = ()
    for split in (*train, *test):
        found = find_class_names(split.root, split.year, [split.split])
        names = found if set(names) <= set(found) else tuple(sorted({*names, *found}))
    records = {
        split: [dict(r) for r in read_voc(split.root, split.year, split.split, names)]
        for split in (*train, *test)
    }
    if cfg.MODEL.LOAD_PROPOSALS:
        given = (*cfg.DATASETS.PROPOSAL_FILES_TRAIN, *cfg.DATASETS.PROPOSAL_FILES_TEST)
        if given and len(given) != len(train) + len(test):
            raise UserError(
                f"{len(given)} proposal files for {len(train) + len(test)} lists of images: "
                "DATASETS.PROPOSAL_FILES_TRAIN and _TEST need one file for each list"
            )
        for i, split in enumerate((*train, *test)):
            file = Path(given[i]) if given else None
            _add_proposals(records[split], split, file, make_missing=make_missing)
    learnt = [record for split in train for record in records[split]]
    if not cfg.TRANSFER.TRAIN_ON_DIFFICULT:
        learnt = [_without_difficult(record) for record in learnt]
    learnt = [record for record in learnt if record["annotations"]]
    if not learnt:
        raise UserError(f"no image of {', '.join(cfg.DATASETS.TRAIN)} has objects to learn")
    digest = hashlib.sha256("".join(fingerprint(s) for s in (*train, *test)).encode())
    return VocData(
        is_demo=source.is_demo,
        class_names=names,
        train=learnt,
        test=[record for split in test for record in records[split]],
        num_listed=sum(len(records[split]) for split in train),
        fingerprint=digest.hexdigest(),
        splits=f"{_shown(train)} -> {_shown(test)}",
    )


def _shown(splits: Sequence[VocSplit]) -> str:
    return "+".join(f"voc{str(s.year)[-2:]}-{s.split}" for s in splits)


def _without_difficult(record: dict[str, Any]) -> dict[str, Any]:
    kept = [a for a in record["annotations"] if not a["difficult"]]
    return {**record, "annotations": kept}


def _find_proposals(split: VocSplit, named: Path | None, *, make_missing: bool) -> Proposals:
    file = proposal_file(split) if named is None else named
    if named is None and not file.exists():
        if not make_missing:
            raise UserError(
                f"no proposals {file}: give --make-proposals, or run `python transfer/proposals.py "
                f"make --voc-root {split.root} --year {split.year} --split {split.split}`, or name "
                "files with DATASETS.PROPOSAL_FILES_TRAIN and _TEST"
            )
        return make_proposals(split, file, workers=os.cpu_count() or 1)
    return read_proposals(file)


def _add_proposals(
    records: list[dict[str, Any]], split: VocSplit, named: Path | None, *, make_missing: bool
) -> None:
    """Puts each image's proposals where Detectron2's mapper looks for them."""
    proposals = _find_proposals(split, named, make_missing=make_missing)
    check_proposals(proposals, records)  # type: ignore[arg-type] # records as plain dicts
    own = proposals.select([record["image_id"] for record in records])
    for record, boxes, scores in zip(records, own.boxes, own.scores, strict=True):
        record["proposal_boxes"] = boxes
        record["proposal_objectness_logits"] = scores
        record["proposal_bbox_mode"] = 0  # BoxMode.XYXY_ABS


class MappedImages(Dataset[dict[str, Any]]):
    """Records through Detectron2's mapper; a key is (position in the run, record).

    The augmentation depends on (seed, position) alone. What cannot be read becomes an `error`, so
    that the trainer can end with one line, also from a loader process.
    """

    def __init__(self, records: Sequence[dict[str, Any]], mapper: DatasetMapper, seed: int) -> None:
        self.records = records
        self.mapper = mapper
        self.seed = seed

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        position, index = key
        record = self.records[index]
        # Detectron2's augmentations draw from numpy's global generator.
        np.random.seed(derive_seed(self.seed, "detect", position) % 2**32)
        try:
            mapped: dict[str, Any] = self.mapper(record)
        except SizeMismatchError:
            with Image.open(record["file_name"]) as image:
                width, height = image.size
            return {
                "error": f"{record['file_name']} is {width}x{height}, and its annotation says "
                f"{record['width']}x{record['height']}: correct one of them"
            }
        except (OSError, SyntaxError, Image.DecompressionBombError) as error:
            return {"error": f"{record['file_name']} is not a readable image: {error}"}
        return mapped

    @staticmethod
    def collate(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A batch as Detectron2's models take it."""
        return batch


def check_readable(batch: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The batch, if all its images could be read."""
    for image in batch:
        if "error" in image:
            raise UserError(image["error"])
    return batch


@dataclasses.dataclass(frozen=True)
class TrainingOrder(Sampler[list[tuple[int, int]]]):
    """Endless passes over the images in a fresh order each, cut into this process's batches.

    Attributes:
        num_images: how many there are.
        batch_size: images an iteration over all processes.
        seed: of the run.
        start: the iteration to begin with.
        end: the iteration to end before.
        rank: this process.
        world_size: how many processes.
    """

    num_images: int
    batch_size: int
    seed: int
    start: int
    end: int
    rank: int = 0
    world_size: int = 1

    def __len__(self) -> int:
        return self.end - self.start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        share = self.batch_size // self.world_size
        epoch, order = -1, torch.empty(0, dtype=torch.int64)
        for iteration in range(self.start, self.end):
            batch = []
            first = iteration * self.batch_size + self.rank * share
            for position in range(first, first + share):
                if position // self.num_images != epoch:
                    epoch = position // self.num_images
                    order = epoch_order(self.num_images, self.seed, epoch)
                batch.append((position, int(order[position % self.num_images])))
            yield batch


def build_train_loader(
    cfg: CfgNode, data: VocData, seed: int, start: int, rank: int, world_size: int
) -> DataLoader[Any]:
    """Batches from iteration `start` on, the same ones for any number of loader processes."""
    if cfg.SOLVER.IMS_PER_BATCH % world_size:
        raise UserError(
            f"SOLVER.IMS_PER_BATCH {cfg.SOLVER.IMS_PER_BATCH} does not divide by {world_size} "
            "processes: choose a multiple"
        )
    order = TrainingOrder(
        len(data.train),
        cfg.SOLVER.IMS_PER_BATCH,
        seed,
        start,
        cfg.SOLVER.MAX_ITER,
        rank,
        world_size,
    )
    images = MappedImages(data.train, DatasetMapper(cfg, is_train=True), seed)
    return build_loader(images, order, cfg.DATALOADER.NUM_WORKERS)


def build_test_loader(
    cfg: CfgNode, data: VocData, rank: int, world_size: int, indices: Sequence[int] | None = None
) -> DataLoader[Any]:
    """The test images one by one, strided over the processes."""
    chosen = range(len(data.test)) if indices is None else indices
    mine = [[(index, index)] for index in list(chosen)[rank::world_size]]
    images = MappedImages(data.test, DatasetMapper(cfg, is_train=False), seed=0)
    return build_loader(images, mine, cfg.DATALOADER.NUM_WORKERS)

"""The images of a detection run: which data set, its records, and batches that have no history."""

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetFromList, DatasetMapper
from detectron2.data.detection_utils import SizeMismatchError
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler

from instdisc.errors import UserError
from instdisc.images.demo import write_segmentation
from instdisc.images.loading import EpochOrder, build_loader
from instdisc.runs.folders import runs_root
from instdisc.training.cores import num_cores
from instdisc.training.seed import derive_seed
from transfer.detection.coco import CocoSplit, read_coco
from transfer.detection.proposal_files import Proposals, read_proposals
from transfer.detection.proposals import (
    await_proposals,
    check_proposals,
    make_proposals,
    proposal_file,
)
from transfer.detection.settings import DetectConfig
from transfer.detection.voc import (
    VocSource,
    VocSplit,
    find_class_names,
    fingerprint,
    locate_voc,
    named_root,
    read_voc,
)

COCO_NAME = re.compile(r"coco_(?P<year>[0-9]+)_(?P<split>\w+)")
OFFICIAL = {"coco17-train": 118_287, "coco17-val": 5_000}  # images of COCO itself


@dataclasses.dataclass(frozen=True)
class CocoSource:
    """Where images with COCO's annotations are.

    Attributes:
        train: files to learn from.
        test: files to evaluate on.
        is_demo: whether they are the embedded ones.
    """

    train: list[CocoSplit]
    test: list[CocoSplit]
    is_demo: bool


Source = VocSource | CocoSource


def locate_data(config: DetectConfig, cfg: CfgNode) -> Source:
    """The images that the flags name; else DETECTRON2_DATASETS; else the embedded ones."""
    if config.coco_train is not None and config.coco_test is not None:
        if {"DATASETS.TRAIN", "DATASETS.TEST"} & set(config.opts[::2]):
            raise UserError("--coco-train names the images: leave out DATASETS.TRAIN and _TEST")
        splits = [
            CocoSplit(file, config.coco_images or file.parent, f"{file.parent.name}/{file.stem}")
            for file in (config.coco_train, config.coco_test)
        ]
        return CocoSource(splits[:1], splits[1:], is_demo=False)
    names = (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)
    kinds = {name.partition("_")[0] for name in names}
    if kinds not in ({"voc"}, {"coco"}):
        raise UserError(
            f"data sets {', '.join(names)}: expected all of them to be voc_YEAR_LIST, as "
            "voc_2007_trainval, or all coco_YEAR_LIST, as coco_2017_train"
        )
    if kinds == {"coco"}:
        if config.voc_root is not None or config.clip_boxes:
            raise UserError(
                f"{config.cfg} is for COCO, and --voc-root or --clip-boxes for VOC: use "
                "--coco-root, or --coco-train and --coco-test, or another --cfg"
            )
        return _locate_coco(config.coco_root, cfg)
    if config.coco_root is not None:
        raise UserError(
            f"{config.cfg} is for VOC, and --coco-root for COCO: choose a --cfg of coco/, such as "
            "coco/faster_r50_fpn, or --voc-root"
        )
    return dataclasses.replace(locate_voc(config.voc_root), clip=config.clip_boxes)


def _locate_coco(named: str | None, cfg: CfgNode) -> CocoSource:
    expected = "train2017, val2017 and annotations/instances_{train,val}2017.json in it"
    root = named_root(named, "--coco-root", "coco", expected)
    is_demo = root is None
    if root is None:
        root = write_segmentation(runs_root() / "demo-data")
    found: list[CocoSplit] = []
    for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST):
        match = COCO_NAME.fullmatch(name)
        if match is None:
            raise UserError(f"data set {name}: expected coco_YEAR_LIST, as coco_2017_train")
        part = f"{match['split']}{match['year']}"
        file = root / "annotations" / f"instances_{part}.json"
        for path in (file, root / part):
            if not path.exists():
                raise UserError(f"no {path}: expected {expected}")
        shown = f"coco{match['year'][-2:]}-{match['split']}"
        found.append(CocoSplit(file, root / part, shown))
    count = len(cfg.DATASETS.TRAIN)
    return CocoSource(found[:count], found[count:], is_demo)


@dataclasses.dataclass(frozen=True)
class DetectionData:
    """Everything a run learns from and is tested on.

    Attributes:
        is_demo: whether it is the embedded set.
        class_names: category id -> name.
        train: records to learn from, with proposals where the detector needs them.
        test: records to evaluate on.
        num_listed: training images with those that have no object to learn, which `train` lacks.
        fingerprint: SHA-256 over the lists and annotations of both.
        splits: what rows call them: "voc07-trainval -> voc07-test".
        category_ids: COCO's: category id -> the file's own id; None for VOC.
    """

    is_demo: bool
    class_names: tuple[str, ...]
    train: list[dict[str, Any]]
    test: list[dict[str, Any]]
    num_listed: int
    fingerprint: str
    splits: str
    category_ids: tuple[int, ...] | None = None

    @property
    def has_run_lengths(self) -> bool:
        """Whether a mask to learn is no polygon."""
        masks = (a.get("segmentation") for r in self.train for a in r["annotations"])
        return any(isinstance(mask, dict) for mask in masks)


def load_data(
    cfg: CfgNode, source: Source, *, make_missing: bool, is_main: bool = True
) -> DetectionData:
    """Reads and checks the images to learn from and to test on.

    Args:
        cfg: names the lists and the proposal files.
        source: where they are.
        make_missing: run selective search where there are no proposals.
        is_main: whether this process does that, or waits for the one that does.
    """
    if isinstance(source, CocoSource):
        return _load_coco(cfg, source)
    return _load_voc(cfg, source, make_missing=make_missing, is_main=is_main)


def _load_coco(cfg: CfgNode, source: CocoSource) -> DetectionData:
    if cfg.MODEL.LOAD_PROPOSALS:
        raise UserError(
            "Fast R-CNN's proposals are made for VOC lists only: choose a Faster or Mask R-CNN "
            "config, such as coco/faster_r50_fpn"
        )
    splits = (*source.train, *source.test)
    contents = [read_coco(split, with_masks=cfg.MODEL.MASK_ON) for split in splits]
    categories = contents[0].categories
    for split, content in zip(splits, contents, strict=True):
        if content.categories != categories:
            raise UserError(
                f"{split.file} has other categories than {splits[0].file}: are both of one data "
                "set?"
            )
    count = len(source.train)
    listed = [record for content in contents[:count] for record in content.records]
    learnt = [r for r in listed if any(not a["iscrowd"] for a in r["annotations"])]
    if not learnt:
        raise UserError(f"no image of {splits[0].file} has objects to learn")
    test = [record for content in contents[count:] for record in content.records]
    if len({record["image_id"] for record in test}) < len(test):
        raise UserError("DATASETS.TEST: its files share image ids: name one of them")
    shown = [
        split.name
        if OFFICIAL.get(split.name, len(content.records)) == len(content.records)
        else f"{split.name} ({len(content.records)} images)"
        for split, content in zip(splits, contents, strict=True)
    ]
    digest = hashlib.sha256("".join(content.fingerprint for content in contents).encode())
    return DetectionData(
        is_demo=source.is_demo,
        class_names=tuple(name for _, name in categories),
        train=learnt,
        test=test,
        num_listed=len(listed),
        fingerprint=digest.hexdigest(),
        splits=f"{'+'.join(shown[:count])} -> {'+'.join(shown[count:])}",
        category_ids=tuple(number for number, _ in categories),
    )


def _load_voc(
    cfg: CfgNode, source: VocSource, *, make_missing: bool, is_main: bool
) -> DetectionData:
    if cfg.MODEL.MASK_ON:
        raise UserError(
            "the config learns masks, and VOC annotations have boxes only: give MODEL.MASK_ON "
            "False, or images with COCO's annotations (--coco-root, --coco-train)"
        )
    train, test = source.splits(cfg.DATASETS.TRAIN), source.splits(cfg.DATASETS.TEST)
    names: tuple[str, ...] = ()
    for split in (*train, *test):
        found = find_class_names(split.root, split.year, [split.split])
        names = found if set(names) <= set(found) else tuple(sorted({*names, *found}))
    records = {
        split: [
            dict(record)
            for record in read_voc(split.root, split.year, split.split, names, clip=source.clip)
        ]
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
            proposals = _find_proposals(split, file, make_missing=make_missing, is_main=is_main)
            _add_proposals(records[split], proposals)
    learnt = [record for split in train for record in records[split]]
    if not cfg.TRANSFER.TRAIN_ON_DIFFICULT:
        learnt = [_without_difficult(record) for record in learnt]
    learnt = [record for record in learnt if record["annotations"]]
    if not learnt:
        raise UserError(f"no image of {', '.join(cfg.DATASETS.TRAIN)} has objects to learn")
    digest = hashlib.sha256("".join(fingerprint(s) for s in (*train, *test)).encode())
    if source.clip:  # other boxes than without
        digest.update(f"clip {source.clip}".encode())
    return DetectionData(
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


def _find_proposals(
    split: VocSplit, named: Path | None, *, make_missing: bool, is_main: bool
) -> Proposals:
    file = proposal_file(split) if named is None else named
    if named is None and not file.exists():
        if not make_missing:
            raise UserError(
                f"no proposals {file}: give --make-proposals, or run `python transfer/proposals.py "
                f"make --voc-root {split.root} --year {split.year} --split {split.split}`, or name "
                "files with DATASETS.PROPOSAL_FILES_TRAIN and _TEST"
            )
        if not is_main:
            return await_proposals(file)
        return make_proposals(split, file, workers=num_cores())
    return read_proposals(file)


def _add_proposals(records: list[dict[str, Any]], proposals: Proposals) -> None:
    """Puts each image's proposals where Detectron2's mapper looks for them."""
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
        # Packed: loader processes that touch Python objects would each copy all of COCO in time.
        self.records = DatasetFromList(list(records), copy=False)
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
        order: EpochOrder | None = None
        for iteration in range(self.start, self.end):
            batch = []
            first = iteration * self.batch_size + self.rank * share
            for position in range(first, first + share):
                epoch, place = divmod(position, self.num_images)
                if order is None or order.epoch != epoch:
                    order = EpochOrder(self.num_images, self.seed, epoch)
                batch.append((position, order.images_at(range(place, place + 1))[0]))
            yield batch


def build_train_loader(
    cfg: CfgNode, data: DetectionData, seed: int, start: int, end: int, rank: int, world_size: int
) -> DataLoader[Any]:
    """Batches of iterations `start` to `end`, the same for any number of loader processes."""
    assert cfg.SOLVER.IMS_PER_BATCH % world_size == 0, "see recipe.adapt_to_processes"
    batch = cfg.SOLVER.IMS_PER_BATCH
    order = TrainingOrder(len(data.train), batch, seed, start, end, rank, world_size)
    images = MappedImages(data.train, DatasetMapper(cfg, is_train=True), seed)
    return build_loader(images, order, cfg.DATALOADER.NUM_WORKERS)


def build_test_loader(
    cfg: CfgNode,
    data: DetectionData,
    rank: int,
    world_size: int,
    indices: Sequence[int] | None = None,
) -> DataLoader[Any]:
    """The test images one by one, strided over the processes."""
    chosen = range(len(data.test)) if indices is None else indices
    mine = [[(index, index)] for index in list(chosen)[rank::world_size]]
    images = MappedImages(data.test, DatasetMapper(cfg, is_train=False), seed=0)
    return build_loader(images, mine, cfg.DATALOADER.NUM_WORKERS)

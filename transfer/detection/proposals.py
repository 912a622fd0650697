"""Proposals for Fast R-CNN: selective search over a data set, checks, recall (section 4.4).

The files themselves, ours and other tools', are `proposal_files`.
"""

import contextlib
import hashlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from instdisc.cli import say
from instdisc.errors import Interrupted, UserError
from instdisc.names import STOP_SIGNALS, VOC_VARIABLE
from instdisc.runs.folders import runs_root
from instdisc.runs.locks import FolderInUse, lock_folder
from instdisc.runs.log import Countdown
from instdisc.runs.signals import StopSignal, leave_signals_to_parent
from instdisc.training.cores import num_cores
from transfer.detection.average_precision import box_iou
from transfer.detection.proposal_files import (
    Array,
    Proposals,
    from_detectron_pkl,
    from_mat,
    read_proposals,
    write_proposals,
)
from transfer.detection.settings import ProposalsConfig, SearchMode
from transfer.detection.voc import (
    Record,
    VocSplit,
    find_class_names,
    fingerprint,
    read_voc,
)

__all__ = [
    "Proposals",
    "Summary",
    "await_proposals",
    "check_proposals",
    "from_detectron_pkl",
    "from_mat",
    "make_proposals",
    "proposal_file",
    "read_proposals",
    "recall",
    "run_proposals",
    "selective_search",
    "write_proposals",
]


@dataclass(frozen=True)
class Summary:
    """What a check saw; `notes` are facts that are no errors."""

    num_images: int
    num_boxes: int
    fewest: int
    median: float
    most: int
    notes: tuple[str, ...]


def selective_search(image: NDArray[np.uint8], mode: SearchMode = "fast") -> Array:
    """Proposals (K, 4) of a BGR image (H, W, 3), the most promising first.

    OpenCV's own order is drawn from the C library's random state, which differs from run to run,
    and puts the large regions last, where TOPK cuts: of 60 VOC2007 test images its first 1,000
    boxes reach a recall of 0.62 at IoU 0.7, in the order of the paper of selective search 0.74.
    There a box gets (its place by size, the largest 1) * (a random number), smallest first.
    """
    if mode not in ("fast", "quality"):
        raise UserError(f"unknown selective-search mode {mode!r}: expected fast or quality")
    search = cv2.ximgproc.segmentation.createSelectiveSearchSegmentation()
    search.setBaseImage(image)
    if mode == "fast":
        search.switchToSelectiveSearchFast()
    else:
        search.switchToSelectiveSearchQuality()
    found = np.asarray(search.process(), np.int64).reshape(-1, 4)  # x, y, width, height
    x, y, width, height = found.T
    found = found[np.lexsort((height, width, y, x, -width * height))]
    place = np.arange(1, len(found) + 1) * np.random.default_rng(0).random(len(found))
    boxes = found[np.argsort(place, kind="stable")]
    boxes[:, 2:] += boxes[:, :2]
    return boxes.astype(np.float32)


def proposal_file(split: VocSplit, source: str = "fast") -> Path:
    """Where the proposals of a split are kept unless another file is named.

    Args:
        split: whose images.
        source: the mode of the search, or `imported`.
    """
    key = fingerprint(split)[:8]  # other images of the same name have other proposals
    name = f"voc_{split.year}_{split.split}_{source}_{key}.pkl"
    return runs_root() / "proposals" / name


def make_proposals(
    split: VocSplit,
    out: Path,
    workers: int = 1,
    mode: SearchMode = "fast",
    *,
    progress: bool = True,
) -> Proposals:
    """Selective search over a split; goes on where a stopped or killed run was.

    Each finished image leaves a file in a work folder beside `out`; both appear by renaming, so
    what exists is complete. The folder is locked: another process that wants the same proposals
    waits for them. It goes when `out` is there.

    Raises:
        Interrupted: a signal asked for an end; the finished images are kept.
    """
    if out.exists():
        raise UserError(f"{out} exists: remove it to make the proposals anew")
    images = split.image_paths
    # Named after the source too: the images of another data set may have the same ids.
    source = hashlib.sha256(f"{split.folder.resolve()} {mode}".encode()).hexdigest()[:8]
    work = out.with_name(f"{out.name}.{source}.work")
    whole = work / "whole.pkl"
    told = not progress
    with StopSignal() as stop:
        while not out.exists():
            try:
                with lock_folder(work):
                    if not (whole.exists() or out.exists()):  # in this order: it moves to `out`
                        boxes = _search_images(images, work, workers, mode, stop, progress=progress)
                        write_proposals(whole, list(images), boxes)
                    for part in work.glob("*.npy*"):
                        part.unlink()
                # Once the lock is gone: what a kill leaves beside a finished file stays for good.
                if whole.exists():
                    whole.replace(out)
                with contextlib.suppress(OSError):  # another process is about to look into it
                    work.rmdir()
            except FolderInUse as error:
                if not told:
                    say(f"{error.args[0].partition(': ')[0]}: waiting for its proposals")
                told = True
                _pause(stop, out)
            except FileNotFoundError:
                # Else another process has published, or given up, and removed the folder meanwhile.
                if work.exists() and not out.exists():
                    raise
    return read_proposals(out)


def await_proposals(out: Path) -> Proposals:
    """The proposals that another process of the same job makes."""
    with StopSignal() as stop:
        while not out.exists():
            _pause(stop, out)
    return read_proposals(out)


def _pause(stop: StopSignal, out: Path) -> None:
    if stop.raised:
        raise Interrupted(f"stopped while waiting for {out}: run again to go on")
    time.sleep(0.5)


def _search_images(
    images: Mapping[str, Path],
    work: Path,
    workers: int,
    mode: SearchMode,
    stop: StopSignal,
    *,
    progress: bool,
) -> list[Array]:
    """The boxes of every image, of those without a file in the work folder by a search."""
    files = {image_id: work / f"{image_id}.npy" for image_id in images}
    jobs = [(str(images[i]), str(file), mode) for i, file in files.items() if not file.exists()]
    done = len(files) - len(jobs)
    with Countdown("selective search", len(files), done=done, enabled=progress, tell=say) as bar:
        if workers <= 1:
            for job in jobs:
                if stop.raised:
                    break
                _search_file(*job)
                bar.advance()
        else:
            _search_parallel(jobs, min(workers, len(jobs)), stop, bar.advance)
    if stop.raised:  # even if it was the last image: what comes next must not begin
        done = sum(file.exists() for file in files.values())
        raise Interrupted(
            f"stopped after selective search in {done} of {len(files)} images, kept in {work}: run "
            "again to go on"
        )
    try:
        return [np.load(file, allow_pickle=False) for file in files.values()]
    except (ValueError, EOFError, OSError) as error:
        raise UserError(f"{work} is damaged ({error}): remove it and start again") from None


def _search_parallel(
    jobs: Sequence[tuple[str, str, SearchMode]],
    workers: int,
    stop: StopSignal,
    report: Callable[[], object],
) -> None:
    if not jobs:
        return
    # Spawned, not forked: OpenCV and the progress bar have threads, which a fork would break.
    context = multiprocessing.get_context("spawn")
    # Blocked meanwhile: Python's resource tracker inherits that, and a signal to all processes of
    # the job would kill it.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker)
        futures = [pool.submit(_search_file, *job) for job in jobs]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        for future in as_completed(futures):
            future.result()
            report()
            if stop.raised:
                break
    except BrokenProcessPool:
        if not stop.raised:  # else the signal reached a worker before it could ignore it
            raise UserError("a worker died (out of memory?): run again to go on") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    leave_signals_to_parent()
    cv2.setNumThreads(1)  # the processes are the parallelism
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in workers only"

    def follow(sentinel: int = parent.sentinel) -> None:
        wait([sentinel])
        os._exit(1)  # a killed parent cannot stop its workers, and they would wait for ever

    threading.Thread(target=follow, daemon=True).start()


def _search_file(image: str, file: str, mode: SearchMode) -> None:
    pixels = cv2.imread(image, cv2.IMREAD_COLOR)
    if pixels is None:
        raise UserError(f"{image} is not an image that OpenCV can read: replace it")
    boxes = selective_search(np.asarray(pixels, np.uint8), mode)
    part = Path(f"{file}.{os.getpid()}.part")
    with part.open("wb") as stream:
        np.save(stream, boxes, allow_pickle=False)
    part.replace(file)


def check_proposals(proposals: Proposals, records: Sequence[Record]) -> Summary:
    """Checks proposals against the images they are for.

    Images without an entry, and boxes that are inverted or leave their image (as boxes of another
    image or with swapped axes do), are errors. What Detectron2 copes with is a note: entries of
    other images, another order, images without boxes, boxes of no area.
    """
    ids = [record["image_id"] for record in records]
    own = proposals.select(ids)
    num_empty = num_flat = 0
    for record, boxes in zip(records, own.boxes, strict=True):
        size = boxes[:, 2:] - boxes[:, :2]
        limit = np.array([record["width"], record["height"]]) + 1e-3  # float32 of resized boxes
        outside = (boxes[:, :2] < -1e-3).any(axis=1) | (boxes[:, 2:] > limit).any(axis=1)
        bad = np.flatnonzero(outside | (size < 0).any(axis=1))
        if bad.size:
            shown = ", ".join(f"{value:g}" for value in boxes[bad[0]])
            raise UserError(
                f"{bad.size} proposals of image {record['image_id']} are inverted or outside its "
                f"{record['width']}x{record['height']} pixels, the first: ({shown}): expected "
                "x1 y1 x2 y2 of this very image"
            )
        num_empty += not len(boxes)
        num_flat += int(np.count_nonzero((size == 0).any(axis=1)))
    known = set(ids)
    in_file_order = [i for i in proposals.ids if i in known]
    num_foreign = len(proposals.ids) - len(ids)
    notes = {
        f"{num_foreign} entries are of other images": num_foreign,
        "the images come in another order": in_file_order != ids,
        f"{num_empty} images have no boxes": num_empty,
        f"{num_flat} boxes have no area, Detectron2 drops them": num_flat,
    }
    counts = [len(boxes) for boxes in own.boxes]
    return Summary(
        num_images=len(counts),
        num_boxes=sum(counts),
        fewest=min(counts),
        median=float(np.median(counts)),
        most=max(counts),
        notes=tuple(note for note, applies in notes.items() if applies),
    )


def recall(
    proposals: Proposals,
    records: Sequence[Record],
    thresholds: Sequence[float] = (0.5, 0.7),
    *,
    max_boxes: int | None = None,
) -> dict[float, float]:
    """Share of the objects that some proposal of their image covers, for each IoU threshold.

    Difficult objects do not count, as in AP; NaN if there are no others.

    Args:
        proposals: of these images at least.
        records: the annotated images.
        thresholds: IoU that counts as covered.
        max_boxes: consider the best so many of an image (Detectron2's TOPK); all unless told.
    """
    best: list[NDArray[np.float64]] = []
    own = proposals.select([record["image_id"] for record in records])
    for record, boxes in zip(records, own.boxes, strict=True):
        objects = np.array([a["bbox"] for a in record["annotations"] if not a["difficult"]])
        if len(objects):
            overlap = box_iou(objects[:, None], boxes[None, :max_boxes].astype(np.float64))
            best.append(overlap.max(axis=1, initial=0.0))
    if not best:
        return dict.fromkeys(thresholds, float("nan"))
    covered = np.concatenate(best)
    return {t: float(np.mean(covered >= t)) for t in thresholds}


def run_proposals(config: ProposalsConfig) -> None:
    """The command: makes, imports or checks the proposals of each split."""
    root = config.voc_root or Path(os.environ.get(VOC_VARIABLE, "datasets"))
    splits = [VocSplit(root, config.year, name) for name in config.split]
    # All first, so that a damaged data set is known before hours of work.
    names = [find_class_names(split.root, split.year, [split.split]) for split in splits]
    records = [
        read_voc(split.root, split.year, split.split, own)
        for split, own in zip(splits, names, strict=True)
    ]
    for split, own in zip(splits, records, strict=True):
        _print_summary(_run_split(config, split, own), own)


def _run_split(config: ProposalsConfig, split: VocSplit, records: Sequence[Record]) -> Proposals:
    if config.action == "check":
        return read_proposals(config.files[0])
    source = config.mode if config.action == "make" else "imported"
    out = config.out or proposal_file(split, source)
    if config.action == "make":
        if config.out is None and out.exists():  # its name says of which images, and how
            say(f"{out} is there already")
            return read_proposals(out)
        workers = num_cores() if config.workers is None else config.workers
        proposals = make_proposals(split, out, workers, config.mode)
    else:
        proposals = _import_files(config.files, split.ids)
        check_proposals(proposals, records)  # a wrong file must not reach the disk
        write_proposals(out, proposals.ids, proposals.boxes, proposals.scores)
    say(f"wrote {out}")
    return proposals


def _import_files(files: Sequence[Path], ids: Sequence[str]) -> Proposals:
    readers = {".mat": from_mat, ".pkl": from_detectron_pkl, ".pickle": from_detectron_pkl}
    parts = []
    for file in files:
        reader = readers.get(file.suffix.lower())
        if reader is None:
            raise UserError(f"{file} has no known ending: expected .mat or .pkl")
        parts.append(reader(file, ids))
    merged = Proposals.build(
        [i for part in parts for i in part.ids],
        [boxes for part in parts for boxes in part.boxes],
        [scores for part in parts for scores in part.scores],
    )
    return merged.select(ids)


def _print_summary(proposals: Proposals, records: Sequence[Record]) -> None:
    summary = check_proposals(proposals, records)
    say(
        f"{summary.num_images} images, {summary.num_boxes} boxes, for an image "
        f"{summary.fewest} to {summary.most}, median {summary.median:g}"
    )
    for note in summary.notes:
        say(f"note: {note}")
    for limit in (None, 2000, 1000):
        if limit is not None and summary.most <= limit:
            continue
        shares = recall(proposals, records, max_boxes=limit).items()
        text = ", ".join(f"{share:.4f} at IoU {threshold:g}" for threshold, share in shares)
        say(f"recall of {'all' if limit is None else f'the best {limit}'}: {text}")

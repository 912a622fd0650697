"""transfer/detect.py at work: weights, recipe, trials, result rows (section 4.4)."""

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.utils import comm

from instdisc.cli import to_dict, volatile_fields
from instdisc.errors import UserError
from instdisc.names import TIMM
from instdisc.runs.folders import runs_root, write_json, write_text
from instdisc.runs.locks import lock_folder
from instdisc.runs.log import LOGGER, boxed, setup_logging
from instdisc.runs.results import Result, append_results, check_results, config_hash
from instdisc.training import dist
from instdisc.training.dist import Process
from transfer.detection import recipe
from transfer.detection.data import CocoSource, DetectionData, load_data, locate_data
from transfer.detection.evaluation import (
    HEADLINES,
    detect,
    draw_detections,
    measure,
    save_evaluation,
    summarise,
    table,
)
from transfer.detection.settings import DetectConfig, find_config
from transfer.detection.trainer import DetectionTrainer
from transfer.detection.voc import VocSource
from transfer.detection.weights import Initial, load_backbone_weights, prepare
from transfer.task import demo_banner, pretraining_facts


@dataclasses.dataclass(frozen=True)
class Study:
    """What all trials share.

    Attributes:
        config: the command's flags.
        process: this process.
        cfg: the recipe as Detectron2 takes it.
        data: the images.
        initial: what the detector starts from.
        folder: of the run.
        scaled: the schedule, if the number of processes has changed the recipe's; else empty.
    """

    config: DetectConfig
    process: Process
    cfg: CfgNode
    data: DetectionData
    initial: Initial
    folder: Path
    scaled: str

    @property
    def protocol(self) -> str:
        """The config, the images, and what command line and processes changed of the config."""
        changed = " ".join(self.config.opts)
        parts = (self.config.recipe, self.data.splits, changed, self.scaled)
        return ", ".join(part for part in parts if part)

    @property
    def identity(self) -> dict[str, Any]:
        """What makes two runs the same one; a folder holds runs of one identity only."""
        cfg = self.cfg.clone()
        cfg.defrost()
        # Where and how it runs is no part of what it computes.
        cfg.OUTPUT_DIR, cfg.MODEL.DEVICE, cfg.DATALOADER.NUM_WORKERS = "", "", 0
        return {
            "recipe": cfg.dump(),
            "init": self.config.init,
            "weights": self.initial.hash,
            "data": self.data.fingerprint,
        }


def run_detect(config: DetectConfig) -> None:
    """The command, in this process or in each of those that torchrun started."""
    with dist.joined(config.device, config.threads) as process:
        setup_logging(None, is_main=process.is_main)
        if process.world_size > 1:
            comm.create_local_process_group(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        _run_study(config, process)


def _run_study(config: DetectConfig, process: Process) -> None:
    """Trains and evaluates every trial, then says the mean."""
    folder = config.output or runs_root() / "detect" / config.run_name
    with lock_folder(folder) if process.is_main else contextlib.nullcontext():
        _route_logs(folder / "log.txt", is_main=process.is_main)
        study = _open(config, process, folder)
        if process.is_main:
            _claim(study)
        dist.barrier()
        values = [_run_trial(study, trial) for trial in range(config.trials)]
        if process.is_main:
            _conclude(study, values)


def _route_logs(file: Path, *, is_main: bool) -> None:
    """Sends our log to screen and file, Detectron2's to the file alone."""
    setup_logging(file, is_main=is_main)
    for name in ("detectron2", "fvcore"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = False
        logger.setLevel(logging.INFO if is_main else logging.ERROR)
        for handler in LOGGER.handlers:
            if isinstance(handler, logging.FileHandler):
                logger.addHandler(handler)
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())


def _open(config: DetectConfig, process: Process, folder: Path) -> Study:
    file = find_config(config.cfg)
    cfg = recipe.read_config(file, config.opts)
    source = locate_data(config, cfg)
    if source.is_demo:
        cfg = recipe.read_config(file, config.opts, demo=True)
        if process.is_main:
            flag = "--voc-root" if isinstance(source, VocSource) else "--coco-root"
            LOGGER.warning(demo_banner(f"{flag} DIR or DETECTRON2_DATASETS"))
    if isinstance(source, CocoSource):  # of files that were named, what they are called
        cfg.DATASETS.TRAIN = tuple(split.name for split in source.train)
        cfg.DATASETS.TEST = tuple(split.name for split in source.test)
    recipe_batch = cfg.SOLVER.IMS_PER_BATCH
    scaled = recipe.adapt_to_processes(cfg, process.world_size, config.opts)
    arch = recipe.arch_of(cfg)
    if isinstance(source, VocSource):
        source.splits((*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST))  # tells of a missing list
    # The first process converts, the others are told where it lies.
    with_pyramid = cfg.MODEL.BACKBONE.NAME == "build_resnet_fpn_backbone"
    converted = (
        prepare(config.init, config.weights, arch, folder, with_pyramid=with_pyramid)
        if process.is_main
        else None
    )
    initial = comm.all_gather(converted)[0]
    data = load_data(
        cfg,
        source,
        make_missing=config.make_proposals or source.is_demo,
        is_main=process.is_main,
    )
    recipe.adapt_to_masks(cfg, has_run_lengths=data.has_run_lengths, opts=config.opts)
    if initial.folder is None:
        recipe.adapt_to_scratch(cfg, config.opts)
    else:
        recipe.adapt_to_weights(cfg, initial.sidecar, config.opts)
        if initial.arch.startswith(TIMM) and initial.name.startswith(("random:", "untrained:")):
            recipe.adapt_to_scratch(cfg, config.opts)
    if process.world_size > 1 and process.device.type == "cpu":
        recipe.adapt_to_gloo(cfg)
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = len(data.class_names)
    cfg.MODEL.DEVICE = str(process.device)
    LOGGER.info(
        f"detect: {config.recipe} from {initial.name}, {data.splits} "
        f"({len(data.train)} and {len(data.test)} images, {len(data.class_names)} classes), "
        f"{process.world_size} process(es) on {process.device.type}"
    )
    if scaled:
        LOGGER.warning(
            boxed(
                f"{process.world_size} processes, and the recipe has {recipe_batch} images an "
                f"iteration. Scaled linearly, not the recipe's own schedule: {scaled}. Start "
                f"{recipe_batch} processes or fewer for the recipe's own."
            )
        )
    for note in initial.notes:
        LOGGER.info(f"note: {note}")
    LOGGER.info(recipe.describe(cfg))
    return Study(config, process, cfg, data, initial, folder, scaled)


def _claim(study: Study) -> None:
    """Makes the folder this study's own; refuses one that holds another."""
    file = study.folder / "identity.json"
    known = json.loads(file.read_text("utf-8")) if file.exists() else None
    if known is not None and known != study.identity and study.config.resume:
        changed = ", ".join(k for k, v in study.identity.items() if known.get(k) != v)
        raise UserError(
            f"{study.folder} holds a run of another {changed}: give --no-resume to replace it, or "
            "another --output"
        )
    if not study.config.resume and not study.config.eval_only:
        for trial in study.folder.glob("trial-*"):
            shutil.rmtree(trial)
    write_json(file, study.identity)
    write_json(study.folder / "config.json", to_dict(study.config))


def _run_trial(study: Study, trial: int) -> dict[str, float]:
    """One seed: trains what is left to train, evaluates, keeps; its APs."""
    seed = study.config.seed + trial
    folder = study.folder / f"trial-{seed}"
    done = folder / "result.json"
    if done.exists() and not study.config.eval_only:
        values: dict[str, float] = json.loads(done.read_text("utf-8"))["values"]
        LOGGER.info(f"seed {seed} is finished: {summarise(values)} ({folder})")
        return values
    cfg = study.cfg.clone()
    cfg.OUTPUT_DIR, cfg.SEED = str(folder), seed
    cfg.freeze()
    folder.mkdir(parents=True, exist_ok=True)
    if study.process.is_main:
        write_text(folder / "config.yaml", cfg.dump())
    trainer = DetectionTrainer(cfg, study.data, seed, study.process)
    start = trainer.restore()
    if start == 0:
        if study.config.eval_only:
            raise UserError(f"--eval-only, and {folder} has no checkpoint: train first")
        _initialise(trainer, study.initial)
    else:
        LOGGER.info(f"going on with iteration {start} of {cfg.SOLVER.MAX_ITER}")
    if not study.config.eval_only and start < cfg.SOLVER.MAX_ITER:
        trainer.fit(start)
    return _evaluate(study, trainer, cfg, folder, seed)


def _initialise(trainer: DetectionTrainer, initial: Initial) -> None:
    if initial.folder is None:
        LOGGER.info("from scratch: no pretrained tensor")
        return
    count = load_backbone_weights(trainer.detector, initial.folder)
    LOGGER.info(f"{count} of {count} tensors of {initial.name} arrived in the detector")


def _evaluate(
    study: Study, trainer: DetectionTrainer, cfg: CfgNode, folder: Path, seed: int
) -> dict[str, float]:
    found = detect(trainer.detector, cfg, study.data, study.process)
    if not study.process.is_main:
        dist.barrier()
        return {}
    evaluation = measure(found, study.data)
    values, per_class = evaluation.values, evaluation.per_class
    split = cfg.DATASETS.TEST[0].rpartition("_")[2]
    save_evaluation(folder, found, evaluation, study.data, split)
    LOGGER.info(f"\n{table(evaluation)}")
    draw_detections(folder / "pictures", trainer.detector, cfg, study.data, study.config.pictures)
    details = {
        "per_class": per_class,
        "num_train": study.data.num_listed,
        "num_test": len(study.data.test),
        "iterations": cfg.SOLVER.MAX_ITER,
        "batch_size": cfg.SOLVER.IMS_PER_BATCH,
        "lr": cfg.SOLVER.BASE_LR,
        "processes": study.process.world_size,
        "init": study.config.init.partition(":")[0],
        "folder": os.path.relpath(folder, runs_root()),
        "device": str(study.process.device),
        "pretraining": pretraining_facts(study.initial.pretraining),
    }
    rows = _rows(study, values, seed, details)
    path = append_results(rows)
    write_json(folder / "result.json", {"values": values, "per_class": per_class})
    LOGGER.info(f"{summarise(values)} (seed {seed}); rows added to {path}; files in {folder}")
    dist.barrier()
    return values


def _rows(
    study: Study, values: dict[str, float], seed: int, details: dict[str, Any]
) -> list[Result]:
    kept = {
        key: value
        for key, value in to_dict(study.config).items()
        if key not in volatile_fields(DetectConfig) | {"seed", "trials"}
    }
    return [
        Result(
            task="detect",
            protocol=study.protocol,
            arch=study.initial.arch,
            weights=study.initial.name,
            weights_hash=study.initial.hash,
            dataset="demo" if study.data.is_demo else study.data.splits,
            data_fingerprint=study.data.fingerprint,
            metric=metric,
            value=value,
            seed=seed,
            config_hash=config_hash({"task": "detect", **kept, **study.identity}),
            details=details,
        )
        for metric, value in values.items()
    ]


def _conclude(study: Study, values: list[dict[str, float]]) -> None:
    """The mean over the trials, where there are several."""
    label = " (demo)" if study.data.is_demo else ""
    named = {name: word for name, word in HEADLINES.items() if name in values[0]}
    if len(values) > 1:
        for name, word in named.items():
            scores = [trial[name] for trial in values]
            LOGGER.info(
                f"{word} {statistics.mean(scores):.2f} ± {statistics.stdev(scores):.2f} over "
                f"{len(scores)} trials{label}"
            )
    else:
        what = ", VOC07 11-point at IoU 0.5" if study.data.category_ids is None else ""
        LOGGER.info(f"{summarise(values[0])}{label}{what}")
    if study.data.is_demo and study.config.init == "ours":
        LOGGER.info(_describe_scratch(study))


def _describe_scratch(study: Study) -> str:
    """What the same recipe gave from scratch, if it was measured."""
    found = {
        row.metric: row.value
        for row in check_results()[0]
        if (row.task, row.weights) == ("detect", "scratch")
        and (row.protocol, row.data_fingerprint) == (study.protocol, study.data.fingerprint)
    }
    if not found:
        return "from scratch: not measured yet; the same command with --init scratch does"
    return f"from scratch: {summarise(found)}"

"""transfer/detect.py at work: weights, recipe, trials, result rows (section 4.4)."""

import contextlib
import dataclasses
import json
import os
import shutil
import statistics
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode

from instdisc.cli import to_dict, volatile_fields
from instdisc.errors import UserError
from instdisc.runs.folders import runs_root, write_json, write_text
from instdisc.runs.locks import lock_folder
from instdisc.runs.log import LOGGER
from instdisc.runs.results import Result, append_results, check_results, config_hash
from instdisc.training import dist
from instdisc.training.dist import Process
from transfer.detection import recipe
from transfer.detection.data import VocData, load_voc_data, locate_voc
from transfer.detection.drawing import draw_detections
from transfer.detection.evaluation import detect, measure, per_class, save_evaluation, table
from transfer.detection.logs import route_logs
from transfer.detection.settings import DetectConfig, find_config
from transfer.detection.trainer import DetectionTrainer
from transfer.detection.weights import Initial, load_backbone_weights, prepare
from transfer.task import demo_banner, pretraining_facts

METRIC = "ap50_11point"


@dataclasses.dataclass(frozen=True)
class Study:
    """What all trials share."""

    config: DetectConfig
    process: Process
    cfg: CfgNode
    data: VocData
    initial: Initial
    arch: str
    folder: Path

    @property
    def protocol(self) -> str:
        """The config, the images, and what the command line changed of the config."""
        changed = " ".join(self.config.opts)
        return f"{self.config.cfg.stem}, {self.data.splits}" + (f", {changed}" if changed else "")

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


def run_detect(config: DetectConfig, process: Process) -> None:
    """Trains and evaluates every trial, then says the mean."""
    folder = config.output or runs_root() / "detect" / config.run_name
    with lock_folder(folder) if process.is_main else contextlib.nullcontext():
        route_logs(folder / "log.txt", is_main=process.is_main)
        study = _open(config, process, folder)
        if process.is_main:
            _claim(study)
        dist.barrier()
        values = [_run_trial(study, trial) for trial in range(config.trials)]
        if process.is_main:
            _conclude(study, values)


def _open(config: DetectConfig, process: Process, folder: Path) -> Study:
    source = locate_voc(config.voc_root)
    if source.is_demo and process.is_main:
        LOGGER.warning(demo_banner("--voc-root DIR or DETECTRON2_DATASETS"))
    cfg = recipe.read_config(find_config(config.cfg), config.opts, demo=source.is_demo)
    arch = recipe.arch_of(cfg)
    source.splits((*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST))  # tells of a missing list
    if process.is_main:  # the first process converts and makes proposals, the others find them
        initial = prepare(config.init, config.weights, arch, folder)
        data = load_voc_data(cfg, source, make_missing=config.make_proposals or source.is_demo)
    dist.barrier()
    if not process.is_main:
        initial = prepare(config.init, config.weights, arch, folder)
        data = load_voc_data(cfg, source, make_missing=False)
    if initial.folder is None:
        recipe.adapt_to_scratch(cfg)
    else:
        recipe.adapt_to_weights(cfg, initial.sidecar)
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = len(data.class_names)
    cfg.MODEL.DEVICE = str(process.device)
    cfg.MODEL.WEIGHTS = ""  # loaded and proved by ourselves
    LOGGER.info(
        f"detect: {config.cfg.stem} from {initial.name}, {data.splits} "
        f"({len(data.train)} and {len(data.test)} images, {len(data.class_names)} classes), "
        f"{process.world_size} process(es) on {process.device.type}"
    )
    for note in initial.notes:
        LOGGER.info(f"note: {note}")
    LOGGER.info(recipe.describe(cfg))
    return Study(config, process, cfg, data, initial, arch, folder)


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
        LOGGER.info(f"seed {seed} is finished: mAP {values[METRIC]:.2f} ({folder})")
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
    values, result = measure(found, study.data)
    split = cfg.DATASETS.TEST[0].rpartition("_")[2]
    save_evaluation(folder, found, values, result, split)
    LOGGER.info(f"\n{table(values, result)}")
    draw_detections(folder / "pictures", trainer.detector, cfg, study.data, study.config.pictures)
    details = {
        "per_class": per_class(result),
        "num_train": study.data.num_listed,
        "num_test": len(study.data.test),
        "iterations": cfg.SOLVER.MAX_ITER,
        "init": study.config.init.partition(":")[0],
        "folder": os.path.relpath(folder, runs_root()),
        "device": str(study.process.device),
        "pretraining": pretraining_facts(study.initial.pretraining),
    }
    rows = _rows(study, values, seed, details)
    path = append_results(rows)
    write_json(folder / "result.json", {"values": values, "per_class": per_class(result)})
    LOGGER.info(f"mAP {values[METRIC]:.2f} (seed {seed}); rows added to {path}; files in {folder}")
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
            arch=study.arch,
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
    scores = [trial[METRIC] for trial in values]
    if len(scores) > 1:
        spread = statistics.stdev(scores)
        LOGGER.info(
            f"mAP {statistics.mean(scores):.2f} ± {spread:.2f} over {len(scores)} trials{label}"
        )
    else:
        LOGGER.info(f"mAP {scores[0]:.2f}{label}, VOC07 11-point at IoU 0.5")
    if study.data.is_demo and study.config.init == "ours":
        LOGGER.info(_describe_scratch(study))


def _describe_scratch(study: Study) -> str:
    """What the same recipe gave from scratch, if it was measured."""
    found = [
        row.value
        for row in check_results()[0]
        if (row.task, row.weights, row.metric) == ("detect", "scratch", METRIC)
        and (row.protocol, row.data_fingerprint) == (study.protocol, study.data.fingerprint)
    ]
    if not found:
        return "from scratch: not measured yet; the same command with --init scratch does"
    return f"from scratch: mAP {found[-1]:.2f}"

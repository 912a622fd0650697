"""From a YAML file, the data and the weights to the config that Detectron2 runs with."""

from collections.abc import Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import IO, Any

import yaml
from detectron2.config import CfgNode, get_cfg

from instdisc.errors import UserError

# Keys that follow the batch size: how each changes when the batch is `factor` times the reference.
SCALED_UP = ("SOLVER.BASE_LR",)
SCALED_DOWN = (
    *("SOLVER.MAX_ITER", "SOLVER.STEPS", "SOLVER.WARMUP_ITERS"),
    *("SOLVER.CHECKPOINT_PERIOD", "TEST.EVAL_PERIOD"),
)


def add_transfer_config(cfg: CfgNode) -> CfgNode:
    """Adds the keys that Detectron2 does not have, all below TRANSFER.

    REFERENCE_BATCH: the images an iteration that the file's schedule is for.
    RES5_NORM: the kind of an extra norm after res5, none if empty (MoCo's recipe).
    TRAIN_ON_DIFFICULT: whether objects marked difficult are learnt; in the devkit's tradition not.
    DEMO_KEYS: keys and values for the embedded images, over those of demo.yaml.
    """
    cfg.TRANSFER = CfgNode()
    cfg.TRANSFER.REFERENCE_BATCH = 2
    cfg.TRANSFER.RES5_NORM = ""
    cfg.TRANSFER.TRAIN_ON_DIFFICULT = False
    cfg.TRANSFER.DEMO_KEYS = []
    return cfg


def read_config(file: Path, opts: Sequence[str] = (), *, demo: bool = False) -> CfgNode:
    """Reads a config, puts the demo recipe over it if asked, then the trailing keys.

    Raises:
        UserError: the file, or a key, is not one of Detectron2's or ours.
    """
    cfg = add_transfer_config(get_cfg())
    _merge(cfg, file)
    if demo:
        with as_file(files("detection_configs") / "demo.yaml") as path:
            _merge(cfg, path)
        cfg.merge_from_list(cfg.TRANSFER.DEMO_KEYS)
    try:
        cfg.merge_from_list(list(opts))
    except (KeyError, AssertionError, ValueError) as error:
        raise UserError(f"{' '.join(opts)}: {_reason(error)}") from None
    try:
        if demo and "SOLVER.STEPS" not in opts:
            cfg.SOLVER.STEPS = (max(1, round(0.8 * cfg.SOLVER.MAX_ITER)),)
        scale_to_batch(cfg, opts)
        # A drop at or after the end changes nothing, and Detectron2's scheduler refuses some.
        cfg.SOLVER.STEPS = tuple(step for step in cfg.SOLVER.STEPS if step < cfg.SOLVER.MAX_ITER)
    except (KeyError, AttributeError, TypeError, ArithmeticError) as error:
        raise UserError(f"{file}: SOLVER or TRANSFER makes no sense: {_reason(error)}") from None
    return cfg


class _LocalConfig(CfgNode):
    """Reads a config and its `_BASE_` from disk only; Detectron2's own would also fetch them."""

    @classmethod
    def _open_cfg(cls, filename: str) -> IO[str]:
        if "://" in filename:
            raise ValueError(f"_BASE_ is {filename}, and nothing is fetched: save it beside")
        return Path(filename).open(encoding="utf-8")


def _merge(cfg: CfgNode, file: Path) -> None:
    try:
        _LocalConfig.load_yaml_with_base(str(file), allow_unsafe=False)
        # Detectron2's default would run what a tag such as !!python/object/apply names.
        cfg.merge_from_file(str(file), allow_unsafe=False)
    except RecursionError:
        raise UserError(f"{file}: nested too deeply, or a _BASE_ that names itself") from None
    except (KeyError, AssertionError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: {_reason(error)}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{file} is not YAML: {_reason(error)}") from None
    except OSError as error:
        raise UserError(f"{file} names a _BASE_ that is not there: {error.filename}") from None


def _reason(error: Exception) -> str:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__


def _get(cfg: CfgNode, key: str) -> Any:
    for part in key.split("."):
        cfg = cfg[part]
    return cfg


def _put(cfg: CfgNode, key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    _get(cfg, section)[name] = value


def scale_to_batch(cfg: CfgNode, opts: Sequence[str] = ()) -> float:
    """Fits lr, steps and warm-up to the batch: k times the images, k times the lr, 1/k the steps.

    Keys that the user gave stay as given. Returns k; the reference batch becomes the batch.
    """
    factor = cfg.SOLVER.IMS_PER_BATCH / cfg.TRANSFER.REFERENCE_BATCH
    if factor <= 0:
        raise UserError(f"SOLVER.IMS_PER_BATCH {cfg.SOLVER.IMS_PER_BATCH}: at least 1")
    given = set(opts[::2])
    for key in SCALED_UP:
        if key not in given:
            _put(cfg, key, _get(cfg, key) * factor)
    for key in SCALED_DOWN:
        value = _get(cfg, key)
        if key in given:
            continue
        if isinstance(value, tuple | list):
            _put(cfg, key, tuple(round(step / factor) for step in value))
        else:
            _put(cfg, key, max(1, round(value / factor)) if value else value)
    cfg.TRANSFER.REFERENCE_BATCH = cfg.SOLVER.IMS_PER_BATCH
    return float(factor)


def arch_of(cfg: CfgNode) -> str:
    """Which of our backbones a config is for."""
    name = cfg.MODEL.BACKBONE.NAME
    for arch in ("alexnet", "vgg16"):
        if arch in name:
            return arch
    return f"resnet{cfg.MODEL.RESNETS.DEPTH}"


def adapt_to_weights(cfg: CfgNode, sidecar: Mapping[str, Any]) -> None:
    """Merges what the converter wrote beside the weights: pixels, depth, strides."""
    cfg.merge_from_other_cfg(CfgNode(dict(sidecar)))


def adapt_to_scratch(cfg: CfgNode) -> None:
    """Trains everything, norms too: a random network with frozen norms diverges at once."""
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    if cfg.MODEL.RESNETS.NORM == "FrozenBN":
        cfg.MODEL.RESNETS.NORM = "BN"


def describe(cfg: CfgNode) -> str:
    """The effective recipe in a line or two."""
    solver = cfg.SOLVER
    drops = ", ".join(str(step) for step in solver.STEPS if step < solver.MAX_ITER) or "never"
    frozen = cfg.MODEL.BACKBONE.FREEZE_AT
    sides = {min(cfg.INPUT.MIN_SIZE_TRAIN), max(cfg.INPUT.MIN_SIZE_TRAIN)}
    norm = f", norms {cfg.MODEL.RESNETS.NORM}" if arch_of(cfg).startswith("resnet") else ""
    return (
        f"recipe: {solver.MAX_ITER} iterations of {solver.IMS_PER_BATCH} images, "
        f"lr {solver.BASE_LR:g} x{solver.GAMMA:g} at {drops}, warm-up {solver.WARMUP_ITERS}, "
        f"weight decay {solver.WEIGHT_DECAY:g}\n"
        f"        {cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE} regions an image, short side "
        f"{'-'.join(str(size) for size in sorted(sides))} "
        f"(test {cfg.INPUT.MIN_SIZE_TEST}), first {frozen} stages fixed{norm}"
    )

"""From a YAML file, the data and the weights to the config that Detectron2 runs with."""

import io
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import as_file, files
from pathlib import Path
from typing import IO, Any

import yaml
from detectron2.config import CfgNode, get_cfg

from instdisc.errors import UserError
from instdisc.names import TIMM
from instdisc.untrusted.limits import LARGEST_CONFIG, check_yaml, read_limited

MAX_FILES = 20  # a config and what its `_BASE_` leads to
BATCH = "SOLVER.IMS_PER_BATCH"
# Keys that follow the batch size: how each changes when the batch is `factor` times the reference.
SCALED_UP = ("SOLVER.BASE_LR",)
SCALED_DOWN = (
    *("SOLVER.MAX_ITER", "SOLVER.STEPS", "SOLVER.WARMUP_ITERS"),
    *("SOLVER.CHECKPOINT_PERIOD", "TEST.EVAL_PERIOD"),
)
_ONE_ORDER = "leave it out: every pass has each image that has objects once, in a random order"
_TWO_STAGES = "leave it out: boxes and masks are learnt, by Fast, Faster or Mask R-CNN"
# Keys and sections of Detectron2 that nothing here would obey, and what to do instead.
REFUSED = {
    "MODEL.WEIGHTS": "use --weights, or --init supervised:FILE",
    "TRANSFER.TIMM": "use --weights timm:NAME",
    "MODEL.DEVICE": "use --device",
    "OUTPUT_DIR": "use --output",
    "SEED": "use --seed",
    "MODEL.ROI_HEADS.NUM_CLASSES": "leave it out: the annotations name the classes",
    "SOLVER.REFERENCE_WORLD_SIZE": f"leave it out: the schedule follows {BATCH}",
    "TEST.AUG": "leave it out: a test image is seen once, at INPUT.MIN_SIZE_TEST",
    "TEST.EXPECTED_RESULTS": "leave it out, and compare with the result rows",
    "CUDNN_BENCHMARK": "leave it out: images of many sizes would be timed again and again",
    "DATALOADER.SAMPLER_TRAIN": _ONE_ORDER,
    "DATALOADER.REPEAT_THRESHOLD": _ONE_ORDER,
    "DATALOADER.REPEAT_SQRT": _ONE_ORDER,
    "DATALOADER.ASPECT_RATIO_GROUPING": _ONE_ORDER,
    "DATALOADER.FILTER_EMPTY_ANNOTATIONS": _ONE_ORDER,
    "MODEL.META_ARCHITECTURE": _TWO_STAGES,
    "MODEL.KEYPOINT_ON": _TWO_STAGES,
    "MODEL.ROI_KEYPOINT_HEAD": _TWO_STAGES,
    "MODEL.RETINANET": _TWO_STAGES,
    "MODEL.SEM_SEG_HEAD": _TWO_STAGES,
    "MODEL.PANOPTIC_FPN": _TWO_STAGES,
    "TEST.KEYPOINT_OKS_SIGMAS": _TWO_STAGES,
    "GLOBAL.HACK": "leave it out: no model here reads it",
}
MASK_KEYS = ("MODEL.ROI_MASK_HEAD", "INPUT.MASK_FORMAT")  # obeyed where MODEL.MASK_ON is True


def add_transfer_config(cfg: CfgNode) -> CfgNode:
    """Adds the keys that Detectron2 does not have, all below TRANSFER.

    FC_DROPOUT: the share of fc6's and fc7's outputs that training drops, as Fast R-CNN does.
    REFERENCE_BATCH: the images an iteration that the file's schedule is for.
    RES5_NORM: the kind of an extra norm after res5, none if empty (MoCo's recipe).
    TIMM: the timm network of build_timm_fpn_backbone; the weights tell it.
    TRAIN_ON_DIFFICULT: whether objects marked difficult are learnt; in the devkit's tradition not.
    DEMO_KEYS: keys and values for the embedded images, over those of demo.yaml.
    """
    cfg.TRANSFER = CfgNode()
    cfg.TRANSFER.FC_DROPOUT = 0.0
    cfg.TRANSFER.REFERENCE_BATCH = 2
    cfg.TRANSFER.RES5_NORM = ""
    cfg.TRANSFER.TIMM = ""
    cfg.TRANSFER.TRAIN_ON_DIFFICULT = False
    cfg.TRANSFER.DEMO_KEYS = []
    return cfg


def read_config(file: Path, opts: Sequence[str] = (), *, demo: bool = False) -> CfgNode:
    """Reads a config, puts the demo recipe over it if asked, then the trailing keys.

    Raises:
        UserError: the file, or a key, is not one of Detectron2's or ours, or is not obeyed here.
    """
    cfg = add_transfer_config(get_cfg())
    _merge(cfg, file)
    if demo:
        with as_file(files("detection_configs") / "demo.yaml") as path:
            _merge(cfg, path)
        cfg.DATASETS.TRAIN = cfg.DATASETS.TRAIN[:1]  # there is one year of them
        cfg.merge_from_list(cfg.TRANSFER.DEMO_KEYS)
    try:
        cfg.merge_from_list(list(opts))
    except (KeyError, AssertionError, ValueError) as error:
        raise UserError(f"{' '.join(opts)}: {_reason(error)}") from None
    try:
        if demo and "SOLVER.STEPS" not in opts:
            cfg.SOLVER.STEPS = (max(1, round(0.8 * cfg.SOLVER.MAX_ITER)),)
        scale_to_batch(cfg, opts)
    except (KeyError, AttributeError, TypeError, ArithmeticError) as error:
        raise UserError(f"{file}: SOLVER or TRANSFER makes no sense: {_reason(error)}") from None
    _refuse_without_effect(cfg, opts)
    return cfg


def _leaves(node: CfgNode, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each key with its value, as on the command line."""
    for name, value in node.items():
        if isinstance(value, CfgNode):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _refuse_without_effect(cfg: CfgNode, opts: Sequence[str]) -> None:
    given, default = set(opts[::2]), dict(_leaves(add_transfer_config(get_cfg())))
    for key, value in _leaves(cfg):
        if key in given or value != default.get(key):
            for refused, instead in REFUSED.items():
                if f"{key}.".startswith(f"{refused}."):
                    raise UserError(f"{key} {value} would have no effect here: {instead}")
            if not cfg.MODEL.MASK_ON and any(f"{key}.".startswith(f"{k}.") for k in MASK_KEYS):
                raise UserError(f"{key} {value} would have no effect: MODEL.MASK_ON is False")
    searched = cfg.MODEL.PROPOSAL_GENERATOR.NAME == "PrecomputedProposals"
    if searched != cfg.MODEL.LOAD_PROPOSALS:
        raise UserError(
            f"MODEL.LOAD_PROPOSALS {cfg.MODEL.LOAD_PROPOSALS} with MODEL.PROPOSAL_GENERATOR.NAME "
            f"{cfg.MODEL.PROPOSAL_GENERATOR.NAME}: True goes with PrecomputedProposals, False with "
            "the others"
        )
    if not searched and (cfg.DATASETS.PROPOSAL_FILES_TRAIN or cfg.DATASETS.PROPOSAL_FILES_TEST):
        raise UserError(
            "DATASETS.PROPOSAL_FILES_TRAIN and _TEST are for Fast R-CNN, and this config finds its "
            "own proposals: leave them out"
        )


class _LocalConfig(CfgNode):
    """Reads a config and its `_BASE_` from disk only; Detectron2's own would also fetch them."""

    files_left = 0

    @classmethod
    def _open_cfg(cls, filename: str) -> IO[str]:
        if "://" in filename:
            raise ValueError(f"_BASE_ is {filename}, and nothing is fetched: save it beside")
        if cls.files_left == 0:
            raise ValueError(f"a _BASE_ that names itself, or more than {MAX_FILES} files")
        cls.files_left -= 1
        text = read_limited(Path(filename), LARGEST_CONFIG).decode("utf-8")
        check_yaml(text)
        return io.StringIO(text)


def _merge(cfg: CfgNode, file: Path) -> None:
    _LocalConfig.files_left = MAX_FILES
    try:
        _LocalConfig.load_yaml_with_base(str(file), allow_unsafe=False)
        # Detectron2's default would run what a tag such as !!python/object/apply names.
        cfg.merge_from_file(str(file), allow_unsafe=False)
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
    # A drop at or after the end changes nothing, and Detectron2's scheduler refuses some.
    cfg.SOLVER.STEPS = tuple(step for step in cfg.SOLVER.STEPS if step < cfg.SOLVER.MAX_ITER)
    cfg.TRANSFER.REFERENCE_BATCH = cfg.SOLVER.IMS_PER_BATCH
    return float(factor)


def adapt_to_processes(cfg: CfgNode, world_size: int, opts: Sequence[str] = ()) -> str:
    """Gives each process an image at least: a recipe's smaller batch grows, scaled as any other.

    Returns:
        The schedule that became of it, for log and results; empty if the recipe's own fits.

    Raises:
        UserError: the batch, or the one that the user gave, does not divide by the processes.
    """
    batch = cfg.SOLVER.IMS_PER_BATCH
    if batch < world_size and BATCH not in opts[::2]:
        cfg.SOLVER.IMS_PER_BATCH = world_size
        scale_to_batch(cfg, opts)
        solver = cfg.SOLVER
        return (
            f"{solver.IMS_PER_BATCH} images an iteration, {solver.MAX_ITER} iterations, "
            f"lr {solver.BASE_LR:g}"
        )
    if batch % world_size:
        fitting = ", ".join(str(count) for count in range(1, batch + 1) if batch % count == 0)
        raise UserError(
            f"{BATCH} {batch} does not divide by {world_size} processes: give a multiple of "
            f"{world_size}, or start another number ({fitting})"
        )
    return ""


def adapt_to_gloo(cfg: CfgNode) -> None:
    """Puts Detectron2's own synchronised norm in the place of torch's, which wants GPUs."""
    for key in ("MODEL.RESNETS.NORM", "MODEL.FPN.NORM", "TRANSFER.RES5_NORM"):
        if _get(cfg, key) == "SyncBN":
            _put(cfg, key, "naiveSyncBN")


def arch_of(cfg: CfgNode) -> str:
    """Which of our backbones a config is for."""
    name = cfg.MODEL.BACKBONE.NAME
    if cfg.TRANSFER.TIMM:
        return TIMM + cfg.TRANSFER.TIMM
    for arch in ("alexnet", "vgg16"):
        if arch in name:
            return arch
    return f"resnet{cfg.MODEL.RESNETS.DEPTH}"


def adapt_to_weights(cfg: CfgNode, sidecar: Mapping[str, Any], opts: Sequence[str] = ()) -> None:
    """Merges what the converter wrote beside the weights: pixels, depth, strides."""
    told = CfgNode(dict(sidecar))
    for key, value in _leaves(told):
        if key in opts[::2] and value != _get(cfg, key):
            raise UserError(f"{key} {_get(cfg, key)}: the weights need {value}: leave it out")
    cfg.merge_from_other_cfg(told)


def adapt_to_masks(cfg: CfgNode, *, has_run_lengths: bool, opts: Sequence[str] = ()) -> None:
    """Learns masks that are no polygons as bit masks; polygons as Detectron2 does by default."""
    if not (cfg.MODEL.MASK_ON and has_run_lengths) or cfg.INPUT.MASK_FORMAT == "bitmask":
        return
    if "INPUT.MASK_FORMAT" in opts[::2]:
        raise UserError(
            "INPUT.MASK_FORMAT polygon: masks of the annotations are run lengths: leave it out"
        )
    cfg.INPUT.MASK_FORMAT = "bitmask"


def adapt_to_scratch(cfg: CfgNode, opts: Sequence[str] = ()) -> None:
    """Trains everything, norms too: a random network with frozen norms diverges at once."""
    if "MODEL.BACKBONE.FREEZE_AT" in opts[::2] and cfg.MODEL.BACKBONE.FREEZE_AT:
        raise UserError("MODEL.BACKBONE.FREEZE_AT: --init scratch trains all of it: leave it out")
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    if cfg.MODEL.RESNETS.NORM == "FrozenBN":
        cfg.MODEL.RESNETS.NORM = "BN"


def describe(cfg: CfgNode) -> str:
    """The effective recipe in a line or two."""
    solver = cfg.SOLVER
    drops = ", ".join(str(step) for step in solver.STEPS if step < solver.MAX_ITER) or "never"
    frozen = cfg.MODEL.BACKBONE.FREEZE_AT
    sides = {min(cfg.INPUT.MIN_SIZE_TRAIN), max(cfg.INPUT.MIN_SIZE_TRAIN)}
    has_norms = arch_of(cfg).startswith(("resnet", TIMM))
    norm = f", batch norms {cfg.MODEL.RESNETS.NORM}" if has_norms else ""
    return (
        f"recipe: {solver.MAX_ITER} iterations of {solver.IMS_PER_BATCH} images, "
        f"lr {solver.BASE_LR:g} x{solver.GAMMA:g} at {drops}, warm-up {solver.WARMUP_ITERS}, "
        f"weight decay {solver.WEIGHT_DECAY:g}{', bf16' if solver.AMP.ENABLED else ''}\n"
        f"        {cfg.MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE} regions an image, short side "
        f"{'-'.join(str(size) for size in sorted(sides))} "
        f"(test {cfg.INPUT.MIN_SIZE_TEST}), first {frozen} stages fixed{norm}"
    )

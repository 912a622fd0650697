"""The backbone's way into a detector, proved tensor by tensor.

Detectron2 says in its log only which tensors it could not place, and then trains from random ones.
Here a run prints "n of n tensors", and fewer than all end it.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from detectron2.checkpoint import DetectionCheckpointer
from torch import Tensor, nn

from instdisc.errors import UserError
from instdisc.export import detectron2_backbones  # noqa: F401 # registers AlexNet and VGG16
from instdisc.export.bundle import REPORT, hash_file
from instdisc.export.contract import Source
from instdisc.export.to_detectron2 import SIDECAR, WEIGHTS, save_detectron2
from instdisc.export.verify import verify_target
from instdisc.importers.api import import_checkpoint
from instdisc.networks.timm_backbones import TimmBackbone
from instdisc.networks.weights import Weights, open_weights
from instdisc.runs.checkpoint import save_checkpoint, weights_hash
from instdisc.runs.folders import newest_backbone
from instdisc.runs.log import LOGGER
from instdisc.untrusted.containers import load_plain_pickle
from transfer.detection.timm_pyramid import save_timm  # registers timm's backbones too

# Where a detector keeps the layers of a backbone; C4 heads have res5, FPN's bottom-up has all.
PLACES = ("backbone.bottom_up.", "backbone.", "roi_heads.")
# Layers of those places that no backbone has.
NEW = ("backbone.fpn_", "roi_heads.box_predictor.", "roi_heads.res5.norm.")


@dataclasses.dataclass(frozen=True)
class Initial:
    """What a detector starts from.

    Attributes:
        name: what results call it.
        hash: SHA-256 of its tensors; empty for scratch.
        arch: the backbone's: the config's, or `timm:NAME`.
        folder: holds detectron2.pkl and detectron2.yaml; None for scratch.
        pretraining: what is known of how it was made.
        notes: what a reader should know, a line each.
    """

    name: str
    hash: str
    arch: str
    folder: Path | None
    pretraining: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def sidecar(self) -> dict[str, Any]:
        """What the weights ask of the config; nothing for scratch."""
        if self.folder is None:
            return {}
        content: dict[str, Any] = yaml.safe_load((self.folder / SIDECAR).read_text("utf-8"))
        return content


def prepare(
    init: str, weights: str | None, arch: str, output: Path, *, with_pyramid: bool = False
) -> Initial:
    """Finds, imports and converts what `--init` and `--weights` name.

    Args:
        init: ours, scratch or supervised:FILE.
        weights: for ours; the newest run of `arch` if None.
        arch: the config's.
        output: the run folder, which keeps a conversion that is not there yet.
        with_pyramid: whether the config has an FPN, and so takes a timm network instead.
    """
    if init == "scratch":
        return Initial("scratch", "", arch, None)
    notes: tuple[str, ...] = ()
    if init == "ours":
        opened = open_weights(weights if weights is not None else newest_backbone(arch))
    else:
        file = Path(init.partition(":")[2])
        report = import_checkpoint(file, allow_missing_fc=True)
        notes = report.notes
        imported = output / "init" / "backbone.pt"
        save_checkpoint(imported, "backbone", report.payload)
        opened = dataclasses.replace(open_weights(imported), name=f"supervised:{file.stem}")
    backbone = opened.backbone
    if isinstance(backbone, TimmBackbone):
        return _prepare_timm(opened, output / "init", with_pyramid=with_pyramid)
    if backbone.arch != arch:
        raise UserError(
            f"the config is for {arch}, and {opened.name} is {backbone.arch}: choose another "
            f"--cfg, or `python pretrain/run.py --arch {arch}` and --weights"
        )
    source = Source(backbone, opened.spec, weights_hash(backbone.trunk.state_dict()))
    beside = opened.file.parent / "export" if opened.file is not None else None
    if beside is not None and _is_export_of(beside, source):
        folder = beside
    else:
        folder = output / "init"
        folder.mkdir(parents=True, exist_ok=True)
        save_detectron2(folder, source)
        LOGGER.info(f"converted for Detectron2: {verify_target(folder, 'detectron2', source)}")
    return Initial(opened.name, opened.hash, arch, folder, opened.pretraining, notes)


def _prepare_timm(opened: Weights, folder: Path, *, with_pyramid: bool) -> Initial:
    network = opened.backbone
    assert isinstance(network, TimmBackbone)
    if not with_pyramid:
        raise UserError(
            f"{opened.name} is a timm network, which needs a config with a feature pyramid: "
            "--cfg faster_r50_fpn, coco/faster_r50_fpn or coco/mask_r50_fpn"
        )
    folder.mkdir(parents=True, exist_ok=True)
    save_timm(folder, network, opened.spec)
    return Initial(opened.name, opened.hash, network.arch, folder, opened.pretraining)


def _is_export_of(folder: Path, source: Source) -> bool:
    """Whether a folder holds the verified conversion of these very weights, unchanged."""
    try:
        report = json.loads((folder / REPORT).read_text("utf-8"))
        same = report["source"]["weights_sha256"] == source.weights_sha256
        stored = report["targets"]["detectron2"]["files"]
        return same and all(hash_file(folder / name) == stored[name] for name in (WEIGHTS, SIDECAR))
    except (OSError, ValueError, KeyError, TypeError):  # absent, damaged, of another version
        return False


class _PlainCheckpointer(DetectionCheckpointer):
    """Detectron2's loading and its matching of names, over a reader that runs nothing."""

    def _load_file(self, filename: str) -> dict[str, Any]:
        content: dict[str, Any] = load_plain_pickle(Path(filename))
        content["model"] = {name: array.copy() for name, array in content["model"].items()}
        return content


def _place(name: str, state: dict[str, Tensor]) -> str | None:
    """The detector's name of a file's tensor."""
    found = [place + name for place in PLACES if place + name in state]
    return name if name in state else next(iter(found), None)


def load_backbone_weights(model: nn.Module, folder: Path) -> int:
    """Loads a conversion into a detector through Detectron2, and proves that all of it arrived.

    Returns:
        How many tensors the file has, all of them now in the detector.

    Raises:
        UserError: a tensor of the file is not in the detector, or a backbone tensor of the detector
            is not in the file.
    """
    file = folder / WEIGHTS
    loggers = [logging.getLogger(name) for name in ("fvcore", "detectron2")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)  # it warns of the detector's new layers, which is no news
    try:
        _PlainCheckpointer(model).load(str(file))
    except (KeyError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"{file} does not load: {' '.join(str(error).split())}") from None
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    stored = load_plain_pickle(file)["model"]
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    places = {name: _place(name, state) for name in stored}
    wrong = [
        name
        for name, place in places.items()
        if place is None or not torch.equal(state[place], torch.from_numpy(stored[name].copy()))
    ]
    filled = set(places.values())
    empty = [name for name in state if _of_backbone(name) and name not in filled]
    right = len(stored) - len(wrong)
    if wrong or empty:
        what = f"without a place: {_some(wrong)}" if wrong else f"not in the file: {_some(empty)}"
        raise UserError(
            f"{right} of {len(stored)} tensors of {file} arrived in the detector, {what}: "
            "convert it anew with pretrain/export.py, or train from --init scratch"
        )
    return right


def _of_backbone(name: str) -> bool:
    """Whether a detector's tensor is one that the backbone should fill."""
    own = name.startswith(("backbone.", "roi_heads.res5."))
    return own and not name.startswith(NEW) and not name.endswith("num_batches_tracked")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

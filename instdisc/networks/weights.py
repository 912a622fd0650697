"""`--weights`: the names by which every task finds its network.

(nothing)             the newest pretraining run
runs/pretrain/x       a run folder; or a backbone.pt, ours or imported
random:resnet50       random initialisation, seed 0; random:resnet50:3 is seed 3; random:timm:NAME
untrained:runs/x      the random network that the run x started from, with its image size
data-init:resnet50    data-dependent initialisation from a few images; data-init:resnet50:3
timm:resnet50.a1_in1k any timm model, with timm's pretrained weights; timm:local-dir:DIR too
"""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from instdisc.errors import UserError
from instdisc.images.transforms import InputSpec
from instdisc.names import TIMM
from instdisc.networks.backbones import (
    AnyBackbone,
    Embedding,
    build_any,
    build_untrained,
    restore_backbone,
)
from instdisc.networks.data_init import initialize_from_data
from instdisc.networks.timm_backbones import TimmBackbone, build_timm
from instdisc.runs.checkpoint import load_checkpoint, weights_hash
from instdisc.runs.folders import newest_backbone
from instdisc.training.seed import seeded


@dataclasses.dataclass(frozen=True)
class Weights:
    """A network and what is known of it.

    Attributes:
        name: what results call it.
        backbone: pooled features, and stages under its `stage_names`.
        embedding: the same backbone with its 128-d head, where it has one.
        spec: how it wants its images.
        pretraining: config, data set, epoch; empty where unknown.
        file: where it came from, for `backbone.pt` files.
    """

    name: str
    backbone: AnyBackbone
    embedding: Embedding | None
    spec: InputSpec
    pretraining: dict[str, Any]
    file: Path | None = None

    def to(self, device: torch.device) -> None:
        """Moves the network to a device, in eval mode."""
        for module in (self.backbone, self.embedding):
            if module is not None:
                module.to(device).eval()

    @property
    def hash(self) -> str:
        """SHA-256 of all tensors."""
        model = self.embedding if self.embedding is not None else self.backbone
        return weights_hash(model.state_dict())

    @property
    def data(self) -> str | None:
        """The data that it was pretrained on, as `--data` takes it."""
        return (self.pretraining.get("config") or {}).get("data")


def _open_random(text: str, data: str | None, kind: str = "random") -> Weights:
    arch, seed = _split_seed(text, kind)
    with seeded(seed, "random"):
        backbone = build_any(arch)
        model = Embedding(backbone)
    spec = backbone.spec if isinstance(backbone, TimmBackbone) else InputSpec()
    return Weights(f"{kind}:{text}", model.backbone, model, spec, {})


def _split_seed(text: str, kind: str) -> tuple[str, int]:
    """ARCH or ARCH:SEED as a pair."""
    parts = re.fullmatch(rf"((?:{TIMM})?[^:]*)(?::(\d+))?", text)
    if parts is None:
        raise UserError(f"{kind}:{text}: write {kind}:ARCH or {kind}:ARCH:SEED")
    return parts[1], int(parts[2] or 0)


def _open_untrained(text: str, data: str | None) -> Weights:
    trained = _open_file(_find_file(text or None))
    config = dict(trained.pretraining.get("config") or {})
    try:
        model = build_untrained(config)
    except (LookupError, TypeError, ValueError):
        raise UserError(
            f"untrained:{text}: {trained.file} was not pretrained by this suite, so its start is "
            "not known: use random:ARCH"
        ) from None
    known = {"config": {"data": config.get("data")}}  # it is measured on the same images
    return Weights(f"untrained:{trained.name}", model.backbone, model, trained.spec, known)


def _open_data_init(text: str, data: str | None) -> Weights:
    arch, seed = _split_seed(text, "data-init")
    if arch.startswith(TIMM):
        raise UserError(f"data-init:{text}: only for the paper's networks: use random:{text}")
    weights = _open_random(text, data, "data-init")
    assert weights.embedding is not None
    initialize_from_data(weights.embedding, weights.spec, data=data, seed=seed)
    return weights


def _open_timm(name: str, data: str | None) -> Weights:
    backbone = build_timm(name, pretrained=True)
    return Weights(f"{TIMM}{name}", backbone, None, backbone.spec, {})


def _find_file(name: str | Path | None) -> Path:
    """The backbone.pt of a run folder, a file itself, or the newest run's."""
    path = newest_backbone() if name is None else Path(name)
    path = path / "backbone.pt" if path.is_dir() else path
    if not path.exists():
        raise UserError(
            f"--weights {name}: no such run, file, random:ARCH, untrained:RUN, data-init:ARCH or "
            "timm:NAME"
        )
    return path


def _open_file(path: Path) -> Weights:
    payload = load_checkpoint(path, "backbone")
    try:
        model = restore_backbone(payload)
        spec = InputSpec.from_dict(payload["input"])
        pretraining = dict(payload["pretraining"])
        config = dict(pretraining.get("config") or {})
        if not isinstance(config.get("data"), str | None):
            raise ValueError("the name of its data is no text")
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(
            f"{path} lacks a part of a backbone, or has an odd one ({reason}): make it again with "
            "pretrain/run.py or pretrain/import_weights.py"
        ) from None
    return Weights(
        name=path.parent.name if path.name == "backbone.pt" else path.stem,
        backbone=model.backbone if isinstance(model, Embedding) else model,
        embedding=model if isinstance(model, Embedding) else None,
        spec=spec,
        pretraining=pretraining,
        file=path,
    )


def open_weights(name: str | Path | None = None, *, data: str | None = None) -> Weights:
    """Opens a network by name, in eval mode; see the module's docstring for the names.

    Args:
        name: what `--weights` says.
        data: what `--data` says, for initialisation from images.
    """
    makers: dict[str, Callable[[str, str | None], Weights]] = {
        "random": _open_random,
        "untrained": _open_untrained,
        "data-init": _open_data_init,
        "timm": _open_timm,
    }
    kind, _, rest = str(name or "").partition(":")
    weights = makers[kind](rest, data) if kind in makers else _open_file(_find_file(name))
    weights.to(torch.device("cpu"))
    return weights


def load_backbone(weights: str | Path | None = None) -> AnyBackbone:
    """Loads a backbone in eval mode; the public entry point.

    Args:
        weights: a backbone.pt, a run folder, `random:ARCH`, `untrained:RUN`, `data-init:ARCH`,
            `timm:NAME`, `random:timm:NAME`; None for the newest run.

    Returns:
        The backbone without its projection: `model(images)` gives `(B, feature_dim)`,
        `model.stages(images)` the feature maps by name: conv1..conv5 of the paper's networks.
    """
    return open_weights(weights).backbone

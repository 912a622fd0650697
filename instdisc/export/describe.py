"""What a checkpoint of this project is, in a few lines."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from instdisc.errors import UserError
from instdisc.runs.checkpoint import FORMAT, load_file, weights_hash


def _count(state: Mapping[str, Tensor]) -> str:
    counters = ("running_mean", "running_var", "num_batches_tracked")
    parameters = sum(t.numel() for name, t in state.items() if not name.endswith(counters))
    return f"{len(state)} tensors, {parameters:,} parameters"


def _pretraining(values: Any) -> list[str]:
    """Config, data and epoch, as far as the checkpoint knows them."""
    if not isinstance(values, Mapping):
        return []
    lines = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            value = ", ".join(f"{k} {v}" for k, v in value.items() if not isinstance(v, Mapping))
        lines.append(f"pretraining {name}: {value}")
    return lines


def describe_backbone(payload: Mapping[str, Any]) -> str:
    """The lines for a backbone checkpoint."""
    trunk, projection, spec = payload["trunk"], payload["projection"], payload["input"]
    lines = [
        f"format: {payload['format']}",
        f"arch: {payload['arch']}",
        f"stem: {payload['stem']}",
        f"batch norm: {'yes' if payload['batch_norm'] else 'no'}",
        f"trunk: {_count(trunk)}",
        f"projection: {len(projection['bias'])} dimensions" if projection else "projection: none",
        f"input: {spec['size']} pixels, crop ratio {spec['crop_ratio']}, RGB mean {spec['mean']}, "
        f"std {spec['std']}",
        *_pretraining(payload.get("pretraining")),
        f"weights sha256: {weights_hash(trunk)}",
    ]
    return "\n".join(lines)


def describe_checkpoint(path: Path) -> str:
    """Says what a file is: ours from its schema, a foreign one from its content."""
    if not path.exists():
        raise UserError(f"{path}: no such file")
    path = path / "backbone.pt" if (path / "backbone.pt").is_file() else path
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, about pickles of others
            payload = load_file(path)
    except UserError:
        payload = None  # not a file of ours; the importers know more formats
    form = payload.get("format") if isinstance(payload, dict) else None
    if form == FORMAT.format("backbone"):
        return describe_backbone(payload)
    if form == FORMAT.format("train"):
        fields = ", ".join(sorted(set(payload) - {"format"}))
        return f"format: {form}\na training state to resume from; holds {fields}"
    from instdisc.importers.api import describe

    return describe(path)

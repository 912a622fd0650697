"""Checkpoints: two schemas, atomic saves, and loads that run no code from the file.

`train` (last.pt) holds everything needed to go on; `backbone` (backbone.pt) is the interface
between pretraining, converters and transfer tasks:

    arch, stem, batch_norm   which network (see backbones.py)
    trunk                    its weights under torchvision's names
    projection               weight and bias of the 128-d head, or None for imported networks
    input                    size and pixel statistics it was trained with (see transforms.py)
    pretraining              config, data set and its fingerprint, epoch, provenance
"""

import hashlib
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from instdisc.cli import UserError
from instdisc.runs import atomic_file

Schema = Literal["train", "backbone"]
FORMAT = "instdisc/{}/1"


def save_checkpoint(path: Path, schema: Schema, payload: Mapping[str, Any]) -> None:
    """Writes a checkpoint whole or not at all; the previous one survives a failure."""
    with atomic_file(path) as file:
        try:
            torch.save({"format": FORMAT.format(schema), **payload}, file)
        except RuntimeError as error:
            # torch wraps what the file raised; a full disk must stay recognisable.
            cause = error.__cause__ or error.__context__
            if isinstance(cause, OSError):
                raise cause from None
            raise


def load_file(path: Path, *, mapped: bool = False) -> Any:
    """Loads a torch file to the CPU without executing anything in it.

    Args:
        path: the file.
        mapped: leave the tensors in the file, to be read when they are used.
    """
    try:
        if zipfile.is_zipfile(path):
            # torch skips the archive's checksums, and a flipped bit would become a weight.
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise zipfile.BadZipFile(f"checksum of {damaged} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder: name the file in it") from None
    except (EOFError, RuntimeError, KeyError, ValueError, zipfile.BadZipFile, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(
            f"{path} cannot be read ({reason}): it is truncated or no checkpoint; use another one"
        ) from None
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} holds more than tensors and plain values, and is not run for that reason: "
            "convert it with `python pretrain/import_weights.py`"
        ) from None


def load_checkpoint(path: Path, schema: Schema, *, mapped: bool = False) -> dict[str, Any]:
    """Loads a checkpoint of this project and checks its schema; `mapped` as in `load_file`."""
    payload = load_file(path, mapped=mapped)
    expected = FORMAT.format(schema)
    found = payload.get("format") if isinstance(payload, dict) else None
    if found != expected:
        raise UserError(
            f"{path} is not a {schema} checkpoint (format {found!r}, not {expected!r}): "
            "import foreign weights with `python pretrain/import_weights.py`"
        )
    return payload


def weights_hash(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, shapes and values, the same on every machine."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

"""Checkpoints: two schemas, atomic saves, and loads that run no code from the file.

`train` (last.pt) holds everything needed to go on; `backbone` (backbone.pt) is the interface
between pretraining, converters and transfer tasks:

    arch, stem, batch_norm   which network (see networks.backbones); timm:NAME for one of timm's
    trunk                    its weights under torchvision's names, or timm's
    projection               weight and bias of the 128-d head (running statistics too where it
                             standardises), or None for imported networks
    input                    size and pixel statistics it was trained with (see images.transforms)
    pretraining              config, data set and its fingerprint, epoch, provenance

Beside last.pt lies the one before it (last.previous.pt): a file that fails its checksum is set
aside, and the run goes on from the other.
"""

import contextlib
import copy
import errno
import hashlib
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Literal

import torch
from torch import Tensor

from instdisc.errors import DISK_ERRORS, UserError, is_out_of_memory
from instdisc.runs.folders import atomic_file, temporary_path
from instdisc.runs.log import LOGGER

Schema = Literal["train", "backbone"]
FORMAT = "instdisc/{}/1"


# What torch's and zipfile's readers raise for bytes that are no good file.
DAMAGE = (
    *(EOFError, RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError),
    *(ArithmeticError, struct.error, zlib.error, zipfile.BadZipFile),
)
# Errors of the machine. Others may be the file's: torch seeks to before its start if it is cut.
NOT_ITS_FAULT = (
    *(errno.EACCES, errno.EPERM, errno.ENOMEM, errno.EMFILE, errno.ENFILE),
    *DISK_ERRORS,
)


class DamagedFile(UserError):
    """A file whose content is not what was written to it, or was never a checkpoint."""


def previous_of(path: Path) -> Path:
    """Where the checkpoint before the one at `path` lies."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


@contextlib.contextmanager
def torch_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for torch.save that appears whole or not at all.

    When an error passes through torch.save it closes its archive, fails in that, and complains of
    the archive. What comes out here is the error: a full disk, a dead loader, an interrupt.
    """
    with atomic_file(path) as file:
        try:
            yield file
        except RuntimeError as error:
            raise (error.__cause__ or error.__context__ or error) from None


def copy_to_host(value: Any, older: Any = None) -> Any:
    """A copy of nested dicts, lists and tuples with tensors of their own, in host memory.

    Args:
        value: what to copy.
        older: an earlier copy, whose memory is used again where a tensor fits: the system takes
            several times as long to hand out new memory as to copy.
    """
    if isinstance(value, Tensor):
        if isinstance(older, Tensor) and _like(older) == _like(value):
            return older.copy_(value.detach())
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        copied = copy.copy(value)  # with the attribute that a module's state_dict has
        known = older if isinstance(older, dict) else {}
        copied.update((name, copy_to_host(each, known.get(name))) for name, each in value.items())
        return copied
    if isinstance(value, list | tuple):
        return type(value)(copy_to_host(each) for each in value)
    return value


def _like(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def save_checkpoint(
    path: Path, schema: Schema, payload: Mapping[str, Any], *, keep_previous: bool = False
) -> None:
    """Writes a checkpoint whole or not at all; the previous one survives a failure.

    Args:
        path: the file.
        schema: which of the two kinds.
        payload: its content.
        keep_previous: the file that is there stays, as `previous_of(path)`.
    """
    with torch_file(path) as file:
        torch.save({"format": FORMAT.format(schema), **payload}, file)
        if keep_previous and path.exists():
            file.flush()
            os.fsync(file.fileno())  # a full disk is found out before the older one is given up
            _keep_previous(path)


def _keep_previous(path: Path) -> None:
    """Gives the file a second name, so that there is no moment without a file at `path`."""
    older = previous_of(path)
    temporary = temporary_path(older)
    try:
        temporary.hardlink_to(path)
        temporary.replace(older)
        # Two names of one file are not renamed: `older` was this one already, by a killed save.
        temporary.unlink(missing_ok=True)
    except OSError:  # a file system without links
        path.replace(older)


def remove_checkpoints(path: Path) -> None:
    """Removes the checkpoint at `path` and the one before it."""
    path.unlink(missing_ok=True)
    previous_of(path).unlink(missing_ok=True)


def set_aside(path: Path) -> Path:
    """Renames a damaged file so that nothing takes it for a good one; another may have done so."""
    aside = path.with_name(path.name + ".damaged")
    with contextlib.suppress(FileNotFoundError):
        path.replace(aside)
    return aside


def load_last(path: Path, schema: Schema, *, mapped: bool = False) -> dict[str, Any] | None:
    """The checkpoint at `path`; if it is damaged or gone, the one before it; None without any.

    A damaged one is set aside if the older is good, so one process of several does this first.

    Args:
        path: the file that `save_checkpoint` writes with `keep_previous`.
        schema: which of the two kinds.
        mapped: as in `load_file`.

    Raises:
        UserError: there are checkpoints and none loads; they are left as they are.
    """
    damage: DamagedFile | None = None
    for file in (path, previous_of(path)):
        try:
            state = load_checkpoint(file, schema, mapped=mapped)
        except DamagedFile as error:
            damage = damage or error
            continue
        except UserError:
            if file.exists():
                raise
            continue
        if damage is not None:
            set_aside(path)
            LOGGER.warning(f"{damage}; it is set aside ({path.name}.damaged), {file} is used")
        return state
    if damage is not None:
        raise damage
    return None


def load_file(path: Path, *, mapped: bool = False) -> Any:
    """Loads a torch file to the CPU without executing anything in it.

    Args:
        path: the file.
        mapped: leave the tensors in the file, to be read when they are used.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path} is no file, but a pipe or a device: name a file")
    try:
        if zipfile.is_zipfile(path):
            # torch skips the archive's checksums, and a flipped bit would become a weight.
            with zipfile.ZipFile(path) as archive:
                claimed = sum(member.file_size for member in archive.infolist())
                if claimed > path.stat().st_size:  # torch compresses nothing
                    raise zipfile.BadZipFile(f"it would unpack to {claimed:,} bytes")
                damaged = archive.testzip()
            if damaged is not None:
                raise zipfile.BadZipFile(f"checksum of {damaged} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder: name the file in it") from None
    except OSError as error:
        if error.errno in NOT_ITS_FAULT:
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
        raise _damaged(path, error) from None
    except (MemoryError, *DAMAGE) as error:
        if is_out_of_memory(error):  # the file is good, as far as one knows
            raise UserError(f"{path} does not fit into memory: free some, then try again") from None
        raise _damaged(path, error) from None
    except pickle.UnpicklingError:
        raise DamagedFile(
            f"{path} holds more than tensors and plain values, and is not run for that reason: "
            "convert it with `python pretrain/import_weights.py`"
        ) from None


def _damaged(path: Path, error: Exception) -> DamagedFile:
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return DamagedFile(
        f"{path} cannot be read ({reason}): it is truncated or no checkpoint; use another one"
    )


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

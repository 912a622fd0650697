"""Opens checkpoints of unknown origin, however packed, and runs nothing in them."""

import dataclasses
import io
import json
import mmap
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

from instdisc.errors import UserError
from instdisc.untrusted.pickles import (
    ITEM_SIZES,
    PLAIN_NAMES,
    Global,
    Inert,
    Machine,
    NumpyType,
    Storage,
    StoredTensor,
    need,
    read_stream,
    row_major,
    storage_of,
)

# What a damaged or hostile file can make the readers raise.
MALFORMED = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    struct.error,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)
SAFETENSORS_DTYPES = {
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "U8": "uint8"},
    **{"I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64", "BOOL": "bool"},
}
# What people take for a checkpoint: its mark, where the mark stands, what to do.
LOOKALIKES = (
    (b"version https://git-lfs", 0, "a Git LFS pointer: fetch the file with `git lfs pull`"),
    (b"<", 0, "a web page: download the file itself"),
    (b"\x1f\x8b", 0, "compressed: unpack it with gunzip first"),
    (b"\x89HDF", 0, "an HDF5 file of another framework: save it as a torch state dict first"),
    (b"ustar", 257, "a tar archive, as torch wrote before 0.2: save it again with a newer torch"),
)


def read_safetensors(data: memoryview) -> dict[str, StoredTensor]:
    """Finds the tensors of a safetensors file: eight bytes of length, a JSON table, the numbers."""
    length = int.from_bytes(data[:8], "little")
    need(length <= len(data) - 8, "the header is longer than the file")
    table = json.loads(bytes(data[8 : 8 + length]))
    numbers = data[8 + length :]
    tensors = {}
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        dtype = SAFETENSORS_DTYPES[entry["dtype"]]
        shape = tuple(entry["shape"])
        need(0 <= first <= last <= len(numbers), f"{name} lies outside the file")
        storage = Storage(dtype, (last - first) // ITEM_SIZES[dtype], numbers[first:last])
        tensors[name] = StoredTensor().place(storage, 0, shape, row_major(shape))
        need(tensors[name].numel == storage.numel, f"{name} has another size than its shape")
    return tensors


@dataclasses.dataclass(frozen=True)
class ForeignFile:
    """What a file holds.

    Attributes:
        path: the file.
        container: how it is packed, in words.
        content: dicts, lists, plain values, `StoredTensor` and `Inert`.
        unbuilt: names of the classes and functions that it refers to and that were not run.
    """

    path: Path
    container: str
    content: Any
    unbuilt: tuple[str, ...] = ()


def _read_zip(path: Path, data: mmap.mmap, unbuilt: set[str]) -> Any:
    """Reads what torch has written since 1.6: a zip of one pickle and uncompressed storages."""
    with zipfile.ZipFile(path) as archive:
        members = {member.filename: member for member in archive.infolist()}
    roots = [name.removesuffix("data.pkl") for name in members if name.endswith("/data.pkl")]
    if not roots or f"{roots[0]}constants.pkl" in members:
        raise UserError(
            f"{path} is {'a TorchScript program' if roots else 'a zip without a checkpoint in it'}"
            ": save its state_dict() with torch.save, then import that"
        )
    view = memoryview(data)

    def bytes_of(name: str) -> memoryview:
        member = members[roots[0] + name]
        need(member.compress_type == zipfile.ZIP_STORED, f"{name} is compressed")
        header = view[member.header_offset : member.header_offset + 30]
        need(bytes(header[:4]) == b"PK\x03\x04", f"{name} is not where the index says")
        lengths = struct.unpack("<HH", header[26:30])
        first = member.header_offset + 30 + sum(lengths)
        need(first + member.file_size <= len(view), f"{name} lies outside the file")
        return view[first : first + member.file_size]

    if roots[0] + "byteorder" in members:
        need(bytes(bytes_of("byteorder")) == b"little", "it comes from a big-endian machine")
    storages: dict[Any, Storage] = {}

    def find_storage(key: Any) -> Any:
        found = storage_of(key, storages)
        if isinstance(found, Storage):
            storage = found.root or found
            storage.data = bytes_of(f"data/{key[2]}")
            storage.crc = members[f"{roots[0]}data/{key[2]}"].CRC
            size = storage.numel * storage.item_size
            need(size == len(storage.data), f"a storage claims {size} bytes and has other ones")
        return found

    return Machine(io.BytesIO(bytes_of("data.pkl")), find_storage, unbuilt).run()


def _map(path: Path) -> mmap.mmap:
    if path.is_dir():
        raise UserError(f"{path} is a folder: name the file in it")
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:
                raise UserError(f"{path} is empty: fetch it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None


def _reason(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _plain(value: Any, made: dict[int, Any]) -> Any:
    """Arrays for stored tensors and lists for tuples; a value that is shared is made once."""
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, StoredTensor):
        objects = value.objects
        made[id(value)] = value.array() if objects is None else _plain(objects, made)
    elif isinstance(value, list | tuple):
        made[id(value)] = []
        made[id(value)].extend(_plain(item, made) for item in value)
    elif isinstance(value, dict):
        made[id(value)] = {}
        made[id(value)].update((key, _plain(item, made)) for key, item in value.items())
    else:
        need(not isinstance(value, Global | Inert | NumpyType), "it has objects")
        return value
    return made[id(value)]


def load_plain_pickle(path: Path) -> Any:
    """Numbers, strings, lists, dicts and numpy arrays from a pickle; refuses all else."""
    data = _map(path)
    try:
        return _plain(Machine(data, None, set(), PLAIN_NAMES).run(), {})
    except MALFORMED as error:
        what = f"{path} is not a pickle of plain arrays, refused: {_reason(error)}"
        raise UserError(what) from None


def read_foreign(path: Path) -> ForeignFile:
    """Reads a checkpoint: torch's two formats, an ordinary pickle, or safetensors.

    Raises:
        UserError: it is none of these, or damaged.
    """
    data = _map(path)
    head = data[:64]
    for start, place, what in LOOKALIKES:
        if data[place : place + len(start)] == start:
            raise UserError(f"{path} is {what}")
    unbuilt: set[str] = set()
    try:
        if head.startswith(b"PK\x03\x04"):
            container, content = "torch file", _read_zip(path, data, unbuilt)
        elif int.from_bytes(head[:8], "little") <= len(data) and head[8:9] == b"{":
            container, content = "safetensors", read_safetensors(memoryview(data))
        else:
            container, content = read_stream(data, unbuilt)
    except UserError:
        raise
    except MALFORMED as error:
        raise UserError(
            f"{path} cannot be read ({_reason(error)}): it is damaged or no checkpoint; "
            "fetch it again"
        ) from None
    return ForeignFile(path, container, content, tuple(sorted(unbuilt)))

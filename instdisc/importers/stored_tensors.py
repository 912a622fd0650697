"""What reading a file of unknown origin yields: tensors not yet read, objects never built.

Memory is bounded by what is used, and a header that claims more than the file holds is refused
before anything is allocated.
"""

import dataclasses
import math
import pickle
import zlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

STORAGE_DTYPES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": torch.uint8,
}
NUMPY_DTYPES = {
    "f2": torch.float16,
    "f4": torch.float32,
    "f8": torch.float64,
    "i1": torch.int8,
    "i2": torch.int16,
    "i4": torch.int32,
    "i8": torch.int64,
    "u1": torch.uint8,
    "b1": torch.bool,
}


def need(condition: bool, message: str) -> None:
    """Refuses a file that breaks its own format."""
    if not condition:
        raise pickle.UnpicklingError(message)


@dataclasses.dataclass(frozen=True)
class Global:
    """A name in some module that a pickle refers to; it is never looked up."""

    name: str


@dataclasses.dataclass(eq=False)
class Inert:
    """An object that was not built: its class's name and the data it would have been made from."""

    name: str
    arguments: Any = ()
    state: Any = None
    items: list[Any] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class Storage:
    """A run of numbers in the file; `data` is set once its place is known.

    Attributes:
        dtype: type of the numbers.
        numel: how many the file claims.
        data: the raw bytes, a view of the file.
        crc: their CRC-32, or 0 where the writer left it out.
        root: the storage that this one is a part of, if any; `start` is the place in it.
        start: first number within `root`.
    """

    dtype: torch.dtype
    numel: int
    data: memoryview | None = None
    crc: int = 0
    root: "Storage | None" = None
    start: int = 0

    def view(self) -> memoryview:
        """The raw bytes, checked against the claimed length and the checksum."""
        size = self.numel * self.dtype.itemsize
        data = self.data
        if self.root is not None:
            first = self.start * self.dtype.itemsize
            data = self.root.view()[first : first + size]
        if data is None:
            raise pickle.UnpicklingError("a storage is not in the file")
        need(len(data) == size, f"a storage claims {size} bytes, the file has {len(data)}")
        if self.crc:
            need(zlib.crc32(data) == self.crc, "a checksum is wrong: the file is damaged")
            self.crc = 0  # once is enough
        return data


@dataclasses.dataclass(eq=False)
class StoredTensor:
    """A tensor in a file. Without a storage it is an array of something else than numbers."""

    storage: Storage | None = None
    offset: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Type of the numbers."""
        assert self.storage is not None
        return self.storage.dtype

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return math.prod(self.shape)

    def _reach(self) -> int:
        steps = zip(self.shape, self.strides, strict=True)
        return sum((size - 1) * stride for size, stride in steps) + 1

    def place(self, storage: Any, offset: Any, shape: Any, strides: Any) -> "StoredTensor":
        """Sets where the numbers are, or refuses a tensor that its storage cannot hold."""
        need(isinstance(storage, Storage), "a tensor without a storage")
        shape, strides = tuple(shape), tuple(strides)
        counts = (offset, storage.numel, *shape, *strides)
        need(all(isinstance(c, int) and c >= 0 for c in counts), "a tensor of odd sizes")
        need(len(shape) == len(strides) <= 8, "a tensor of odd strides")
        self.storage, self.offset, self.shape, self.strides = storage, offset, shape, strides
        if 0 not in shape:
            need(offset + self._reach() <= storage.numel, "a tensor reaches outside its storage")
            need(self.numel <= storage.numel, "a tensor is larger than its storage")
        return self

    def load(self) -> Tensor:
        """Copies the numbers out of the file."""
        assert self.storage is not None
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=self.dtype)
        size = self.dtype.itemsize
        raw = self.storage.view()[self.offset * size : (self.offset + self._reach()) * size]
        flat = torch.frombuffer(bytearray(raw), dtype=self.dtype)
        return flat.as_strided(self.shape, self.strides).contiguous()


def is_tensor(value: Any) -> bool:
    """Whether a value read from a file is an array of numbers."""
    return isinstance(value, StoredTensor) and value.storage is not None


def row_major(shape: Iterable[int]) -> tuple[int, ...]:
    """Strides of a C-contiguous array."""
    sizes = tuple(shape)
    return tuple(math.prod(sizes[i + 1 :]) for i in range(len(sizes)))


@dataclasses.dataclass(eq=False)
class NumpyType:
    """A numpy dtype as a pickle describes it: `f4` and a byte order."""

    code: str
    order: str = "<"

    def array(self, tensor: StoredTensor, raw: Any, shape: Any, *, column_major: bool) -> None:
        """Fills an array; one of Python objects stays without numbers."""
        dtype = NUMPY_DTYPES.get(self.code) if self.order != ">" else None
        if dtype is None:
            return
        # Python 2 wrote bytes as text; so does protocol 2.
        data = memoryview(raw.encode("latin1") if isinstance(raw, str) else bytes(raw))
        strides = row_major(shape)
        if column_major:
            strides = row_major(tuple(shape)[::-1])[::-1]
        tensor.place(Storage(dtype, len(data) // dtype.itemsize, data), 0, shape, strides)


def module_state(module: Any, *, limit: int = 10_000) -> dict[str, StoredTensor]:
    """The state dict of a pickled `nn.Module` that was not built; empty for anything else."""
    found: dict[str, StoredTensor] = {}
    waiting = [("", module)]
    for _ in range(limit):  # a hostile tree of modules may hold itself
        if not waiting:
            return found
        prefix, current = waiting.pop()
        state = current.state if isinstance(current, Inert) else None
        parts = state if isinstance(state, dict) else {}
        for kind in ("_parameters", "_buffers"):
            entries = parts.get(kind)
            for name, value in entries.items() if isinstance(entries, dict) else ():
                if is_tensor(value):
                    found[f"{prefix}{name}"] = value
        children = parts.get("_modules")
        for name, child in children.items() if isinstance(children, dict) else ():
            waiting.append((f"{prefix}{name}.", child))
    raise pickle.UnpicklingError("a module without end")

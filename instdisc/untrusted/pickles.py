"""Interprets pickles of unknown origin without running anything in them.

A pickle is a program. The machine here can build plain containers and descriptions of tensors, and
nothing else. Whatever else a pickle names (a module object, `argparse.Namespace`, `os.system`)
becomes an `Inert` record: nothing is imported, called or set. Memory is bounded by what is used,
and a header that claims more than the file holds is refused before anything is allocated.

`torch.load(pickle_module=...)` would not do: it hands TorchScript archives to the JIT, allocates
what a header claims, and may append a source patch to a file that the checkpoint names.
"""

import codecs
import dataclasses
import io
import math
import mmap
import operator
import pickle
import pickletools
import re
import zlib
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # torch.serialization.MAGIC_NUMBER
LEGACY_PROTOCOL = 1001
# Opcodes whose argument is the value.
_LITERAL = "(BIN)?INT[12]?|LONG[14]?|(BIN)?FLOAT|(SHORT_)?(BIN)?(STRING|BYTES|UNICODE)8?|BYTEARRAY8"
OPCODES = {op.code.encode("latin1"): op for op in pickletools.opcodes}
LITERALS = {op.name for op in pickletools.opcodes if re.fullmatch(_LITERAL, op.name)}
# Torch's names of the types of numbers -> bytes of one.
ITEM_SIZES = {
    **{"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "uint8": 1, "bool": 1},
    **{"int8": 1, "int16": 2, "int32": 4, "int64": 8},
}
STORAGE_DTYPES = {
    **{"FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16"},
    **{"DoubleStorage": "float64", "LongStorage": "int64", "IntStorage": "int32"},
    **{"ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8"},
    **{"BoolStorage": "bool", "UntypedStorage": "uint8"},
}
# Arrays of numbers, of bytes and of text; of numbers, torch has those that are little-endian.
NUMPY_CODE = re.compile(r"[fiu][1248]|b1|[SU]\d{1,4}")


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
        dtype: type of the numbers, in `ITEM_SIZES`, or one that only numpy has, such as `>f8`.
        numel: how many the file claims.
        data: the raw bytes, a view of the file.
        crc: their CRC-32, or 0 where the writer left it out.
        root: the storage that this one is a part of, if any; `start` is the place in it.
        start: first number within `root`.
    """

    dtype: str
    numel: int
    data: memoryview | None = None
    crc: int = 0
    root: "Storage | None" = None
    start: int = 0

    @property
    def item_size(self) -> int:
        """Bytes of one number."""
        return ITEM_SIZES.get(self.dtype) or np.dtype(self.dtype).itemsize

    def view(self) -> memoryview:
        """The raw bytes, checked against the claimed length and the checksum."""
        size = self.numel * self.item_size
        data = self.data
        if self.root is not None:
            first = self.start * self.item_size
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
    """A tensor in a file, or an array of objects, or without either one of an unknown type."""

    storage: Storage | None = None
    offset: int = 0
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    objects: list[Any] | None = None

    @property
    def dtype(self) -> str:
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

    def load(self) -> "Tensor":
        """Copies the numbers out of the file."""
        import torch  # here, so that what a file holds can be told without torch

        assert self.storage is not None
        dtype, size = getattr(torch, self.dtype), self.storage.item_size
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=dtype)
        raw = self.storage.view()[self.offset * size : (self.offset + self._reach()) * size]
        flat = torch.frombuffer(bytearray(raw), dtype=dtype)
        return flat.as_strided(self.shape, self.strides).contiguous()

    def array(self) -> np.ndarray[Any, Any]:
        """The numbers of a pickled numpy array, which fill their storage, as a view of the file."""
        need(self.storage is not None, "it has an array of an unknown type")
        assert self.storage is not None
        flat = np.frombuffer(self.storage.view(), self.dtype)
        return flat.reshape(self.shape, order="C" if self.strides == row_major(self.shape) else "F")


def is_tensor(value: Any) -> bool:
    """Whether a value read from a file is an array of numbers that torch has."""
    stored = isinstance(value, StoredTensor) and value.storage is not None
    return stored and value.dtype in ITEM_SIZES


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
        """Fills an array; one of dates or records stays empty."""
        if self.code.startswith("O") and isinstance(raw, list):
            tensor.objects = raw
        if not NUMPY_CODE.fullmatch(self.code):
            return
        kind = np.dtype((">" if self.order == ">" else "<") + self.code)
        dtype = kind.name if kind.isnative and kind.name in ITEM_SIZES else kind.str
        # Python 2 wrote bytes as text; so does protocol 2.
        data = memoryview(raw.encode("latin1") if isinstance(raw, str) else raw)
        strides = row_major(tuple(shape)[::-1])[::-1] if column_major else row_major(shape)
        tensor.place(Storage(dtype, len(data) // kind.itemsize, data), 0, shape, strides)
        need(tensor.numel * kind.itemsize == len(data), "an array of another size than its shape")


def _key(value: Any) -> Any:
    """Lets through what checkpoints use as keys: hashing a deep tuple would overflow the stack."""
    plain = (str, bytes, int, float, Global, Inert, type(None))
    parts = value if isinstance(value, tuple) else (value,)
    need(all(isinstance(part, plain) for part in parts), "a key of an odd type")
    return value


def _dict(pairs: Any = ()) -> dict[Any, Any]:
    return {_key(key): value for key, value in pairs}


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *rest: Any) -> StoredTensor:
    return StoredTensor().place(storage, offset, shape, strides)


def _tensor_of_type(build: Any, kind: Any, arguments: Any, state: Any) -> Any:
    known = isinstance(build, Global) and build.name.startswith("torch._utils._rebuild_")
    return BUILDERS[build.name](*arguments) if known else Inert("torch.Tensor")


def _numpy_array(raw: Any, dtype: NumpyType, shape: Any, order: Any = "C") -> StoredTensor:
    tensor = StoredTensor()
    dtype.array(tensor, raw, shape, column_major=order == "F")
    return tensor


def _numpy_scalar(dtype: NumpyType, raw: Any) -> Any:
    tensor = _numpy_array(raw, dtype, ())
    return Inert("numpy scalar") if tensor.storage is None else tensor.array()[()].item()


def _encode(text: str, encoding: str) -> bytes:
    need(encoding == "latin1", f"it has text in encoding {encoding!r}")
    return text.encode("latin1")


def _nested_storage(raw: Any) -> Any:
    # A tensor inside an ordinary pickle brings its storage as a torch file of its own.
    return read_stream(bytes(raw), set())[1]


def _first(value: Any, *rest: Any) -> Any:
    return value


# All that a pickle can cause to be called. Each only arranges data.
BUILDERS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _dict,
    "collections.defaultdict": lambda *rest: {},
    "torch.Size": lambda sizes=(): tuple(sizes),
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_parameter": _first,
    "torch._utils._rebuild_parameter_with_state": _first,
    "torch._tensor._rebuild_from_type_v2": _tensor_of_type,
    "torch.nn.parameter.Parameter": _first,
    "torch.autograd.variable.Variable": _first,
    "torch.storage._load_from_bytes": _nested_storage,
    "_codecs.encode": _encode,
    "__builtin__.bytes": lambda: b"",  # how old protocols spell it; takes no length
    "numpy.dtype": lambda code, *rest: NumpyType(code),
    "detectron2.structures.boxes.BoxMode": operator.index,
}
for _core in ("numpy.core", "numpy._core"):
    BUILDERS[f"{_core}.multiarray._reconstruct"] = lambda *rest: StoredTensor()
    BUILDERS[f"{_core}.multiarray.scalar"] = _numpy_scalar
    BUILDERS[f"{_core}.numeric._frombuffer"] = _numpy_array
# All that a pickle of plain arrays may name.
PLAIN_NAMES = frozenset(
    {
        "numpy.ndarray",
        *(name for name in BUILDERS if re.match("_codecs|__b|numpy|detectron2", name)),
    }
)


@dataclasses.dataclass(eq=False)
class Machine:
    """Interprets one pickle.

    Attributes:
        stream: a binary file that stands where the pickle begins; is left where it ends.
        find_storage: what a persistent id stands for; None where a file cannot have any.
        unbuilt: receives the names of what was not run.
        admitted: the names that it may have; None admits all, since nothing is run anyway.
    """

    stream: Any
    find_storage: Callable[[Any], Any] | None
    unbuilt: set[str]
    admitted: Collection[str] | None = None
    stack: list[Any] = dataclasses.field(default_factory=list)
    marks: list[int] = dataclasses.field(default_factory=list)
    memo: dict[int, Any] = dataclasses.field(default_factory=dict)

    def run(self) -> Any:
        """The object that the pickle describes."""
        while code := self.stream.read(1):
            need(code in OPCODES, f"{code!r} is no opcode")
            opcode = OPCODES[code]
            if opcode.name == "STOP":
                return self.stack.pop()
            argument = None
            if opcode.name == "STRING":  # pickletools reads ASCII only, Python 2 wrote any byte
                line = pickletools.read_stringnl(self.stream, decode=False)
                argument = codecs.escape_decode(line)[0].decode("latin1")
            elif opcode.arg is not None:
                argument = opcode.arg.reader(self.stream)
            if opcode.name in LITERALS:
                self.stack.append(argument)
            elif not self._arrange(opcode.name, argument):
                self._stand_in(opcode.name, argument)
        raise EOFError("it has no end")

    def _since_mark(self) -> list[Any]:
        mark = self.marks.pop()
        taken = self.stack[mark:]
        del self.stack[mark:]
        return taken

    def _arrange(self, opcode: str, argument: Any) -> bool:
        """Opcodes that move values about and build containers."""
        stack = self.stack
        match opcode:
            case "PROTO" | "FRAME":
                pass
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[opcode])
            case "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_SET" | "EMPTY_TUPLE":
                kinds = {"LIST": list, "DICT": dict, "SET": set, "TUPLE": tuple}
                stack.append(kinds[opcode.removeprefix("EMPTY_")]())
            case "LIST":
                stack.append(self._since_mark())
            case "TUPLE":
                stack.append(tuple(self._since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(opcode[-1])
                need(len(stack) >= count, "a tuple of nothing")
                stack[-count:] = [tuple(stack[-count:])]
            case "DICT":
                items = self._since_mark()
                stack.append(_dict(zip(items[::2], items[1::2], strict=True)))
            case "FROZENSET":
                stack.append(frozenset(_key(item) for item in self._since_mark()))
            case "APPEND" | "APPENDS" | "ADDITEMS":
                items = [stack.pop()] if opcode == "APPEND" else self._since_mark()
                self._extend(stack[-1], items)
            case "SETITEM" | "SETITEMS":
                pair = [stack.pop(-2), stack.pop()] if opcode == "SETITEM" else self._since_mark()
                self._extend(stack[-1], list(zip(pair[::2], pair[1::2], strict=True)))
            case "MARK":
                self.marks.append(len(stack))
            case "POP" | "POP_MARK":
                if opcode == "POP_MARK" or (self.marks and self.marks[-1] == len(stack)):
                    self._since_mark()
                else:
                    stack.pop()
            case "DUP":
                stack.append(stack[-1])
            case "GET" | "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "PUT" | "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case _:
                return False
        return True

    def _extend(self, target: Any, items: list[Any]) -> None:
        if isinstance(target, dict):
            target.update(_dict(items))
        elif isinstance(target, set):
            target.update(_key(item) for item in items)
        elif isinstance(target, Inert):
            target.items.extend(items)
        else:
            need(isinstance(target, list), "items for something that holds none")
            target.extend(items)

    def _stand_in(self, opcode: str, argument: Any) -> None:
        """Opcodes that would import, call or change something."""
        stack = self.stack
        match opcode:
            case "GLOBAL":
                stack.append(self._global(argument.replace(" ", ".", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                need(isinstance(name, str) and isinstance(module, str), "a global without a name")
                stack.append(self._global(f"{module}.{name}"))
            case "REDUCE" | "NEWOBJ" | "NEWOBJ_EX":
                if opcode == "NEWOBJ_EX":
                    stack.pop()  # keyword arguments: no builder takes any
                arguments = stack.pop()
                stack.append(self._call(stack.pop(), arguments))
            case "INST":
                arguments = tuple(self._since_mark())
                stack.append(self._call(self._global(argument.replace(" ", ".", 1)), arguments))
            case "OBJ":
                target, *rest = self._since_mark()
                stack.append(self._call(target, tuple(rest)))
            case "BUILD":
                state = stack.pop()
                self._set_state(stack[-1], state)
            case "PERSID" | "BINPERSID":
                key = argument if opcode == "PERSID" else stack.pop()
                if self.find_storage is None:
                    raise ValueError("it refers to storages that it does not have")
                stack.append(self.find_storage(key))
            case _:
                raise ValueError(f"it uses {opcode}")

    def _global(self, name: str) -> Global:
        need(self.admitted is None or name in self.admitted, f"it names {name}")
        return Global(name)

    def _call(self, target: Any, arguments: Any) -> Any:
        """Stands in for every call that a pickle asks for."""
        name = target.name if isinstance(target, Global | Inert) else type(target).__name__
        if isinstance(target, Global) and name in BUILDERS:
            return BUILDERS[name](*arguments)
        self.unbuilt.add(name)
        return Inert(name, arguments)

    def _set_state(self, target: Any, state: Any) -> None:
        """Stands in for `__setstate__` and for setting attributes."""
        if isinstance(target, Inert):
            target.state = state
        elif isinstance(target, NumpyType):
            target.order = state[1]
        elif isinstance(target, StoredTensor):
            if target.storage is None:  # numpy: version, shape, dtype, column-major, numbers
                _, shape, dtype, column_major, raw = state
                dtype.array(target, raw, shape, column_major=bool(column_major))
        else:  # an ordered dict's attributes are of no interest
            need(isinstance(target, dict), "a state for something that has none")


def storage_of(key: Any, storages: dict[Any, Storage]) -> Any:
    """What torch means by a persistent id: a storage, noted for later, or a class."""
    need(isinstance(key, tuple) and len(key) >= 2, "an odd persistent id")
    if key[0] == "module":  # torch before 1.6 kept the source of modules beside their class
        return key[1]
    _, kind, name, _, numel, *views = key
    need(isinstance(kind, Global) and isinstance(name, str | int), "an odd storage")
    need(isinstance(numel, int), "an odd storage")
    dtype = STORAGE_DTYPES[kind.name.rpartition(".")[2]]
    storage = storages.setdefault(name, Storage(dtype, numel))
    if not views or views[0] is None:
        return storage
    _, start, count = views[0]
    need(isinstance(start, int) and isinstance(count, int) and start >= 0, "an odd view")
    return Storage(dtype, count, root=storage, start=start)


def read_stream(data: bytes | mmap.mmap, unbuilt: set[str]) -> tuple[str, Any]:
    """Reads a bare pickle, or what torch wrote before 1.6: pickles followed by the numbers."""
    stream: Any = io.BytesIO(data) if isinstance(data, bytes) else data
    content = Machine(stream, None, unbuilt).run()
    if type(content) is not int or content != LEGACY_MAGIC:
        return "pickle", content
    protocol = Machine(stream, None, unbuilt).run()
    need(protocol == LEGACY_PROTOCOL, f"torch protocol {protocol!r}")
    system = Machine(stream, None, unbuilt).run()
    need(system.get("little_endian", True) is True, "it comes from a big-endian machine")
    storages: dict[Any, Storage] = {}
    content = Machine(stream, lambda key: storage_of(key, storages), unbuilt).run()
    order = Machine(stream, None, unbuilt).run()
    view = memoryview(data)
    for name in order:
        storage = storages[name]
        numel = int.from_bytes(stream.read(8), "little")
        need(numel == storage.numel, f"a storage claims {storage.numel} numbers and has {numel}")
        size = numel * storage.item_size
        first = stream.tell()
        need(first + size <= len(data), "it is truncated")
        storage.data = view[first : first + size]
        stream.seek(first + size)
    return "torch file from before 1.6", content

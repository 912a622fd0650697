"""Interprets pickles of unknown origin without running anything in them.

A pickle is a program. The machine here can build plain containers and descriptions of tensors, and
nothing else. Whatever else a pickle names (a module object, `argparse.Namespace`, `os.system`)
becomes an `Inert` record: nothing is imported, called or set.

`torch.load(pickle_module=...)` would not do: it hands TorchScript archives to the JIT, allocates
what a header claims, and may append a source patch to a file that the checkpoint names.
"""

import mmap
import pickletools
import re
from collections.abc import Callable
from typing import Any

from instdisc.importers.stored_tensors import (
    STORAGE_DTYPES,
    Global,
    Inert,
    NumpyType,
    Storage,
    StoredTensor,
    need,
)

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # torch.serialization.MAGIC_NUMBER
LEGACY_PROTOCOL = 1001
# Opcodes whose argument is the value.
LITERAL = re.compile("(BIN)?INT[12]?|LONG[14]?|(BIN)?FLOAT|(SHORT_)?(BIN)?(STRING|BYTES|UNICODE)8?")


class Stream:
    """A bounded file over bytes or a mapped file, as `pickletools` wants one."""

    def __init__(self, data: bytes | mmap.mmap) -> None:
        self.data = data
        self.place = 0

    def read(self, count: int) -> bytes:
        """At most `count` bytes; a claim beyond the end costs nothing."""
        taken = self.data[self.place : self.place + max(count, 0)]
        self.place += len(taken)
        return taken

    def readline(self) -> bytes:
        """Bytes up to and with the next line feed."""
        end = self.data.find(b"\n", self.place) + 1
        return self.read((end or len(self.data)) - self.place)


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
    "_codecs.encode": lambda text, *rest: text.encode("latin1"),
    "numpy.dtype": lambda code, *rest: NumpyType(code),
    "numpy.core.multiarray._reconstruct": lambda *rest: StoredTensor(),
    "numpy._core.multiarray._reconstruct": lambda *rest: StoredTensor(),
    "numpy.core.numeric._frombuffer": _numpy_array,
    "numpy._core.numeric._frombuffer": _numpy_array,
}


class Machine:
    """Interprets one pickle.

    Args:
        stream: stands where the pickle begins; is left where it ends.
        find_storage: what a persistent id stands for; None where a file cannot have any.
        unbuilt: receives the names of what was not run.
    """

    def __init__(
        self, stream: Stream, find_storage: Callable[[Any], Any] | None, unbuilt: set[str]
    ) -> None:
        self.stream = stream
        self.find_storage = find_storage
        self.unbuilt = unbuilt
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """The object that the pickle describes."""
        for opcode, argument, _ in pickletools.genops(self.stream):  # type: ignore[arg-type] # has read and readline
            if opcode.name == "STOP":
                return self.stack.pop()
            if LITERAL.fullmatch(opcode.name) or opcode.name == "BYTEARRAY8":
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
                stack.append(Global(argument.replace(" ", ".", 1)))
            case "STACK_GLOBAL":
                name, module = stack.pop(), stack.pop()
                need(isinstance(name, str) and isinstance(module, str), "a global without a name")
                stack.append(Global(f"{module}.{name}"))
            case "REDUCE" | "NEWOBJ" | "NEWOBJ_EX":
                if opcode == "NEWOBJ_EX":
                    stack.pop()  # keyword arguments: no builder takes any
                arguments = stack.pop()
                stack.append(self._call(stack.pop(), arguments))
            case "INST":
                arguments = tuple(self._since_mark())
                stack.append(self._call(Global(argument.replace(" ", ".", 1)), arguments))
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
    stream = Stream(data)
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
        size = numel * storage.dtype.itemsize
        need(stream.place + size <= len(data), "it is truncated")
        storage.data = view[stream.place : stream.place + size]
        stream.place += size
    return "torch file from before 1.6", content

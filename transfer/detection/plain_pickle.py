"""Pickles of plain arrays, read without running anything that they contain.

Numbers, strings, lists, dicts and arrays come out; a file that names anything else is refused.
"""

import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from instdisc.errors import UserError


class _Dtype:
    """Stands for np.dtype while reading: takes part in no call that the file could steer."""

    def __init__(self, spec: str, *_: object) -> None:
        if not re.fullmatch(r"[<>|=]?([fiu][1248]|b1|[SU]\d{1,4}|O8?)", spec):
            raise pickle.UnpicklingError(f"dtype {spec!r}")
        self.spec, self.order = spec.lstrip("<>|="), spec[0] if spec[0] in "<>|=" else "="

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = "<" if state[1] == "<" else ">" if state[1] == ">" else "="


class _Array:
    """Stands for np.ndarray while reading, for the same reason."""

    value: Any = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, raw = state
        self.value = _to_array(raw, dtype, shape, "F" if fortran else "C")


def _to_array(raw: Any, dtype: _Dtype, shape: tuple[int, ...], order: Literal["C", "F"]) -> Any:
    if dtype.spec.startswith("O"):
        return [_plain(item) for item in raw]
    data = raw.encode("latin1") if isinstance(raw, str) else raw  # Python 2 wrote strings
    return np.frombuffer(data, dtype.order + dtype.spec).reshape(shape, order=order)


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"encoding {encoding!r}")
    return text.encode("latin1")


def _scalar(dtype: _Dtype, raw: Any) -> Any:
    return _to_array(raw, dtype, (), "C")[()].item()


# All that a proposal file may name, and what takes its place.
_ADMITTED: dict[tuple[str, str], Callable[..., Any]] = {
    ("_codecs", "encode"): _encode,
    ("__builtin__", "bytes"): lambda: b"",  # how old protocols spell it; takes no length
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,
    ("detectron2.structures.boxes", "BoxMode"): int,
}
for _core in ("numpy.core", "numpy._core"):
    _ADMITTED[f"{_core}.multiarray", "_reconstruct"] = lambda *_: _Array()
    _ADMITTED[f"{_core}.multiarray", "scalar"] = _scalar
    _ADMITTED[f"{_core}.numeric", "_frombuffer"] = _to_array


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return _ADMITTED[module, name]


def _plain(value: Any) -> Any:
    if isinstance(value, _Array):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def load_plain_pickle(path: Path) -> Any:
    """Numbers, strings, lists, dicts and arrays from a pickle; refuses all else."""
    try:
        with path.open("rb") as stream:
            return _plain(_Unpickler(stream, encoding="latin1").load())
    except FileNotFoundError:
        raise UserError(f"no file {path}") from None
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError) as error:
        reason = str(error)
    except (AttributeError, LookupError, ArithmeticError, AssertionError, struct.error) as error:
        reason = str(error)
    except (MemoryError, RecursionError):
        reason = "it wants more memory than there is"
    raise UserError(f"{path} is not a pickle of plain arrays, refused: {reason}")

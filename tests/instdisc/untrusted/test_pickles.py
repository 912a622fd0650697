"""Files that would run code, claim what they do not have, or are broken."""

import contextlib
import copyreg
import os
import pickle
import struct
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from instdisc.errors import UserError
from instdisc.importers.api import describe
from instdisc.untrusted.containers import load_plain_pickle, read_foreign
from instdisc.untrusted.pickles import LEGACY_MAGIC, LEGACY_PROTOCOL, Inert


def as_zip(path: Path, program: bytes, storages: dict[str, bytes] | None = None) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", program)
        for name, data in (storages or {}).items():
            archive.writestr(f"archive/data/{name}", data)
    return path


def as_legacy(path: Path, program: bytes, tail: bytes = b"") -> Path:
    parts = (LEGACY_MAGIC, LEGACY_PROTOCOL, {"little_endian": True})
    head = b"".join(pickle.dumps(part, protocol=2) for part in parts)
    path.write_bytes(head + program + (tail or pickle.dumps([], protocol=2)))
    return path


def as_pickle(path: Path, program: bytes) -> Path:
    path.write_bytes(program)
    return path


CONTAINERS: list[Callable[[Path, bytes], Path]] = [as_zip, as_legacy, as_pickle]


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = function, arguments

    def __reduce__(self) -> Any:
        return self.reduced


def attacks(marker: Path) -> dict[str, bytes]:
    """Pickles that make the marker, or change a module, if anything at all is run."""
    touch = f"touch {marker}"
    python = f"open({str(marker)!r}, 'w')"
    evil = Call(os.system, touch)
    encoded = touch.encode()
    return {
        "reduce": pickle.dumps(evil),
        "protocol 0": pickle.dumps(evil, protocol=0),
        "eval": pickle.dumps(Call(eval, python)),
        "exec": pickle.dumps({"state_dict": {"w": Call(exec, python)}}),
        "inside an ordered dict": pickle.dumps(OrderedDict(a=evil)),
        "as a key": pickle.dumps({Call(os.system, touch): 1}),
        "inside an object array": pickle.dumps(np.array([evil], dtype=object)),
        "getattr of a module": b"cbuiltins\ngetattr\n(cos\n__dict__\nS'system'\ntR(S'"
        + encoded
        + b"'\ntR.",
        "dotted name": b"\x80\x04\x8c\x02os\x94\x8c\x0fsystem.__call__\x94\x93\x8c"
        + bytes([len(encoded)])
        + encoded
        + b"\x85R.",
        "inst": b"(S'" + encoded + b"'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nS'" + encoded + b"'\no.",
        "newobj": b"\x80\x02csubprocess\nPopen\n(S'" + encoded + b"'\nI-1\nNNNNNI00\nI01\nt\x81.",
        "extension": b"\x80\x02\x82\xf0(S'" + encoded + b"'\ntR.",
        "state on a module": b"\x80\x02cos\npath\n}S'broken'\nI1\nsb.",
        "state on a function": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}S'x'\nI1\nsb.",
        "tensor of a type": pickle.dumps(
            Call(torch._tensor._rebuild_from_type_v2, os.system, torch.Tensor, (touch,), {})
        ),
        "nested torch file": pickle.dumps(
            Call(torch.storage._load_from_bytes, pickle.dumps(evil, protocol=2))
        ),
        "tensor hooks": pickle.dumps(
            Call(torch._utils._rebuild_parameter, evil, True, OrderedDict())
        ),
    }


NAMES = sorted(attacks(Path("marker")))


@pytest.fixture(autouse=True)
def extension() -> Iterator[None]:
    """A short code for `os.system`, which the "extension" attack uses."""
    module = os.system.__module__
    copyreg.add_extension(module, "system", 240)
    yield
    copyreg.remove_extension(module, "system", 240)


@pytest.mark.parametrize("name", ["reduce", "eval", "inst", "dotted name", "extension"])
def test_the_attacks_are_real(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    program = attacks(marker)[name]
    pickle.loads(program)
    assert marker.exists()


@pytest.mark.parametrize("wrap", CONTAINERS)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_run(tmp_path: Path, name: str, wrap: Callable[[Path, bytes], Path]) -> None:
    marker = tmp_path / "marker"
    path = wrap(tmp_path / "file.pth", attacks(marker)[name])
    with contextlib.suppress(UserError):
        read_foreign(path)
        assert describe(path)
    assert not marker.exists()
    assert not hasattr(os.path, "broken")
    assert not hasattr(torch._utils._rebuild_tensor_v2, "x")


@pytest.mark.parametrize("name", NAMES)
def test_plain_pickles_may_not_even_name_it(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    path = as_pickle(tmp_path / "file.pkl", attacks(marker)[name])
    with pytest.raises(UserError, match=r"refused: it (names|uses)"):
        load_plain_pickle(path)
    assert not marker.exists()


def test_source_of_a_pickled_module_makes_no_patch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch.load compares the source kept in old files and may write "<class name>.patch".
    monkeypatch.chdir(tmp_path)
    program = b"\x80\x02(S'module'\ncevil\nNet\nS'net.py'\nS'class Net: pass'\ntQ)\x81."
    content = read_foreign(as_legacy(tmp_path / "old.pth", program)).content
    assert isinstance(content, Inert)
    assert content.name == "evil.Net"
    assert [path.name for path in tmp_path.iterdir()] == ["old.pth"]


def test_torchscript_is_refused(tmp_path: Path) -> None:
    path = as_zip(tmp_path / "script.pt", pickle.dumps({}))
    with zipfile.ZipFile(path, "a") as archive:  # what tells TorchScript from a checkpoint
        archive.writestr("archive/constants.pkl", pickle.dumps(()))
    with pytest.raises(UserError, match="TorchScript program: save its state_dict"):
        read_foreign(path)


STORAGE = b"(S'storage'\nctorch\nFloatStorage\nS'0'\nS'cpu'\nI%d\ntQ"
REBUILD = b"\x80\x02}S'w'\nctorch._utils\n_rebuild_tensor_v2\n(%bI0\n(I%dt(I%dtI00\nNtRs."


def rebuild(numel: int, size: int, stride: int) -> bytes:
    return REBUILD % (STORAGE % numel, size, stride)


@pytest.mark.parametrize(
    "program",
    [
        rebuild(2**40, 2**40, 1),  # the storage is not in the file
        rebuild(2, 2**40, 1),  # the tensor is larger than its storage
        rebuild(2, 2**40, 0),  # the same number 2**40 times
        rebuild(2, 2, -1),
        rebuild(-1, 1, 1),
        b"\x80\x05\x96" + struct.pack("<Q", 2**40) + b"x.",  # BYTEARRAY8
        b"\x80\x04\x8e" + struct.pack("<Q", 2**62) + b"x.",  # BINBYTES8
        b"\x80\x02]r\xff\xff\xff\x0f.",  # a memo of 2**28 places
    ],
)
def test_claims_cost_no_memory(tmp_path: Path, program: bytes) -> None:
    keys = pickle.dumps(["0"], protocol=2) + struct.pack("<q", 2**40)
    paths = [
        as_zip(tmp_path / "a.pth", program, {"0": bytes(8)}),
        as_legacy(tmp_path / "b.pth", program, keys),
        as_pickle(tmp_path / "c.pkl", program),
    ]
    tracemalloc.start()
    for path in paths:
        with contextlib.suppress(UserError):
            content = read_foreign(path).content
            assert not isinstance(content, dict) or "w" not in content
        with contextlib.suppress(UserError):
            assert load_plain_pickle(path) in ([], LEGACY_MAGIC)  # nothing of what is claimed
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5_000_000


def test_nesting_does_not_overflow(tmp_path: Path) -> None:
    deep_key = b"\x80\x02}(" + b")" + b"\x85" * 50_000 + b"I1\nu."
    with pytest.raises(UserError, match="key of an odd type"):
        read_foreign(as_pickle(tmp_path / "key.pkl", deep_key))
    deep_list = b"\x80\x02" + b"]" * 50_000 + b"a" * 49_999 + b"."
    assert "not importable" in describe(as_pickle(tmp_path / "list.pkl", deep_list))
    with pytest.raises(UserError, match="refused: maximum recursion depth"):
        load_plain_pickle(tmp_path / "list.pkl")
    doubled = b"q\x000](h\x00h\x00e" * 60  # each list holds the last one twice: 2**60 leaves
    laughs = b"\x80\x02}(S'state_dict'\n]" + doubled + b"u."
    assert "not importable" in describe(as_pickle(tmp_path / "laughs.pkl", laughs))
    assert len(load_plain_pickle(tmp_path / "laughs.pkl")["state_dict"]) == 2


def test_plain_values_that_are_shared_or_hold_themselves(tmp_path: Path) -> None:
    own: list[Any] = [np.arange(6.0).reshape(2, 3).T]
    own += [own, own[0]]
    path = as_pickle(tmp_path / "own.pkl", pickle.dumps(own))
    array, inner, same = load_plain_pickle(path)
    assert inner[0] is array is same
    assert array.flags.f_contiguous
    assert array.tolist() == own[0].tolist()

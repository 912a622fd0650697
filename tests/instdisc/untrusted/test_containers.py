"""Torch's two formats, ordinary pickles and safetensors: whole files and broken ones."""

import contextlib
import io
import pickle
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from instdisc.errors import UserError
from instdisc.importers.api import describe
from instdisc.untrusted.containers import MALFORMED, read_foreign
from instdisc.untrusted.pickles import is_tensor


def sample() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(4, 6, generator=generator)
    return {
        "float": base,
        "transposed": base.t(),
        "slice": base[1:, 2:4],
        "half": base.half(),
        "bfloat": base.bfloat16(),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(base.clone()),
        "numpy": np.arange(6, dtype=np.float32).reshape(2, 3),
        "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "plain": [1, 2.5, "text", None, True, (1, 2), b"bytes"],
        "ordered": OrderedDict(a=1),
        "object": io.StringIO,
    }


@pytest.mark.parametrize("container", ["zip", "legacy", "pickle 2", "pickle 4", "pickle 5"])
def test_tensors_come_out_as_they_went_in(tmp_path: Path, container: str) -> None:
    path, values = tmp_path / "file.pth", sample()
    if container.startswith("pickle"):
        path.write_bytes(pickle.dumps(values, protocol=int(container[-1])))
    else:
        torch.save(values, path, _use_new_zipfile_serialization=container == "zip")
    content = read_foreign(path).content
    assert content["plain"] == values["plain"]
    assert content["ordered"] == {"a": 1}
    for name, value in values.items():
        if isinstance(value, torch.Tensor | np.ndarray):
            expected = torch.as_tensor(value.data if name == "parameter" else value)
            loaded = content[name].load()
            assert loaded.dtype == expected.dtype, name
            assert torch.equal(loaded, expected), name


def test_a_flipped_bit_in_a_weight_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    torch.save({"w": torch.ones(1000)}, path)
    data = bytearray(path.read_bytes())
    place = data.index(b"\x00\x00\x80\x3f" * 100)
    data[place + 40] ^= 1
    path.write_bytes(data)
    tensor = read_foreign(path).content["w"]
    with pytest.raises(pickle.UnpicklingError, match="checksum"):
        tensor.load()


@pytest.mark.parametrize("kind", ["safetensors", "zip without checksums"])
def test_other_containers(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "file.bin"
    values = {"a": torch.randn(3, 4), "b": torch.randn(5).bfloat16(), "c": torch.tensor(3)}
    if kind == "safetensors":
        path.write_bytes(safetensors.torch.save(values, metadata={"format": "pt"}))
    else:
        torch.serialization.set_crc32_options(False)
        try:
            torch.save(values, path)
        finally:
            torch.serialization.set_crc32_options(True)
    content = read_foreign(path).content
    assert content.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(content[name].load(), value)


def test_broken_files_give_one_line(tmp_path: Path) -> None:
    rng = random.Random(0)
    values = sample()
    sources: list[bytes] = [pickle.dumps(values, protocol=2), pickle.dumps(values, protocol=4)]
    for new in (True, False):
        buffer = io.BytesIO()
        torch.save(values, buffer, _use_new_zipfile_serialization=new)
        sources.append(buffer.getvalue())
    tensors = {"a": torch.ones(3, 4), "b": torch.ones(2).half()}
    sources.append(safetensors.torch.save(tensors))
    path = tmp_path / "broken.pth"
    num_read, messages = 0, []
    for source in sources:
        for _ in range(100):
            data = bytearray(source)
            for _ in range(rng.choice((1, 1, 2, 8))):
                place = rng.randrange(min(len(data), 4000))
                match rng.randrange(4):
                    case 0:
                        data[place] ^= 1 << rng.randrange(8)
                    case 1:
                        data[place] = rng.randrange(256)
                    case 2:
                        del data[place : place + rng.choice((1, 4, 400))]
                    case _:
                        data[place:place] = rng.randbytes(rng.choice((1, 8)))
                if not data:
                    data = bytearray(b"\x80")
            path.write_bytes(data)
            try:
                content = read_foreign(path).content
                describe(path)
                num_read += 1
            except UserError as error:
                messages.append(str(error))
                continue
            for value in content.values() if isinstance(content, dict) else ():
                if is_tensor(value):
                    with contextlib.suppress(*MALFORMED):
                        value.load()
    assert min(num_read, len(messages)) > 50
    assert not any("\n" in message for message in messages)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"\x1f\x8b\x08\x00", "gunzip"),
        (b"hello world, this is text", "damaged or no checkpoint"),
        (b"\x00" * 300, "damaged or no checkpoint"),
        (bytes(257) + b"ustar" + bytes(300), "tar archive"),
    ],
)
def test_what_is_no_checkpoint_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file.pth"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_foreign(path)
    with pytest.raises(UserError, match="no such file"):
        read_foreign(tmp_path / "absent.pth")
    with pytest.raises(UserError, match="folder"):
        read_foreign(tmp_path)

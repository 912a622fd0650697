"""CIFAR-10, CIFAR-100 and Fashion-MNIST from their official files, without unpickling code."""

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np

from instdisc.errors import UserError
from instdisc.untrusted.containers import load_plain_pickle
from instdisc.untrusted.limits import read_up_to

Archive = tuple[str, tuple[str, ...], np.ndarray, np.ndarray]

MAX_BYTES = 1 << 28  # unpacked; the largest official file has 47 million
CIFAR10 = "airplane,automobile,bird,cat,deer,dog,frog,horse,ship,truck"
FASHION = "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot"


def _read_pickle(path: Path) -> dict[str, Any]:
    """Arrays and lists by name; the official files have text of Python 2, copies may have bytes."""
    try:
        content = load_plain_pickle(path)
        return {k.decode() if isinstance(k, bytes) else k: v for k, v in content.items()}
    except (UserError, AttributeError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} is not an official CIFAR file: unpack the archive again ({error})"
        ) from None


def _read_bytes(path: Path) -> np.ndarray:
    packed = path.with_name(path.name + ".gz")
    try:
        if packed.exists() and not path.exists():
            with gzip.open(packed, "rb") as file:
                content = read_up_to(file, MAX_BYTES + 1)
            if len(content) > MAX_BYTES:
                raise UserError(f"{packed} unpacks to more than {MAX_BYTES:,} bytes: refused")
            return np.frombuffer(content, dtype=np.uint8)
        return np.fromfile(path, dtype=np.uint8)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: unpack the official archive again") from None
    except (OSError, EOFError) as error:
        raise UserError(f"{path} is damaged ({error}): download it again") from None


def _to_images(rows: np.ndarray, path: Path) -> np.ndarray:
    if rows.ndim != 2 or rows.shape[1] != 3072 or rows.dtype != np.uint8:
        raise UserError(f"{path} is not an official CIFAR file: its records have another size")
    return np.ascontiguousarray(rows.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _records(path: Path, num_labels: int) -> tuple[np.ndarray, np.ndarray]:
    """Binary CIFAR records: label bytes, then 3072 pixels, channel by channel."""
    raw = _read_bytes(path)
    if raw.size == 0 or raw.size % (3072 + num_labels):
        raise UserError(f"{path} is not an official CIFAR file: its size is wrong")
    rows = raw.reshape(-1, 3072 + num_labels)
    return _to_images(rows[:, num_labels:], path), rows[:, num_labels - 1].astype(np.int64)


def _read_cifar10(root: Path, split: str) -> Archive:
    train = [f"data_batch_{i}" for i in range(1, 6)]
    names = train if split == "train" else ["test_batch"]
    if (root / "data_batch_1.bin").exists():
        paths = [root / f"{name}.bin" for name in names]
        # Part of the archive is a legitimate small data set; its fingerprint tells.
        parts = [_records(path, 1) for path in paths if path.exists()]
        if not parts:
            raise UserError(f"{paths[0]} does not exist: unpack the official archive again")
    else:
        parts = []
        for path in (root / name for name in names):
            content = _read_pickle(path)
            pixels = np.asarray(content.get("data"))
            labels = np.asarray(content.get("labels"), dtype=np.int64)
            parts.append((_to_images(pixels, path), labels))
    images, labels = (np.concatenate(column) for column in zip(*parts, strict=True))
    return "cifar10", tuple(CIFAR10.split(",")), images, labels


def _read_cifar100(root: Path, split: str) -> Archive:
    name = "train" if split == "train" else "test"
    if (root / "train.bin").exists():
        images, labels = _records(root / f"{name}.bin", 2)
    else:
        content = _read_pickle(root / name)
        images = _to_images(np.asarray(content.get("data")), root / name)
        labels = np.asarray(content.get("fine_labels"), dtype=np.int64)
    return "cifar100", tuple(f"class{i:02d}" for i in range(100)), images, labels


def _idx(path: Path, ndim: int) -> np.ndarray:
    """An idx file: magic number with the number of dimensions, the sizes, the bytes."""
    raw = _read_bytes(path)
    header = 4 + 4 * ndim
    if raw.size < header or raw[:4].tolist() != [0, 0, 8, ndim]:
        raise UserError(f"{path} is not an official Fashion-MNIST file: download it again")
    shape = np.frombuffer(raw[4:header].tobytes(), dtype=">i4").tolist()
    if min(shape) < 1 or raw.size - header != math.prod(shape):
        raise UserError(f"{path} is truncated: download it again")
    return raw[header:].reshape(shape)


def _read_fashion(root: Path, split: str) -> Archive:
    prefix = "train" if split == "train" else "t10k"
    images = _idx(root / f"{prefix}-images-idx3-ubyte", 3)
    labels = _idx(root / f"{prefix}-labels-idx1-ubyte", 1).astype(np.int64)
    return "fashion-mnist", tuple(FASHION.split(",")), images, labels


def read(kind: str, root: Path, split: str) -> Archive:
    """Reads a split of an official archive.

    Returns:
        The data set's name, its class names, pixels `(N, H, W[, 3])` uint8, labels `(N,)` int64.
    """
    readers = {"cifar10": _read_cifar10, "cifar100": _read_cifar100, "fashion-mnist": _read_fashion}
    name, classes, images, labels = readers[kind](root, split)
    if len(images) != len(labels) or len(labels) == 0 or not 0 <= labels.max() < len(classes):
        raise UserError(
            f"{root}: images and labels do not belong together: unpack the archive again"
        )
    return name, classes, images, labels

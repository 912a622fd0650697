"""Official archives, written by the tests in their documented layouts."""

import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instdisc.errors import UserError
from instdisc.images import archives

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
LABELS = np.array([3, 9, 0, 1, 1, 7])


def planes(pixels: np.ndarray) -> np.ndarray:
    return pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)


def test_cifar10_binary_and_pickled_files_agree(tmp_path: Path) -> None:
    binary, pickled = tmp_path / "bin", tmp_path / "py"
    binary.mkdir()
    pickled.mkdir()
    for i in range(5):
        rows = np.concatenate([LABELS[:, None].astype(np.uint8), planes(PIXELS)], axis=1)
        rows.tofile(binary / f"data_batch_{i + 1}.bin")
        content: dict[Any, Any] = {b"data": planes(PIXELS), b"labels": LABELS.tolist()}
        if i % 2:  # text, as in the official files
            content = {name.decode(): value for name, value in content.items()}
        (pickled / f"data_batch_{i + 1}").write_bytes(pickle.dumps(content, protocol=2))
    for root in (binary, pickled):
        name, classes, images, labels = archives.read("cifar10", root, "train")
        assert name == "cifar10"
        assert classes[LABELS[0]] == "cat"
        assert np.array_equal(images[:6], PIXELS)
        assert labels.tolist() == LABELS.tolist() * 5


def test_cifar100_uses_the_fine_label(tmp_path: Path) -> None:
    coarse = np.zeros((6, 1), np.uint8)
    rows = np.concatenate([coarse, LABELS[:, None].astype(np.uint8), planes(PIXELS)], axis=1)
    rows.tofile(tmp_path / "test.bin")
    rows.tofile(tmp_path / "train.bin")
    _, classes, images, labels = archives.read("cifar100", tmp_path, "val")
    assert len(classes) == 100
    assert np.array_equal(images, PIXELS)
    assert np.array_equal(labels, LABELS)


@pytest.mark.parametrize("packed", [True, False])
def test_fashion_mnist_packed_or_not(tmp_path: Path, packed: bool) -> None:
    gray = PIXELS[:, :28, :28, 0]
    header = bytes([0, 0, 8, 3]) + np.array([6, 28, 28], ">i4").tobytes()
    files = {
        "train-images-idx3-ubyte": header + gray.tobytes(),
        "train-labels-idx1-ubyte": bytes([0, 0, 8, 1, 0, 0, 0, 6]) + bytes(LABELS.tolist()),
    }
    for name, content in files.items():
        if packed:
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (tmp_path / name).write_bytes(content)
    _, classes, images, labels = archives.read("fashion-mnist", tmp_path, "train")
    assert classes[9] == "Ankle boot"
    assert np.array_equal(images, gray)
    assert np.array_equal(labels, LABELS)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (marker,))  # type: ignore[return-value]

    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": Evil()}))
    with pytest.raises(UserError, match="not an official CIFAR file"):
        archives.read("cifar10", tmp_path, "train")
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"\x00" * 100, b"\x80\x02}q"])
def test_damaged_files_say_so(tmp_path: Path, content: bytes) -> None:
    for name in ("data_batch_1.bin", "train-images-idx3-ubyte"):
        (tmp_path / name).write_bytes(content)
    for kind in ("cifar10", "fashion-mnist"):
        with pytest.raises(UserError):
            archives.read(kind, tmp_path, "train")


@pytest.mark.parametrize("sides", [(2, 0, -1), (0, 4, 4), (-1, -1, 16), (2**31 - 1,) * 3])
def test_sides_that_no_image_has_are_refused(tmp_path: Path, sides: tuple[int, ...]) -> None:
    header = bytes([0, 0, 8, 3]) + np.array(sides, ">i4").tobytes()
    (tmp_path / "train-images-idx3-ubyte").write_bytes(header + bytes(max(0, np.prod(sides) % 64)))
    with pytest.raises(UserError, match="truncated"):
        archives.read("fashion-mnist", tmp_path, "train")


def test_real_cifar_images_are_images(shared_data: Path) -> None:
    root = shared_data / "cifar10-mini" / "cifar-10-batches-bin"
    _, _, images, labels = archives.read("cifar10", root, "train")
    assert images.shape == (2000, 32, 32, 3)
    assert set(labels) == set(range(10))
    # Neighbouring pixels of a photograph are alike; of misread bytes they are not.
    steps = np.abs(np.diff(images.astype(int), axis=2)).mean()
    assert steps < 15


def test_a_file_that_unpacks_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MAX_BYTES", 3_000_000)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(10**7)))
    with pytest.raises(UserError, match="unpacks to more than 3,000,000 bytes"):
        archives.read("fashion-mnist", tmp_path, "train")

"""Stored features: when they are used, when they are not, and what an interruption costs."""

import dataclasses
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from instdisc.errors import Interrupted, UserError
from instdisc.features import store as feature_store
from instdisc.features.extract import Extractor, extract_features
from instdisc.features.store import FeatureStore, StoredFeatures
from instdisc.images.sets import ImageSet, read_folder
from instdisc.images.transforms import InputSpec
from instdisc.names import Precision
from instdisc.training import dist
from instdisc.training.dist import Process, init_process

SPEC = InputSpec(size=16, crop_ratio=1.0)
WEIGHTS = torch.randn(3 * 16 * 16, 4, generator=torch.Generator().manual_seed(0))
ALONE = Process(0, 1, torch.device("cpu"))


@dataclasses.dataclass
class Counted:
    """A network that counts the images that went through it, without the one of the probe."""

    seen: int = 0
    after: Callable[[int], None] = lambda seen: None

    def __call__(self, images: Tensor) -> Tensor:
        self.seen += len(images) if images.any() else 0
        self.after(self.seen)
        return images.flatten(1) @ WEIGHTS


@pytest.fixture
def tree(image_tree: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(image_tree / "train", tmp_path / "images"))


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_store, "CHUNK_ROWS", 5)


def load(
    images: ImageSet | Path,
    network: Counted | None = None,
    *,
    weights: str = "w",
    spec: InputSpec = SPEC,
    what: str = "embedding",
    precision: Precision = "half",
    batch_size: int = 2,
    skip_bad: bool = False,
) -> StoredFeatures:
    """Features through a new store."""
    if isinstance(images, Path):
        images = read_folder(images, "images", "train")
    store = FeatureStore(
        weights, spec, ALONE, batch_size=batch_size, precision=precision, skip_bad=skip_bad
    )
    return store.load(Extractor("embedding", what, network or Counted()), images)


def test_stored_features_are_those_in_memory_in_order(tree: Path) -> None:
    images = read_folder(tree, "images", "train")
    extractor = Extractor("embedding", "embedding", Counted())
    expected = extract_features(extractor, images, SPEC, ALONE, batch_size=2).numpy()
    exact = load(images, precision="float32")
    half = load(images)
    assert exact.table.dtype == np.float32
    assert half.table.dtype == np.float16
    np.testing.assert_allclose(exact.table, expected, atol=1e-6)
    np.testing.assert_array_equal(half.table, exact.table.astype(np.float16))
    assert len(np.unique(exact.table, axis=0)) == len(images)
    assert isinstance(half.table, np.memmap)
    assert exact.folder != half.folder


def test_second_load_computes_nothing(tree: Path) -> None:
    first, again = Counted(), Counted()
    stored = load(tree, first)
    assert first.seen == stored.num_computed == 24
    hit = load(tree, again, batch_size=7)
    assert (again.seen, hit.num_computed, hit.folder) == (0, 0, stored.folder)
    np.testing.assert_array_equal(hit.table, stored.table)


def rewrite(tree: Path) -> None:
    """Another picture with the size and the date of the old one."""
    path = tree / "class1" / "3.png"
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


CHANGES: dict[str, Callable[[Path], object]] = {
    "size": lambda tree: Image.new("RGB", (30, 30)).save(tree / "class1" / "3.png"),
    "mtime": lambda tree: os.utime(tree / "class1" / "3.png", ns=(1, 1)),
    "content only": rewrite,
    "name": lambda tree: (tree / "class1" / "3.png").rename(tree / "class1" / "3b.png"),
    "class": lambda tree: (tree / "class1" / "3.png").rename(tree / "class2" / "3b.png"),
    "one more": lambda tree: shutil.copy2(tree / "class1" / "3.png", tree / "class1" / "9.png"),
    "one less": lambda tree: (tree / "class1" / "3.png").unlink(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_image_is_a_new_entry(change: str, tree: Path) -> None:
    before = load(tree)
    CHANGES[change](tree)
    network = Counted()
    after = load(tree, network, skip_bad=True)
    assert after.folder != before.folder
    assert network.seen == len(after.table)


def test_same_names_in_another_folder_are_other_images(tree: Path, tmp_path: Path) -> None:
    """As with unpacked archives, whose files may all have one date."""
    for path in tree.rglob("*.png"):
        os.utime(path, ns=(0, 0))
    twin = Path(shutil.copytree(tree, tmp_path / "twin"))
    assert load(tree).folder != load(twin).folder


def test_changed_network_or_transform_is_a_new_entry(tree: Path) -> None:
    stored = [
        load(tree),
        load(tree, weights="w2"),
        load(tree, what="backbone"),
        load(tree, spec=dataclasses.replace(SPEC, crop_ratio=0.875)),
        load(tree, spec=dataclasses.replace(SPEC, mean=(0.5, 0.5, 0.5))),
        load(tree, spec=dataclasses.replace(SPEC, std=(0.5, 0.5, 0.5))),
    ]
    assert len({each.folder for each in stored}) == len(stored)
    assert all(each.num_computed == 24 for each in stored)


def test_code_of_the_transform_is_part_of_the_key(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load(tree)
    make = feature_store.eval_transform
    monkeypatch.setattr(feature_store, "eval_transform", lambda spec: [make(spec), "new step"])
    assert load(tree).folder != before.folder


def test_archives_are_keyed_by_their_pixels(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 16, 16, 3), dtype=np.uint8)
    labels, sizes = np.zeros(6, np.int64), np.zeros(6, np.int64)
    names = np.array([f"train/{i}".encode() for i in range(6)])
    images = ImageSet("cifar10", "train", ("a",), names, labels, sizes, pixels=pixels)
    before = load(images)
    pixels = pixels.copy()
    pixels[5, 3, 3, 0] ^= 1
    assert load(dataclasses.replace(images, pixels=pixels)).folder != before.folder
    assert load(dataclasses.replace(images, pixels=images.pixels)).num_computed == 0


def test_damaged_chunk_is_computed_again(tree: Path) -> None:
    stored = load(tree)
    expected = stored.table.copy()
    (stored.folder / "entry.json").unlink()
    with (stored.folder / "features.npy").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    network = Counted()
    np.testing.assert_array_equal(load(tree, network).table, expected)
    assert network.seen == 4  # the last chunk


def test_entry_without_its_table_is_made_again(tree: Path) -> None:
    stored = load(tree)
    (stored.folder / "features.npy").write_bytes(b"")
    network = Counted()
    assert np.isfinite(load(tree, network).table).all()
    assert network.seen == 24


def test_images_that_change_meanwhile_give_no_entry(tree: Path) -> None:
    def after(seen: int) -> None:
        if seen == 12:
            os.utime(tree / "class0" / "0.png", ns=(1, 1))

    with pytest.raises(UserError, match="changed while"):
        load(tree, Counted(after=after))
    assert load(tree).num_computed == 24


def test_two_commands_at_once_compute_it_once(tree: Path) -> None:
    gate = threading.Event()
    networks = [Counted(after=lambda seen: gate.wait(10) and None), Counted()]
    results: list[StoredFeatures] = []

    def work(network: Counted) -> None:
        results.append(load(tree, network))

    threads = [threading.Thread(target=work, args=[network]) for network in networks]
    threads[0].start()
    while not any(path.name.endswith(".lock") for path in _entries()):
        pass
    threads[1].start()
    threads[1].join(0.3)
    assert not results
    gate.set()
    for thread in threads:
        thread.join()
    assert sorted(network.seen for network in networks) == [0, 24]
    np.testing.assert_array_equal(results[0].table, results[1].table)


def _entries() -> list[Path]:
    root = Path(os.environ["INSTDISC_RUNS"]) / "features"
    return list(root.iterdir()) if root.exists() else []


def test_killed_extraction_goes_on_and_equals_an_uninterrupted_one(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = (load(tree).folder / "features.npy").read_bytes()
    monkeypatch.setenv("INSTDISC_RUNS", str(tmp_path / "interrupted"))

    def kill(seen: int) -> None:
        if seen > 13:
            os.kill(os.getpid(), signal.SIGKILL)

    killed = multiprocessing.get_context("fork").Process(
        target=lambda: load(tree, Counted(after=kill))
    )
    killed.start()
    killed.join(60)
    assert killed.exitcode == -signal.SIGKILL
    (folder,) = (tmp_path / "interrupted" / "features").glob("[!.]*")
    assert not (folder / "entry.json").exists()
    assert (folder / "features.npy").read_bytes() != expected

    # Of 24 images in chunks of 5, 13 had passed when it was killed: 10 of them were safe.
    network = Counted()
    assert load(tree, network).folder == folder
    assert network.seen == 14
    assert (folder / "features.npy").read_bytes() == expected


def test_processes_fill_the_table_together(
    tree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_ranks: Callable[[Callable[[int], object]], list[int | None]],
) -> None:
    expected = load(tree, precision="float32")
    monkeypatch.setenv("INSTDISC_RUNS", str(tmp_path / "together"))

    def work(rank: int) -> None:
        process, network = init_process("cpu"), Counted()
        store = FeatureStore("w", SPEC, process, batch_size=2)
        images = read_folder(tree, "images", "train")
        stored = store.load(Extractor("embedding", "embedding", network), images)
        assert network.seen == (14, 10)[rank]  # chunks of 5, 5, 4 and of 5, 5
        assert stored.num_computed == 24
        assert stored.folder.name == expected.folder.name
        np.testing.assert_array_equal(stored.table, expected.table)
        dist.close()

    assert run_ranks(work) == [0, 0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_cleanly_and_the_next_run_goes_on(number: int, tree: Path) -> None:
    def after(seen: int) -> None:
        if seen == 12:
            os.kill(os.getpid(), number)

    with pytest.raises(Interrupted, match=r"10 of 24 images are kept .* run again"):
        load(tree, Counted(after=after))
    network = Counted()
    assert load(tree, network).num_computed == network.seen == 14


def test_unreadable_images_are_refused_or_left_out(tree: Path) -> None:
    broken = tree / "class1" / "3.png"
    broken.write_bytes(broken.read_bytes()[:60])
    with pytest.raises(UserError, match=r"3\.png.*--skip-bad-images"):
        load(tree)
    stored = load(tree, skip_bad=True)
    assert stored.bad.tolist() == [8 + 3]
    assert np.isnan(stored.table[11]).all()
    assert np.isfinite(np.delete(stored.table, 11, axis=0)).all()
    # What was left out on request is not taken for good without it.
    with pytest.raises(UserError, match=r"3\.png.*--skip-bad-images"):
        load(tree)


def test_network_that_gives_nan_is_refused(tree: Path) -> None:
    store = FeatureStore("w", SPEC, ALONE)
    images = read_folder(tree, "images", "train")
    with pytest.raises(UserError, match="NaN"):
        store.load(Extractor("embedding", "e", lambda x: x.flatten(1)[:, :4] / 0), images)

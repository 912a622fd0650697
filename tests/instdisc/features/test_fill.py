"""Extraction that is killed, stopped, shared or given bad images."""

import dataclasses
import multiprocessing
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from instdisc.errors import Interrupted, UserError
from instdisc.features import store as feature_store
from instdisc.features.extract import Extractor
from instdisc.features.store import FeatureStore, StoredFeatures
from instdisc.images.sets import read_folder
from instdisc.images.transforms import InputSpec
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


def load(tree: Path, network: Counted | None = None, *, skip_bad: bool = False) -> StoredFeatures:
    """Features of 24 images, in chunks of 5 and batches of 2."""
    store = FeatureStore("w", SPEC, ALONE, batch_size=2, skip_bad=skip_bad)
    images = read_folder(tree, "images", "train")
    return store.load(Extractor("embedding", "embedding", network or Counted()), images)


def run_apart(*works: Callable[[], object]) -> list[int | None]:
    """Runs each in a process of its own, all at once; their exit codes."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work) for work in works]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def test_killed_extraction_goes_on_and_equals_an_uninterrupted_one(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = (load(tree).folder / "features.npy").read_bytes()
    monkeypatch.setenv("INSTDISC_RUNS", str(tmp_path / "interrupted"))

    def kill(seen: int) -> None:
        if seen > 13:
            os.kill(os.getpid(), signal.SIGKILL)

    assert run_apart(lambda: load(tree, Counted(after=kill))) == [-signal.SIGKILL]
    (folder,) = (tmp_path / "interrupted" / "features").glob("[!.]*")
    assert not (folder / "entry.json").exists()
    assert (folder / "features.npy").read_bytes() != expected

    # Of 24 images in chunks of 5, 13 had passed when it was killed: 10 of them were safe.
    network = Counted()
    assert load(tree, network).folder == folder
    assert network.seen == 14
    assert (folder / "features.npy").read_bytes() == expected


def test_processes_fill_the_table_together(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(tree)
    monkeypatch.setenv("INSTDISC_RUNS", str(tmp_path / "together"))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def work(rank: int) -> None:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        process, network = init_process("cpu"), Counted()
        store = FeatureStore("w", SPEC, process, batch_size=2)
        images = read_folder(tree, "images", "train")
        stored = store.load(Extractor("embedding", "embedding", network), images)
        assert network.seen == (14, 10)[rank]  # chunks of 5, 5, 4 and of 5, 5
        assert stored.num_computed == 24
        assert stored.folder.name == expected.folder.name
        np.testing.assert_array_equal(stored.table, expected.table)
        dist.close()

    assert run_apart(lambda: work(0), lambda: work(1)) == [0, 0]


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

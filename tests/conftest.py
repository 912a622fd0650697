"""Fixtures shared by all tests."""

import os
from pathlib import Path

# Before torch is imported: one thread is as fast on small tensors, leaves the other cores alone,
# and lets tests fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from PIL import Image

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout that the tests belong to."""
    return REPO


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real images and weights that lie beside the checkout on some machines."""
    path = REPO.parent / "shared" / "data"
    if not path.is_dir():
        pytest.skip(f"real data not on this machine: {path} does not exist")
    return path


@pytest.fixture(autouse=True)
def _own_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test writes to the checkout's runs/, and none sees the caller's data."""
    monkeypatch.setenv("INSTDISC_RUNS", str(tmp_path / "runs"))
    monkeypatch.delenv("INSTDISC_DATA", raising=False)


def write_image_tree(root: Path, *, classes: int, per_class: int, size: int = 24) -> Path:
    """An ImageFolder of noise around a colour per class."""
    for label in range(classes):
        folder = root / f"class{label}"
        folder.mkdir(parents=True)
        for number in range(per_class):
            rng = np.random.default_rng([label, number])
            colour = np.random.default_rng(label).integers(0, 200, 3)
            noise = rng.integers(0, 56, (size, size, 3)) + colour
            Image.fromarray(noise.astype(np.uint8)).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="session")
def image_tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set with train/ and val/; tests that change it copy it first."""
    root = tmp_path_factory.mktemp("images")
    write_image_tree(root / "train", classes=3, per_class=8)
    write_image_tree(root / "val", classes=3, per_class=2)
    return root

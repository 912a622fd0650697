"""Fixtures shared by all tests."""

from pathlib import Path

import pytest

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

"""What the tests of faults share."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def workloads() -> Iterator[Any]:
    """The module workloads.py, with its small network among the architectures."""
    from instdisc.networks import backbones
    from instdisc.runs import folders

    path = Path(__file__).with_name("workloads.py")
    spec = importlib.util.spec_from_file_location("workloads", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["workloads"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    revision = folders.git_revision
    module.prepare()
    yield module
    folders.git_revision = revision
    del backbones.ARCHS["tiny"]

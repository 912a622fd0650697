"""Fixtures shared by all tests."""

import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: one thread is as fast on small tensors, leaves the other cores alone,
# and lets tests fork.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
from PIL import Image

REPO = Path(__file__).resolve().parents[1]
# As source, so that other interpreters can have it too. Free of batch statistics, so that its
# gradient does not depend on how a batch is cut over processes.
TINY = """
from torch import nn
from instdisc.networks import backbones

def tiny(stem, batch_norm):
    def stage(width, stride):
        return nn.Sequential(nn.Conv2d(width, 8, 3, stride), nn.GroupNorm(2, 8), nn.ReLU())
    stages = [stage(3, 2), *(stage(8, 1) for _ in range(4))]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())

backbones.ARCHS["tiny"] = backbones.Arch(tiny, 8, (8,) * 5, ("0", "1", "2", "3", "4"))
"""


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


@pytest.fixture(scope="session")
def tiny_code() -> str:
    """Code that makes `tiny` an architecture of the interpreter that runs it."""
    return TINY


@pytest.fixture
def start_ranks() -> Iterator[Callable[..., list[Any]]]:
    """Starts work(rank) in processes that torch can make a group of; none outlives the test."""
    started = []

    def start_all(work: Callable[[int], object], world_size: int = 2) -> list[Any]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]

        def start(rank: int) -> None:
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
            os.environ.update(ranks)
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            work(rank)

        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=start, args=[rank]) for rank in range(world_size)]
        for process in processes:
            process.start()
        started.extend(processes)
        return processes

    yield start_all
    for process in started:
        process.kill()
        process.join()


@pytest.fixture
def run_ranks(start_ranks: Callable[..., list[Any]]) -> Callable[..., list[int | None]]:
    """Runs work(rank) in processes, two if not given, to their end; their exit codes."""

    def run(work: Callable[[int], object], world_size: int = 2) -> list[int | None]:
        processes = start_ranks(work, world_size)
        for process in processes:
            process.join(60)
        return [process.exitcode for process in processes]

    return run


@pytest.fixture
def host_syncs() -> Callable[[], Any]:
    """A context manager that lists the operations for which a host would wait for its GPU.

    They are those that need a value to go on: `item`, `bool(tensor)`, a shape that depends on data,
    `tolist`. Copies that are read a step after they were made are none.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from instdisc.training.loop import HostCopy

    class Syncs(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []
            self.patch = pytest.MonkeyPatch()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            name = func.overloadpacket.__name__
            indices = args[1] if name in ("index", "index_put", "index_put_") else ()
            masked = any(each is not None and each.dtype == torch.bool for each in indices)
            if masked or name in ("_local_scalar_dense", "nonzero", "masked_select", "unique2"):
                self.found.append(name)
            return func(*args, **(kwargs or {}))

        def __enter__(self) -> "Syncs":
            inner, latest = torch.Tensor.tolist, [None]

            def start(copy: HostCopy, values: torch.Tensor) -> None:
                start_copy(copy, values)
                latest[0] = copy

            def read(copy: HostCopy) -> list[float]:
                if copy is latest[0]:
                    self.found.append("read at once")
                return inner(copy._values)

            def tolist(tensor: torch.Tensor) -> Any:
                self.found.append("tolist")
                return inner(tensor)

            start_copy = HostCopy.__init__
            self.patch.setattr(HostCopy, "__init__", start)
            self.patch.setattr(HostCopy, "read", read)
            self.patch.setattr(torch.Tensor, "tolist", tolist)
            return super().__enter__()

        def __exit__(self, *exc_info: Any) -> None:
            super().__exit__(*exc_info)
            self.patch.undo()

    return Syncs

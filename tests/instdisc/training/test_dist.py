"""Gathering in a fixed order, by one process and by two."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from instdisc.features.extract import extract_features
from instdisc.images.sets import read_folder
from instdisc.images.transforms import InputSpec
from instdisc.training import dist

# Each process writes what it holds after gathering.
WORKER = """
import sys
from pathlib import Path
import torch
from instdisc.training import dist
from instdisc.images.sets import read_folder
from instdisc.features.extract import extract_features
from instdisc.images.transforms import InputSpec

data, out = map(Path, sys.argv[1:])
process = dist.init_process("cpu")
images = read_folder(data / "train", "t", "train")
features = extract_features(lambda x: x.mean(dim=(2, 3)), images, InputSpec(size=16), process,
                            batch_size=3)
rows = dist.all_gather_rows(torch.full((2, 1), float(process.rank)))
torch.save((features, rows), out / f"{process.rank}.pt")
dist.close()
"""


def test_alone_every_helper_is_the_identity() -> None:
    rows = torch.arange(6.0).reshape(3, 2)
    assert torch.equal(dist.all_gather_rows(rows), rows)
    assert torch.equal(dist.all_reduce_sum(rows), rows)
    order = torch.tensor([2, 0, 1])
    assert torch.equal(dist.gather_by_index(rows, order, 3)[order], rows)


@pytest.mark.parametrize("indices", [[0, 1], [0, 0, 2]])
def test_rows_missing_or_doubled_are_noticed(indices: list[int]) -> None:
    with pytest.raises(AssertionError, match="missing or computed twice"):
        dist.gather_by_index(torch.ones(len(indices), 2), torch.tensor(indices), 3)


@pytest.mark.slow
def test_two_processes_extract_what_one_does(image_tree: Path, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = []
    for rank in "01":
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, "-c", WORKER, str(image_tree), str(tmp_path)]
        children.append(subprocess.Popen(command, env={**os.environ, **ranks, **place}))
    assert [child.wait(120) for child in children] == [0, 0]
    images = read_folder(image_tree / "train", "t", "train")
    alone = dist.Process(0, 1, torch.device("cpu"))
    expected = extract_features(
        lambda x: x.mean(dim=(2, 3)), images, InputSpec(size=16), alone, batch_size=3
    )
    for rank in "01":
        features, rows = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert torch.equal(features, expected)
        assert rows.flatten().tolist() == [0.0, 0.0, 1.0, 1.0]

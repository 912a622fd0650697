"""Gathering in a fixed order, by one process and by two."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from instdisc.errors import UserError
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
# The first process is busy for three times the timeout of the training group, where argv says.
BUSY = """
import sys, time
import torch
from instdisc.errors import UserError
from instdisc.training import dist

where = sys.argv[1]

def work():
    if process.is_main:
        time.sleep(3 * dist.training_timeout().total_seconds())

with dist.joined("cpu") as process:
    if where == "control":
        work()
        dist.barrier()
        work()
        assert dist.agree(process.is_main) and not dist.agree(False)
        order = torch.zeros(2)
        with dist.first_process_first(process):
            work()
            order[process.rank] = time.time()
        order = dist.all_reduce_sum(order)
        assert order[0] <= order[1]
    elif where == "training":
        work()
        dist.all_reduce_sum(torch.ones(1))
    else:
        with dist.first_process_first(process):
            if not process.is_main:
                sys.exit("began")
            raise UserError("the folder is in use")
"""


def run_two(program: str, *argv: str, **env: str) -> tuple[list[int], list[str]]:
    """Exit codes and last lines of two processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    children = []
    for rank in "01":
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        children.append(
            subprocess.Popen(
                [sys.executable, "-c", program, *argv],
                env={**os.environ, **ranks, **place, **env},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    said = [child.communicate(timeout=120)[1] for child in children]
    return [child.returncode for child in children], [
        (text or "\n").splitlines()[-1] for text in said
    ]


def test_alone_every_helper_is_the_identity() -> None:
    rows = torch.arange(6.0).reshape(3, 2)
    assert torch.equal(dist.all_gather_rows(rows), rows)
    assert torch.equal(dist.all_reduce_sum(rows), rows)
    order = torch.tensor([2, 0, 1])
    assert torch.equal(dist.gather_by_index(rows, order, 3)[order], rows)
    assert (dist.agree(True), dist.agree(False)) == (True, False)
    dist.barrier()
    with dist.first_process_first(dist.Process(0, 1, torch.device("cpu"))):
        assert torch.equal(rows, torch.arange(6.0).reshape(3, 2))


@pytest.mark.slow
def test_the_others_wait_for_a_first_process_that_is_busy_for_long() -> None:
    started = time.monotonic()
    limits = {"INSTDISC_TIMEOUT_SECONDS": "2", "INSTDISC_SILENCE_SECONDS": "4"}
    codes, said = run_two(BUSY, "control", **limits)
    assert codes == [0, 0], said
    assert time.monotonic() - started > 18
    # With as long a silence in the training group, the timeout is what ends the other process.
    codes, said = run_two(BUSY, "training", INSTDISC_TIMEOUT_SECONDS="2")
    assert codes[1] == 1
    assert "Interrupted: all processes live, but one came 2 s late" in said[1]


@pytest.mark.slow
def test_what_the_first_process_fails_in_the_others_do_not_begin() -> None:
    codes, said = run_two(BUSY, "failing")
    assert codes == [1, 1]
    assert said[0].endswith("UserError: the folder is in use")
    assert said[1].endswith("UserError: the first process failed: see its message")


@pytest.mark.parametrize("text", ["soon", "0", "1.5", "-3"])
def test_a_timeout_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTDISC_TIMEOUT_SECONDS", text)
    with pytest.raises(UserError, match="give whole seconds"):
        dist.training_timeout()


@pytest.mark.parametrize("indices", [[0, 1], [0, 0, 2]])
def test_rows_missing_or_doubled_are_noticed(indices: list[int]) -> None:
    with pytest.raises(AssertionError, match="missing or computed twice"):
        dist.gather_by_index(torch.ones(len(indices), 2), torch.tensor(indices), 3)


@pytest.mark.slow
def test_two_processes_extract_what_one_does(image_tree: Path, tmp_path: Path) -> None:
    assert run_two(WORKER, str(image_tree), str(tmp_path))[0] == [0, 0]
    images = read_folder(image_tree / "train", "t", "train")
    alone = dist.Process(0, 1, torch.device("cpu"))
    expected = extract_features(
        lambda x: x.mean(dim=(2, 3)), images, InputSpec(size=16), alone, batch_size=3
    )
    for rank in "01":
        features, rows = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        assert torch.equal(features, expected)
        assert rows.flatten().tolist() == [0.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("local_rank", "num_visible", "gpu"),
    [(0, 1, 0), (7, 1, 0), (0, 8, 0), (7, 8, 7)],  # (7, 1): each process sees its own GPU only
)
def test_the_gpu_of_a_process(local_rank: int, num_visible: int, gpu: int) -> None:
    assert dist.gpu_for(local_rank, num_visible) == gpu


@pytest.mark.parametrize(("local_rank", "num_visible"), [(0, 0), (2, 2), (7, 4)])
def test_a_process_without_a_gpu_is_refused(local_rank: int, num_visible: int) -> None:
    with pytest.raises(UserError, match=f"no GPU for local rank {local_rank}"):
        dist.gpu_for(local_rank, num_visible)


def test_threads_are_set_where_a_number_is_given() -> None:
    before = torch.get_num_threads()
    try:
        dist.init_process("cpu", before + 1)
        assert torch.get_num_threads() == before + 1
        dist.init_process("cpu")
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)

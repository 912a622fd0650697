"""A bank cut over 2 and 4 gloo processes against the whole one: losses, gradients, rows, memory."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.bank import MemoryBank
from pretrain.config import PretrainConfig
from pretrain.criterion import Criterion
from pretrain.sharded_bank import ShardedBank, rows_of_rank

# Processes that start torch take seconds each.
pytestmark = pytest.mark.slow

N, D, B, M = 203, 16, 8, 24  # 203 rows share evenly among neither 2 nor 4
CASES: dict[str, dict[str, Any]] = {
    "softmax": {"objective": "softmax"},
    "softmax half": {"objective": "softmax", "bank_dtype": "float16"},
    "nce": {},
    "nce exact": {"normalizer": "exact", "proximal_weight": 0.5},
    "nce half": {"bank_dtype": "float16"},
    "nce shared": {"negatives": "shared"},
    "nce shared half": {"negatives": "shared", "bank_dtype": "float16"},
    "sampled": {"objective": "sampled-softmax"},
    "sampled shared": {"objective": "sampled-softmax", "negatives": "shared"},
}
# Run by each process; its place in the group is in the environment, as torchrun leaves it.
WORKER = """
import json, sys, torch
from instdisc.training import dist
from pretrain.config import PretrainConfig
from pretrain.criterion import Criterion
from pretrain.bank import build_bank

job = json.loads(sys.argv[1])
process = dist.init_process("cpu")
inputs = torch.load(job["inputs"], weights_only=True)
share = len(inputs["features"]) // process.world_size
rows = range(process.rank * share, (process.rank + 1) * share)
mine = slice(rows.start, rows.stop)

def mean(value):
    return dist.all_reduce_sum(value) / process.world_size

def run(values, table):
    config = PretrainConfig(**values, bank_placement="sharded")
    bank = build_bank(config, job["n"], process)
    if table is not None:
        bank.load(table)
    features = inputs["features"][mine].clone().requires_grad_()
    losses = Criterion(config, job["n"])(
        features, inputs["indices"][mine], bank, step=3, rows=rows, mean_over_processes=mean
    )
    losses.sum().backward()
    kept = torch.ones(len(inputs["indices"]), dtype=torch.bool)
    bank.update(inputs["indices"], inputs["features"], kept)
    return {
        "losses": losses.detach(), "grad": features.grad, "numbers": bank.vectors.numel(),
        "table": bank.assemble(),
    }

results = {name: run(values, None) for name, values in job["cases"].items()}
if "table" in inputs:
    results["moved"] = run(job["cases"]["nce"], inputs["table"])
torch.save(results, f"{job['output']}-{process.rank}.pt")
dist.close()
"""


def unit_rows(n: int, seed: int) -> torch.Tensor:
    drawn = torch.randn(n, D, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.normalize(drawn, dim=1)


# Rows of one owner only would hide a wrong owner: the first, the last and the borders are there.
INDICES = torch.tensor([0, 50, 51, 101, 102, 152, 153, 202])
FEATURES = unit_rows(B, seed=7)
CONFIG = {"embedding_dim": D, "num_negatives": M, "temperature": 0.2, "bank_momentum": 0.5}


def run_group(world_size: int, folder: Path, **inputs: torch.Tensor) -> list[dict[str, Any]]:
    """What every process found, in rank order."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"features": FEATURES, "indices": INDICES, **inputs}, folder / "inputs.pt")
    job = {
        "inputs": str(folder / "inputs.pt"),
        "output": str(folder / "rank"),
        "n": N,
        "cases": {name: {**CONFIG, **values} for name, values in CASES.items()},
    }
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    group = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = []
    for rank in range(world_size):
        place = {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-c", WORKER, json.dumps(job)]
        children.append(subprocess.Popen(command, env={**os.environ, **place}))
    assert [child.wait(120) for child in children] == [0] * world_size
    return [torch.load(folder / f"rank-{i}.pt", weights_only=True) for i in range(world_size)]


def run_alone(name: str, table: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """The same with all rows in one process."""
    config = PretrainConfig(**{**CONFIG, **CASES[name]})
    dtype = torch.float16 if config.bank_dtype == "float16" else torch.float32
    bank = MemoryBank(N, D, momentum=config.bank_momentum, seed=config.seed, dtype=dtype)
    if table is not None:
        bank.load(table)
    features = FEATURES.clone().requires_grad_()
    losses = Criterion(config, N)(
        features, INDICES, bank, step=3, rows=range(B), mean_over_processes=lambda value: value
    )
    losses.sum().backward()
    bank.update(INDICES, FEATURES, torch.ones(len(INDICES), dtype=torch.bool))
    assert features.grad is not None
    return {"losses": losses.detach(), "grad": features.grad, "table": bank.vectors}


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Four processes; and two, which also go on from the rows that the four have saved."""
    folder = tmp_path_factory.mktemp("groups")
    four = run_group(4, folder / "4")
    return {4: four, 2: run_group(2, folder / "2", table=four[0]["nce"]["table"])}


@pytest.fixture(params=[2, 4])
def group(request: pytest.FixtureRequest, groups: dict[int, list[dict]]) -> list[dict]:
    return groups[request.param]


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_process(group: list[dict], name: str) -> None:
    alone = run_alone(name)
    for what in ("losses", "grad"):
        together = torch.cat([found[name][what] for found in group])
        torch.testing.assert_close(together, alone[what], atol=1e-5, rtol=1e-5)
    assert alone["grad"].abs().max() > 0.1


@pytest.mark.parametrize("name", ["nce", "nce half"])
def test_rows_after_an_update_are_exactly_those_of_one_process(
    group: list[dict], name: str
) -> None:
    alone = run_alone(name)["table"]
    for found in group:
        assert torch.equal(found[name]["table"], alone)


def test_each_process_holds_its_share_and_no_more(group: list[dict]) -> None:
    held = [found["nce"]["numbers"] for found in group]
    assert sum(held) == N * D
    assert max(held) == -(-N // len(group)) * D


def test_a_checkpoint_moves_between_placements(groups: dict[int, list[dict]]) -> None:
    """Rows assembled from four processes, loaded by two, and by one: the same next step."""
    table = groups[4][0]["nce"]["table"]
    alone = run_alone("nce", table)
    together = torch.cat([found["moved"]["losses"] for found in groups[2]])
    torch.testing.assert_close(together, alone["losses"], atol=1e-5, rtol=1e-5)
    assert torch.equal(groups[2][0]["moved"]["table"], alone["table"])
    assert not torch.equal(table, alone["table"])


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 300])
def test_rows_have_one_owner_each(world_size: int) -> None:
    owned = [rows_of_rank(N, rank, world_size) for rank in range(world_size)]
    assert [i for rows in owned for i in rows] == list(range(N))


def test_eight_shards_start_as_one_bank_and_take_their_rows_of_a_table() -> None:
    whole, table = MemoryBank(N, D, momentum=0.0, seed=5), unit_rows(N, seed=9)
    shards = [ShardedBank(N, D, momentum=0.0, seed=5, rank=rank, world_size=8) for rank in range(8)]
    assert torch.equal(torch.cat([shard.vectors for shard in shards]), whole.vectors)
    for shard in shards:
        shard.load(table)
    assert torch.equal(torch.cat([shard.vectors for shard in shards]), table)

"""Checkpoints of a sharded bank by four gloo processes: moved, bounded in memory, killed."""

import contextlib
import errno
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from instdisc.cli import from_dict
from instdisc.errors import UserError
from instdisc.runs import row_files
from instdisc.runs.background import BackgroundWriter
from instdisc.runs.checkpoint import load_checkpoint, previous_of, save_checkpoint
from instdisc.runs.folders import read_jsonl
from instdisc.runs.row_files import load_all_rows, open_rows, remove_unnamed
from instdisc.training import dist
from pretrain.bank import MemoryBank, initial_rows
from pretrain.config import PretrainConfig
from pretrain.sharded_bank import ShardedBank
from pretrain.trainer import Trainer, pretrain

# Groups of processes take seconds each.
pytestmark = pytest.mark.slow

Ranks = Callable[..., list[int | None]]
N, D = 320_000, 128
SHARD = N // 4 * D * 4  # 41 MB
BUFFERS = 28 << 20  # two of 8 MB, and what the interpreter and gloo take meanwhile


def build(n: int, rank: int, world_size: int, seed: int = 0) -> ShardedBank:
    return ShardedBank(n, D, momentum=0.5, seed=seed, rank=rank, world_size=world_size)


def start_save(writer: BackgroundWriter, bank: ShardedBank, last: Path, step: int) -> None:
    """As the trainer does, without a network."""
    write_rows = bank.start_saving(last)

    def write() -> None:
        rows = write_rows()
        if bank.rank == 0:
            save_checkpoint(last, "train", {"step": step, "bank": rows}, keep_previous=True)
            remove_unnamed(last)

    writer.start(write)


def peak_over(before: int) -> int:
    """Bytes by which the most memory since `forget_peak` exceeds what was held then."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024 - before


def forget_peak() -> int:
    """Bytes held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_over(0)


def test_rows_move_between_numbers_of_processes_and_nobody_holds_more_than_a_shard(
    tmp_path: Path, run_ranks: Ranks
) -> None:
    last = tmp_path / "last.pt"

    def save(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process("cpu")
        bank = build(N, rank, 4)
        images = torch.randperm(N, generator=torch.Generator().manual_seed(1))[:64]
        features, kept = initial_rows(64, D, seed=9, rows=range(64)), torch.ones(64) > 0
        with BackgroundWriter() as writer:
            start_save(writer, bank, last, 0)
            writer.wait()  # what loads once: gloo's buffers, modules
            before = forget_peak()
            start_save(writer, bank, last, 1)
            while not bank._snapshot._done.is_set():  # training goes on
                bank.update(images, features, kept)
        assert peak_over(before) < BUFFERS < SHARD, peak_over(before)
        assert not torch.equal(bank.assemble(), initial_rows(N, D, seed=0, rows=range(N)))
        dist.close()

    assert run_ranks(save, 4) == [0] * 4
    state = load_checkpoint(last, "train")
    assert state["step"] == 1
    # What was there when the save began, though rows changed meanwhile.
    expected = initial_rows(N, D, seed=0, rows=range(N))
    assert torch.equal(load_all_rows(state["bank"], last), expected)
    assert torch.equal(
        load_all_rows(load_checkpoint(previous_of(last), "train")["bank"], last), expected
    )
    assert len(list((tmp_path / "last.rows").iterdir())) == 8

    for world_size in (1, 2, 3):

        def load(rank: int, world_size: int = world_size) -> None:
            torch.set_num_threads(1)
            dist.init_process("cpu")
            bank = build(N, rank, world_size, seed=5)
            before = forget_peak()
            bank.load(open_rows(state["bank"], last))
            assert peak_over(before) < BUFFERS, peak_over(before)
            assert torch.equal(bank.vectors, expected[bank.owned.start : bank.owned.stop])
            dist.close()

        assert run_ranks(load, world_size) == [0] * world_size
    whole = MemoryBank(N, D, momentum=0.5, seed=5)
    whole.load(open_rows(state["bank"], last))
    assert torch.equal(whole.vectors, expected)


def save_from(folder: Path, step: int, moments: dict[int, int], rank: int) -> None:
    """One save after the other; dies at its n-th operation on files, or when another has died."""
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        writing = event == "open" and isinstance(args[2], int) and bool(args[2] & os.O_CREAT)
        if not (writing or event in ("os.rename", "os.link", "os.remove")):
            return
        if str(args[0]).startswith(str(folder)):
            count += 1
            if count == moments.get(rank):
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    dist.init_process("cpu")
    bank = build(1000, rank, 4)
    writer = BackgroundWriter()
    while True:
        writer.wait()
        dist.barrier()
        bank.vectors.fill_(step)
        start_save(writer, bank, folder / "last.pt", step)
        step += 1


def test_kills_while_saving_lose_that_save_at_most(
    tmp_path: Path, run_ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process is killed and the others end by themselves; or all are, each somewhere."""
    monkeypatch.setattr(row_files, "CHUNK_BYTES", 50 * D * 4)
    draw, step, saved = random.Random(0), -1, set()
    for kill in range(8):
        alone = draw.randrange(4) if kill % 4 else None
        # The first process writes last.pt too, and removes old files.
        moments: dict[int, int] = {}
        for rank in range(4) if alone is None else [alone]:
            moments[rank] = draw.randint(1, 30 if rank == 0 else 6)
        codes = run_ranks(partial(save_from, tmp_path, step + 1, moments), 4)
        assert None not in codes, "a process waits for one that is dead"
        assert -signal.SIGKILL in codes
        assert 0 not in codes
        if not (tmp_path / "last.pt").exists():
            continue
        for file in (tmp_path / "last.pt", previous_of(tmp_path / "last.pt")):
            if file.exists():
                state = load_checkpoint(file, "train")
                rows = load_all_rows(state["bank"], file)
                assert torch.equal(rows, torch.full((1000, D), float(state["step"])))
        state = load_checkpoint(tmp_path / "last.pt", "train")
        assert state["step"] >= step
        step = state["step"]
        saved.add(step)
    assert len(saved) > 3


def test_a_process_that_cannot_write_is_named_and_the_checkpoint_stays(
    tmp_path: Path, run_ranks: Ranks
) -> None:
    last = tmp_path / "last.pt"

    @contextlib.contextmanager
    def full(path: Path) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
        yield

    def work(rank: int) -> None:
        dist.init_process("cpu")
        bank, writer = build(1000, rank, 4), BackgroundWriter()
        start_save(writer, bank, last, 1)
        writer.wait()
        if rank == 2:
            row_files.atomic_file = full
        start_save(writer, bank, last, 2)
        for _ in range(3):  # who cannot write holds up nobody
            bank.update(torch.arange(1000), bank.assemble(), torch.ones(1000) > 0)
        expected = OSError if rank == 2 else UserError
        with pytest.raises(expected, match=r"No space|not written: process 2: .*the disk is full"):
            writer.wait()
        dist.close()

    assert run_ranks(work, 4) == [0] * 4
    state = load_checkpoint(last, "train")
    assert state["step"] == 1
    expected = initial_rows(1000, D, seed=0, rows=range(1000))
    assert torch.equal(load_all_rows(state["bank"], last), expected)


def test_a_run_of_four_processes_goes_on_with_one_two_and_three(
    image_tree: Path, tiny_code: str, tmp_path: Path, run_ranks: Ranks
) -> None:
    values = {
        "data": str(image_tree), "image_size": 24, "batch_size": 12, "lr_milestones": [5],
        "num_negatives": 6, "normalizer": "exact", "workers": 0, "log_every": 1,
        "monitor_every": 0, "tensorboard": False, "device": "cpu", "bank_placement": "sharded",
    }  # fmt: skip

    def run(output: Path, epochs: int) -> Callable[[int], None]:
        given = {**values, "output": str(output), "epochs": epochs}

        def work(rank: int) -> None:
            def restore(trainer: Trainer, state: dict[str, Any]) -> None:
                inner(trainer, state)
                torch.save(trainer.bank.assemble(), output / f"restored-{rank}.pt")

            inner, Trainer.restore = Trainer.restore, restore
            torch.set_num_threads(1)
            exec(tiny_code, {})
            pretrain(PretrainConfig(**{**from_dict(PretrainConfig, given), "arch": "tiny"}))

        return work

    four = tmp_path / "4"
    assert run_ranks(run(four, 2), 4) == [0] * 4
    state = load_checkpoint(four / "last.pt", "train")
    assert [each["first"] for each in state["bank"]["files"]] == [0, 6, 12, 18]
    rows = load_all_rows(state["bank"], four / "last.pt")
    banks = []
    for world_size in (1, 2, 3):
        moved = tmp_path / str(world_size)
        shutil.copytree(four, moved)
        assert run_ranks(run(moved, 3), world_size) == [0] * world_size
        for rank in range(world_size):
            found = torch.load(moved / f"restored-{rank}.pt", weights_only=True)
            assert torch.equal(found, rows)
        told = [row["step"] for row in read_jsonl(moved / "metrics.jsonl") if "loss" in row]
        assert told == [1, 2, 3, 4, 5, 6]
        state = load_checkpoint(moved / "last.pt", "train")
        assert len(state["bank"]["files"]) == world_size
        banks.append(load_all_rows(state["bank"], moved / "last.pt"))
        torch.testing.assert_close(banks[-1], banks[0], atol=1e-4, rtol=0)
    assert not torch.equal(banks[0], rows)

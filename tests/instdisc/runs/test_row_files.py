"""Rows in files: what a snapshot holds while rows change, what is read back, what is refused."""

import copy
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from instdisc.runs import row_files
from instdisc.runs.checkpoint import DamagedFile, previous_of, save_checkpoint
from instdisc.runs.row_files import (
    RowSnapshot,
    StoredRows,
    describe_rows,
    load_all_rows,
    read_rows,
    remove_unnamed,
    write_row_file,
)

N, D = 103, 4
BOUNDS = (0, 40, 40, 77, N)  # of four files, one of them empty


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_files, "CHUNK_BYTES", 10 * D * 4)  # ten rows of float32


def table(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(seed)).to(dtype)


def write(checkpoint: Path, rows: Tensor, save: str = "a") -> dict[str, Any]:
    files = [
        write_row_file(checkpoint, f"{save}.{i}", RowSnapshot(rows[first:last]), first)
        for i, (first, last) in enumerate(itertools.pairwise(BOUNDS))
    ]
    return describe_rows(checkpoint, rows, files)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_part_is_read_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    rows = table(dtype=dtype)
    entry = write(tmp_path / "last.pt", rows)
    stored = StoredRows.open(entry, tmp_path / "last.pt")
    assert torch.equal(load_all_rows(entry, tmp_path / "last.pt"), rows)
    for first in range(0, N, 7):
        for last in (first, first + 1, first + 20, N):
            target = torch.full((min(last, N) - first, D), 9.0, dtype=dtype)
            read_rows(stored, target, first)
            assert torch.equal(target, rows[first:last])
    assert all(stored.find_damage(rank, 3) is None for rank in range(3))
    assert max(len(part) for _, part in stored.read(range(N))) <= stored.chunk_rows


def test_a_snapshot_holds_what_was_there_while_rows_change() -> None:
    rows = table()
    before, snapshot = rows.clone(), RowSnapshot(rows)
    draw = torch.Generator().manual_seed(1)
    found = []
    with snapshot:
        for part in snapshot.chunks():
            found.append(part.clone())
            for _ in range(2):  # rows are changed again and again, read ones and others
                places = torch.randperm(N, generator=draw)[:3]
                with snapshot.changing(places):
                    rows[places] += 1
    assert torch.equal(torch.cat(found), before)
    assert not torch.equal(rows, before)
    with snapshot.changing(torch.arange(N)):
        assert not snapshot._kept  # it is read, so nothing more is kept


def test_more_changes_than_may_be_kept_wait_for_the_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(row_files, "KEPT_BYTES", 10 * D * 4)
    rows = table()
    before, snapshot = rows.clone(), RowSnapshot(rows)
    reading = snapshot.chunks()
    found = [next(reading).clone()]
    changed = threading.Semaphore(0)

    def change() -> None:
        for first in (90, 80, 70):
            places = torch.arange(first, first + 10)
            with snapshot.changing(places):
                rows[places] = 0
            changed.release()

    thread = threading.Thread(target=change)
    thread.start()
    # Twenty rows are more than the ten that may be kept: the third change waits.
    assert changed.acquire(timeout=60)
    assert changed.acquire(timeout=60)
    assert not changed.acquire(timeout=0.2)
    with snapshot:
        found += [part.clone() for part in reading]
    thread.join(60)
    assert changed.acquire(timeout=0)
    assert torch.equal(torch.cat(found), before)
    assert not rows[70:100].any()


def test_a_reader_that_fails_holds_nobody_up() -> None:
    snapshot = RowSnapshot(table())
    with pytest.raises(OSError, match="full"), snapshot:
        raise OSError("full")
    for _ in range(3):
        with snapshot.changing(torch.arange(N)):
            pass


def changed(entry: dict[str, Any], change: Callable[[Any], object]) -> dict[str, Any]:
    other = copy.deepcopy(entry)
    change(other)
    return other


ENTRIES: dict[str, Callable[[Any], object]] = {
    "no folder": lambda e: e.pop("folder"),
    "another folder": lambda e: e.update(folder="../elsewhere"),
    "a name that leads out": lambda e: e["files"][0].update(name="../last.pt"),
    "no name": lambda e: e["files"][0].update(name=3),
    "rows twice": lambda e: e["files"][1].update(first=39),
    "rows left out": lambda e: e["files"].pop(),
    "more rows": lambda e: e.update(num_rows=N + 1),
    "no rows": lambda e: e.update(num_rows=0, files=[]),
    "a checksum less": lambda e: e["files"][0]["checksums"].pop(),
    "another width": lambda e: e.update(dim=D + 1),
    "another type": lambda e: e.update(dtype="float64"),
    "no number": lambda e: e.update(chunk_rows="many"),
}


@pytest.mark.parametrize("what", ENTRIES)
def test_an_entry_that_names_no_whole_table_is_refused(tmp_path: Path, what: str) -> None:
    entry = changed(write(tmp_path / "last.pt", table()), ENTRIES[what])
    with pytest.raises(DamagedFile, match=r"last\.pt"):
        StoredRows.open(entry, tmp_path / "last.pt")
    for nothing in (None, [], {}, "rows"):
        with pytest.raises(DamagedFile):
            StoredRows.open(nothing, tmp_path / "last.pt")


def test_damage_is_found_by_the_process_that_reads_it(tmp_path: Path) -> None:
    last = tmp_path / "last.pt"
    entry = write(last, table())
    file = tmp_path / "last.rows" / "a.3"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 128]))
    stored = StoredRows.open(entry, last)
    assert [stored.find_damage(rank, 2) is None for rank in range(2)] == [True, False]
    with pytest.raises(DamagedFile, match=r"a\.3.* is damaged"):
        load_all_rows(entry, last)
    read_rows(stored, torch.empty(77, D))  # the others are good
    file.write_bytes(good[:-1])
    with pytest.raises(DamagedFile, match=r"a\.3.* of another size"):
        StoredRows.open(entry, last)
    file.unlink()
    with pytest.raises(DamagedFile, match=r"keep last\.rows/ beside its checkpoint"):
        StoredRows.open(entry, last)


def test_only_files_that_a_checkpoint_names_are_kept(tmp_path: Path) -> None:
    last, folder = tmp_path / "last.pt", tmp_path / "last.rows"
    for save in "abc":
        entry = write(last, table(), save)
        save_checkpoint(last, "train", {"bank": entry}, keep_previous=True)
        (folder / f".{save}.0.host.1.0.tmp").write_bytes(b"half")
        remove_unnamed(last)
        kept = {"a": "a", "b": "ab", "c": "bc"}[save]
        assert sorted(p.name for p in folder.iterdir()) == [
            f"{s}.{i}" for s in kept for i in range(4)
        ]
    older = load_all_rows(torch.load(previous_of(last), weights_only=True)["bank"], last)
    assert torch.equal(older, table())
    # Two saves later with all rows in last.pt itself, none is needed.
    for _ in range(2):
        save_checkpoint(last, "train", {"bank": table()}, keep_previous=True)
        remove_unnamed(last)
    assert not folder.exists()
    remove_unnamed(last)

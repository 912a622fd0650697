"""A table that is filled chunk by chunk: sizes, marks, damage."""

from pathlib import Path

import numpy as np
import pytest

from instdisc.features.table import ChunkedTable

HALF = np.dtype("<f2")


def build(folder: Path, num_rows: int = 10, dim: int = 3) -> ChunkedTable:
    table = ChunkedTable(folder, num_rows=num_rows, dim=dim, dtype=HALF, chunk_rows=4)
    table.create()
    return table


def test_chunks_in_any_order_make_the_table(tmp_path: Path) -> None:
    values = np.arange(30, dtype=HALF).reshape(10, 3)
    table = build(tmp_path)
    assert table.unfinished() == [0, 1, 2]
    for chunk in (2, 0, 1):
        table.write(chunk, values[4 * chunk : 4 * chunk + 4])
    assert table.unfinished() == []
    np.testing.assert_array_equal(np.load(tmp_path / "features.npy"), values)
    rows = table.open()
    rows[0] = 7  # a copy of the page, not the file
    np.testing.assert_array_equal(np.load(tmp_path / "features.npy"), values)


def test_all_zero_chunk_counts_once_it_is_written(tmp_path: Path) -> None:
    table = build(tmp_path)
    table.write(1, np.zeros((4, 3)))
    assert table.unfinished() == [0, 2]


def test_creating_again_keeps_what_is_finished(tmp_path: Path) -> None:
    build(tmp_path).write(1, np.ones((4, 3)))
    assert build(tmp_path).unfinished() == [0, 2]
    # A table of another shape begins anew.
    assert build(tmp_path, dim=4).unfinished() == [0, 1, 2]


@pytest.mark.parametrize("name", ["features.npy", "progress.bin"])
def test_file_cut_short_begins_anew(name: str, tmp_path: Path) -> None:
    build(tmp_path).write(1, np.ones((4, 3)))
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-1])
    assert build(tmp_path).unfinished() == [0, 1, 2]


def test_rows_must_fill_the_chunk(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="chunk 2"):
        build(tmp_path).write(2, np.ones((4, 3)))


def test_imagenet_in_half_precision_takes_less_than_330_mb(tmp_path: Path) -> None:
    table = ChunkedTable(
        tmp_path, num_rows=1_281_167, dim=128, dtype=np.dtype("<f2"), chunk_rows=256
    )
    table.create()
    table.write(table.num_chunks - 1, np.ones((1_281_167 % 256, 128)))
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert size <= 330e6
    rows = table.open()
    assert rows.shape == (1_281_167, 128)
    assert rows[-1].all()
    assert table.unfinished() == list(range(table.num_chunks - 1))

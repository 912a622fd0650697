"""Results: nothing lost under many writers, damaged rows named, repetitions grouped."""

import dataclasses
import multiprocessing
import stat
from pathlib import Path

import pytest

from instdisc.errors import UserError
from instdisc.runs.results import (
    Result,
    append_results,
    check_results,
    config_hash,
    read_results,
    repair_results,
    results_file,
    summarize,
)


def result(**changes: object) -> Result:
    values = {
        "task": "knn", "protocol": "k=200", "arch": "resnet18", "weights": "run",
        "weights_hash": "w", "dataset": "cifar10", "data_fingerprint": "d", "metric": "top1",
        "value": 50.0, "seed": 0, "config_hash": "c", "provenance": {}, **changes,
    }  # fmt: skip
    return Result(**values)  # type: ignore[arg-type]


def test_what_is_appended_is_read() -> None:
    rows = [result(value=1.5, details={"per_class": [1, 2]}), result(seed=1)]
    path = append_results(rows)
    assert path == results_file()
    assert read_results() == rows


def _append(path: Path, writer: int) -> None:
    for i in range(50):
        append_results([result(seed=writer * 50 + i, details={"filler": "x" * 5000})], path)


def test_ten_writers_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    writers = [
        multiprocessing.get_context("fork").Process(target=_append, args=(path, i))
        for i in range(10)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert sorted(row.seed for row in read_results(path)) == list(range(500))


def test_a_line_cut_short_is_named_and_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_results([result()], path)
    with path.open("ab") as file:
        file.write(b'{"task": "kn')
    append_results([result(seed=1)], path)
    rows, problems = check_results(path)
    assert [row.seed for row in rows] == [0, 1]
    assert len(problems) == 1
    assert problems[0].startswith("line 2")
    with pytest.raises(UserError, match="line 2"):
        read_results(path)


@pytest.mark.parametrize(
    "change", [{"value": "high"}, {"value": float("nan")}, {"seed": 1.5}, {"extra": 1}, {"task": 3}]
)
def test_rows_of_the_wrong_kind_are_problems(tmp_path: Path, change: dict[str, object]) -> None:
    import json

    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps({**dataclasses.asdict(result()), **change}) + "\n")
    rows, problems = check_results(path)
    assert rows == []
    assert len(problems) == 1


def test_repetitions_are_averaged_and_protocols_never_mix() -> None:
    rows = [result(seed=s, value=v) for s, v in ((0, 1.0), (1, 3.0), (1, 5.0))]
    other = result(protocol="k=20", value=9.0)
    (_, first), (_, second) = summarize([*rows, other])
    assert (first.mean, first.count) == (3.0, 2)
    assert first.std == pytest.approx(8**0.5)
    assert str(first) == "3.00 ± 2.83 (n=2)"
    assert (second.mean, second.std, second.count) == (9.0, None, 1)


def test_the_config_hash_does_not_depend_on_order() -> None:
    assert config_hash({"a": 1, "b": Path("x")}) == config_hash({"b": Path("x"), "a": 1})
    assert config_hash({"a": 1}) != config_hash({"a": 2})


def test_a_cut_last_line_is_reported_then_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_results([result(seed=s) for s in range(3)], path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    rows, problems = check_results(path)
    assert [row.seed for row in rows] == [0, 1]
    assert len(problems) == 1
    assert problems[0].startswith("line 3: cut short: ")
    assert repair_results(path) == problems
    assert check_results(path) == (rows, [])
    lines = whole.split(b"\n")
    assert path.read_bytes() == lines[0] + b"\n" + lines[1] + b"\n"
    assert path.with_name("results.jsonl.damaged").read_bytes() == lines[2][:-39] + b"\n"
    assert repair_results(path) == []


def test_repair_keeps_what_stands_behind_a_bad_line_and_ends_every_line(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_results([result(seed=0)], path)
    with path.open("ab") as file:
        file.write(b'{"task": "kn\xff')
    append_results([result(seed=1)], path)
    path.write_bytes(path.read_bytes()[:-1])  # whole, but for its newline
    assert len(repair_results(path)) == 1
    assert [row.seed for row in read_results(path)] == [0, 1]
    assert path.read_bytes().endswith(b"}\n")


def test_repair_replaces_the_file_as_a_whole(tmp_path: Path) -> None:
    path, real = tmp_path / "results.jsonl", tmp_path / "elsewhere"
    path.symlink_to(real)
    append_results([result(seed=0)], path)
    damaged = b"broken\n" + real.read_bytes()
    real.write_bytes(damaged)
    real.chmod(0o640)
    with real.open("rb") as before:
        assert len(repair_results(path)) == 1
        assert before.read() == damaged  # until the new one is there, whole
    assert path.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o640
    assert [row.seed for row in read_results(path)] == [0]


def _repair_often(path: Path) -> None:
    for _ in range(100):
        repair_results(path)


def test_repairing_while_others_write_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"broken\n")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_append, args=(path, i)) for i in range(3)]
    workers.append(context.Process(target=_repair_often, args=(path,)))
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert sorted(row.seed for row in read_results(path)) == list(range(150))


def test_a_percentage_beyond_its_range_is_a_problem(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_results([result(value=100.5), result(value=-0.1), result(value=100.0)], path)
    rows, problems = check_results(path)
    assert [row.value for row in rows] == [100.0]
    assert len(problems) == 2

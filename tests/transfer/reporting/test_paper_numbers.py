"""The published numbers: complete, in range, and where the paper's text can be checked, right."""

import typing

import pytest

from transfer.reporting import paper_numbers as paper
from transfer.reporting.benchmarks import BENCHMARKS, FILE, Benchmark

TABLES = {
    "TABLE1": (paper.TABLE1, 6, ("linear SVM", "kNN")),
    "TABLE2": (paper.TABLE2, 13, paper.READOUTS),
    "TABLE3": (paper.TABLE3, 12, paper.READOUTS),
    "TABLE6": (paper.TABLE6, 16, (paper.VOC07,)),
}
EVERYTHING = [
    *(row for table, _, _ in TABLES.values() for row in table),
    *paper.IMAGENET_ANCHORS,
    *(row for benchmark in BENCHMARKS for row in benchmark.published),
]


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_whole_and_cite_their_place(name: str) -> None:
    rows, count, columns = TABLES[name]
    assert len(rows) == count
    for row in rows:
        assert row.citation == f"Wu et al., CVPR 2018, Table {name[-1]}"
        assert set(row.values) <= set(columns)
        if row.kind == "ours":
            assert set(row.values) == set(columns)
    assert len({(row.method, row.arch) for row in rows}) == count


def test_every_number_is_a_percentage_with_a_source() -> None:
    for row in EVERYTHING:
        assert paper.find_address(row.citation) == paper.ADDRESSES[row.source]
        assert row.kind in typing.get_args(paper.Kind)
        assert row.values
        assert all(0 < value < 100 for value in row.values.values())


def test_rows_that_can_be_compared_are_told_apart_by_kind_and_network() -> None:
    for table in (paper.TABLE2, paper.TABLE3, paper.TABLE6):
        keys = [(row.kind, row.arch) for row in table if row.kind != "other"]
        assert len(keys) == len(set(keys))


def test_every_row_of_table_1_has_its_objective() -> None:
    assert set(paper.TABLE1_SETTINGS) == {row.method for row in paper.TABLE1}
    assert len(set(paper.TABLE1_SETTINGS.values())) == 6


def test_tables_agree_where_they_say_the_same() -> None:
    """ResNet-18 with 128 dimensions and all images is in three of the paper's tables."""
    (resnet18,) = [row for row in paper.TABLE2 if (row.kind, row.arch) == ("ours", "resnet18")]
    assert resnet18.values["kNN"] == paper.TABLE4[128] == paper.TABLE5[1.0] == 41.0


def find(slug: str) -> Benchmark:
    return next(benchmark for benchmark in BENCHMARKS if benchmark.slug == slug)


def test_every_line_of_the_zoo_is_read_once() -> None:
    with FILE.open(encoding="utf-8") as file:
        lines = len(file.readlines()) - 1
    rows = [row for each in BENCHMARKS for row in each.published if row.source == paper.OPENSELFSUP]
    assert len(rows) == lines == 77
    assert sum(len(row.values) for row in rows) == 345
    for benchmark in BENCHMARKS:
        keys = [row.kind for row in benchmark.published if row.kind != "other"]
        assert sorted(keys) == ["labels", "ours", "random"], benchmark.slug
        assert benchmark.protocol


@pytest.mark.parametrize(
    ("slug", "values"),
    [
        ("voc07-svm", [74.50, 24.19, 31.24, 39.69, 50.99, 59.03, 64.4, 68.69, 70.84]),
        ("imagenet-stages", [14.28, 31.20, 40.68, 54.46, 56.61]),
        ("imagenet-pooled", [56.60]),
        ("places205-stages", [20.53, 34.03, 40.48, 47.13, 47.73]),
        ("imagenet-semisup", [27.95, 54.37, 57.22, 81.39]),
        ("voc0712-detection", [80.03, 54.11, 59.50]),
        ("coco-detection", [39.4, 59.0, 42.8, 34.5, 55.9, 36.6]),
    ],
)
def test_the_method_has_its_published_numbers_in_order(slug: str, values: list[float]) -> None:
    (row,) = [row for row in find(slug).published if row.kind == "ours"]
    assert row.method == "NPID"
    assert [row.values[column] for column in find(slug).columns] == values


def test_2007_and_2012_have_another_table_than_2007() -> None:
    both = find("voc0712-detection")
    assert both.data != "VOC2007"
    assert {row.source for row in both.published} == {paper.OPENSELFSUP, paper.MOCO}
    assert not {row.citation for row in both.published} & {row.citation for row in paper.TABLE6}

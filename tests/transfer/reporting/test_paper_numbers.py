"""The published numbers: complete, in range, and where the paper's text can be checked, right."""

import typing

import pytest

from transfer.reporting import paper_numbers as paper

TABLES = {
    "TABLE1": (paper.TABLE1, 6, ("linear SVM", "kNN")),
    "TABLE2": (paper.TABLE2, 13, paper.READOUTS),
    "TABLE3": (paper.TABLE3, 12, paper.READOUTS),
    "TABLE6": (paper.TABLE6, 16, (paper.VOC07,)),
}
EVERYTHING = [
    *(row for table, _, _ in TABLES.values() for row in table),
    *(*paper.IMAGENET_ANCHORS, *paper.SEMISUP_ANCHORS, *paper.DETECTION_ANCHORS),
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
        assert row.source
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


def test_2007_and_2012_have_another_column_than_2007() -> None:
    assert {column for row in paper.DETECTION_ANCHORS for column in row.values} == {paper.VOC0712}
    assert paper.VOC0712 != paper.VOC07

"""Untrusted files run nothing and fetch nothing."""

import os
import resource
from pathlib import Path

import pytest

from instdisc.cli import read_config_file
from instdisc.errors import UserError
from instdisc.images.demo import write_detection
from instdisc.images.listing import list_file
from instdisc.untrusted.limits import read_limited
from transfer.detection.voc import VocSplit, find_class_names

pytest.importorskip("detectron2")
from transfer.detection.recipe import read_config


@pytest.mark.parametrize("place", ["leaf", "base"])
def test_a_yaml_tag_that_names_a_function_is_not_called(tmp_path: Path, place: str) -> None:
    made = tmp_path / "made"
    evil = f'OUTPUT_DIR: !!python/object/apply:os.mkdir ["{made}"]\n'
    (tmp_path / "base.yaml").write_text(evil if place == "base" else "VERSION: 2\n")
    leaf = tmp_path / "leaf.yaml"
    leaf.write_text("_BASE_: base.yaml\n" + (evil if place == "leaf" else ""))
    with pytest.raises(UserError, match="is not YAML"):
        read_config(leaf)
    assert not made.exists()


def test_a_base_is_not_fetched_and_may_not_be_itself(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("_BASE_: https://localhost:1/base.yaml\n")
    with pytest.raises(UserError, match="nothing is fetched"):
        read_config(file)
    file.write_text("_BASE_: a.yaml\n")
    with pytest.raises(UserError, match="names itself"):
        read_config(file)


def test_yaml_that_grows_when_it_is_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    file.write_text("\n".join(lines))  # 10^12 values in a thousand bytes
    with pytest.raises(UserError, match=r"an alias, \*a0"):
        read_config(file)
    file.write_text("VERSION: " + "[" * 10_000 + "]" * 10_000)
    with pytest.raises(UserError, match="nested more than 32 deep"):
        read_config(file)
    file.write_text("VERSION: 2 #" + "x" * 70_000)
    with pytest.raises(UserError, match="more than 65,536 bytes"):
        read_config(file)
    file.write_text("_BASE_: [b.yaml, b.yaml]")
    for name, base in zip("bcdef", "cdefg", strict=True):  # 2^6 reads of g
        (tmp_path / f"{name}.yaml").write_text(f"_BASE_: [{base}.yaml, {base}.yaml]")
    (tmp_path / "g.yaml").write_text("VERSION: 2")
    with pytest.raises(UserError, match="more than 20 files"):
        read_config(file)


def test_text_without_end_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "list.txt"
    path.touch()
    os.truncate(path, 2**40)  # a hole: a terabyte by its size, nothing on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="more than 1,073,741,824 bytes"):
        list_file(path)
    with pytest.raises(UserError, match="more than 1,000,000 bytes"):
        read_limited(Path("/dev/zero"), 1_000_000)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KiB
    (tmp_path / "exact").write_bytes(b"x" * 100)
    assert read_limited(tmp_path / "exact", 100) == b"x" * 100


def test_annotations_nested_without_end_and_long_lines_are_refused(tmp_path: Path) -> None:
    root = write_detection(tmp_path, num_trainval=1, num_test=1)
    split = VocSplit(root, 2007, "trainval")
    file = split.annotation_path(split.ids[0])
    file.write_text("<annotation>" * 100 + "</annotation>" * 100)
    with pytest.raises(UserError, match="nested more than 32 deep"):
        find_class_names(root, 2007, ["trainval"])
    path = tmp_path / "list.csv"
    path.write_text("a.jpg," * 10_000)
    with pytest.raises(UserError, match=r"line 1: no name of a file"):
        list_file(path)
    config = tmp_path / "config.json"
    config.write_text(" " * (2**20 + 1) + "{}")
    with pytest.raises(UserError, match="more than 1,048,576 characters"):
        read_config_file(config)

"""Untrusted files run nothing and fetch nothing."""

from pathlib import Path

import pytest

from instdisc.errors import UserError

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

"""The map of features: groups stay together, files come back whole or not at all."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from transfer.nearest.feature_map import COLOURS, FILE, SHEET, TILE, choose, load_map, make_map


def make_groups(classes: int, each: int) -> tuple[np.ndarray, np.ndarray]:
    """Features around one direction for each class, and their classes."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(classes), each)
    return np.eye(16)[labels] + 0.05 * rng.standard_normal((len(labels), 16)), labels


def test_images_of_one_direction_are_neighbours_on_the_map() -> None:
    features, labels = make_groups(4, 15)
    scales = np.linspace(1, 100, len(labels))[:, None]  # a cosine does not see them
    images = [Image.new("RGB", (9, 5), (4 * i, 0, 0)) for i in range(len(labels))]
    found = make_map("title", features * scales, images, labels, list("abcd"))
    assert found.points.min() == 0
    assert found.points.max() == 1
    distances = np.linalg.norm(found.points[:, None] - found.points[None], axis=-1)
    np.fill_diagonal(distances, np.inf)
    assert (labels[distances.argmin(axis=1)] == labels).all()
    again = make_map("title", features * scales, images, labels, list("abcd"))
    assert (again.points == found.points).all()


def test_groups_name_each_thumbnail_once_and_colour_the_largest_classes() -> None:
    features, _ = make_groups(2, 20)
    labels = np.array([11] * 20 + [*range(11)] + [0] * 9)
    images = [Image.new("RGB", (8, 8))] * 40
    groups = make_map("t", features, images, labels, [f"c{n}" for n in range(13)]).groups
    assert [group.name for group in groups][:2] == ["c11", "c0"]
    assert [group.colour for group in groups] == [*range(COLOURS), None, None]
    assert sorted(number for group in groups for *_, number in group.points) == [*range(40)]


def test_a_map_comes_back_from_its_folder_or_not_at_all(tmp_path: Path) -> None:
    features, labels = make_groups(3, 5)
    images = [Image.new("RGB", (8, 8), (0, 0, 10 * n)) for n in range(15)]
    saved = make_map("t", features, images, labels, ["a", "b", "c"])
    saved.save(tmp_path)
    found = load_map(tmp_path / FILE)
    assert found is not None
    assert np.abs(found.points - saved.points).max() <= 5e-5
    assert (found.labels == labels).all()
    with Image.open(tmp_path / SHEET) as sheet:
        assert sheet.size == (4 * TILE, 4 * TILE)
        assert abs(sheet.getpixel((2 * TILE + 9, 3 * TILE + 9))[2] - 140) < 8  # the last, row 4
    whole = json.loads((tmp_path / FILE).read_text())
    for change in (
        {"points": whole["points"][1:]},
        {"points": [[2.0, 0.0]] * 15},
        {"labels": [3] * 15},
        {"labels": "x"},
        {"format": "other"},
        {"classes": None},
    ):
        (tmp_path / FILE).write_text(json.dumps({**whole, **change}))
        assert load_map(tmp_path / FILE) is None, change
    (tmp_path / FILE).write_text(json.dumps(whole)[:50])
    assert load_map(tmp_path / FILE) is None
    (tmp_path / FILE).write_text(json.dumps(whole))
    (tmp_path / SHEET).write_bytes(b"no picture")
    assert load_map(tmp_path / FILE) is None


@pytest.mark.parametrize("count", [5, 2000, 50_000])
def test_the_same_images_are_chosen_for_every_network(count: int) -> None:
    chosen = choose(count, 2000)
    assert len(chosen) == min(count, 2000) == len({*chosen.tolist()})
    assert (chosen == np.sort(chosen)).all()
    assert (chosen == choose(count, 2000)).all()

"""What the transfer commands share: where data comes from, labels, result rows."""

from pathlib import Path

import numpy as np
import pytest

from instdisc.cli import parse
from instdisc.errors import UserError
from instdisc.images.sets import ImageSet
from instdisc.networks.weights import open_weights
from transfer.nearest.settings import KnnConfig, RetrieveConfig
from transfer.task import align_labels, find_location, joint_fingerprint, open_task


def build_images(classes: tuple[str, ...], labels: list[int]) -> ImageSet:
    names = np.array([f"{i}".encode() for i in range(len(labels))])
    return ImageSet("x", "val", classes, names, np.array(labels), np.ones(len(labels), np.int64))


def test_data_is_what_was_named_first(
    tiny_network: Path, image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = open_weights(tiny_network)
    assert find_location(None, weights).root == image_tree
    monkeypatch.setenv("INSTDISC_DATA", str(tmp_path))
    assert find_location(None, weights).root == tmp_path
    assert find_location("demo", weights).is_demo
    monkeypatch.delenv("INSTDISC_DATA")
    assert find_location(None, open_weights("random:resnet18")).is_demo


def test_labels_are_counted_in_the_training_classes() -> None:
    images = build_images(("b", "d"), [0, 1, 1])
    aligned = align_labels(images, ("a", "b", "c", "d"))
    assert aligned.labels.tolist() == [1, 3, 3]
    assert aligned.classes == ("a", "b", "c", "d")
    assert align_labels(images, ("b", "d")) is images
    with pytest.raises(UserError, match=r"\(b\)"):
        align_labels(images, ("a", "d"))


def test_fingerprint_of_several_sets_depends_on_each() -> None:
    one, two = build_images(("a",), [0]), build_images(("a",), [0, 0])
    assert joint_fingerprint([one]) == one.fingerprint
    prints = {joint_fingerprint(sets) for sets in ([one, two], [two, one], [one, one])}
    assert len(prints) == 3


def test_run_folder_replays(tiny_network: Path) -> None:
    config = KnnConfig(device="cpu", num_neighbors=(3, 1), features=("backbone",))
    with open_task("knn", config) as task:
        assert task.output == tiny_network.parents[2] / "knn" / "tiny"
    replayed = parse(KnnConfig, ["--config", str(task.output / "config.json")])
    assert replayed == config


@pytest.mark.parametrize(
    ("config_type", "values"),
    [
        (KnnConfig, {"num_neighbors": ()}),
        (KnnConfig, {"num_neighbors": (0,)}),
        (KnnConfig, {"num_neighbors": (2, 2)}),
        (KnnConfig, {"features": ()}),
        (KnnConfig, {"features": ("bank", "bank")}),
        (KnnConfig, {"temperature": 0.0}),
        (KnnConfig, {"batch_size": 0}),
        (RetrieveConfig, {"num_cases": 0}),
        (RetrieveConfig, {"workers": -1}),
    ],
)
def test_senseless_values_are_refused(config_type: type, values: dict[str, object]) -> None:
    with pytest.raises(UserError, match=r"^--"):
        config_type(**values)

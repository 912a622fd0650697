"""Few-shot episodes against a plain nearest class mean, their draw, the command, its refusals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from instdisc.images.sets import read_folder
from instdisc.runs.results import read_results
from transfer.fewshot import main
from transfer.nearest.fewshot import draw_episode, episode_accuracy, run_fewshot
from transfer.nearest.settings import SHOTS, FewshotConfig

Refusal = Callable[[Callable[..., int], list[str]], str]


def config(output: Path, data: Path, **changes: Any) -> FewshotConfig:
    values = {"ways": 2, "shots": (1, 3), "queries": 4, "episodes": 20, "split": "train"}
    return FewshotConfig(
        **{**values, **changes}, data=str(data), output=output, workers=0, device="cpu"
    )


def plain_accuracy(table: np.ndarray, support: np.ndarray, queries: np.ndarray) -> float:
    """Loops over classes and queries."""
    means = [np.mean([table[i] for i in rows], axis=0) for rows in support]
    hits = [
        int(np.argmin([np.sum((table[i] - mean) ** 2) for mean in means])) == label
        for label, rows in enumerate(queries)
        for i in rows
    ]
    return float(np.mean(hits))


@pytest.mark.parametrize("normalize", [False, True])
def test_the_command_equals_a_plain_nearest_class_mean(
    normalize: bool, tiny_network: Path, image_tree: Path, tmp_path: Path
) -> None:
    rows = run_fewshot(config(tmp_path / "run", image_tree, normalize=normalize))
    assert read_results() == rows
    (stored,) = (tmp_path / "runs" / "features").glob("*/features.npy")
    table = np.load(stored).astype(np.float64)
    lengths = np.linalg.norm(table, axis=1)
    assert np.allclose(lengths, 1) == normalize
    images = read_folder(image_tree / "train", image_tree.name, "train")
    members = [torch.from_numpy(np.flatnonzero(images.labels == label)) for label in range(3)]
    for row, shots in zip(rows, (1, 3), strict=True):
        accuracies = []
        for number in range(20):
            episode = draw_episode(members, ways=2, shots=shots, queries=4, seed=0, number=number)
            support, queries = episode.support.numpy(), episode.queries.numpy()
            accuracies.append(100 * plain_accuracy(table, support, queries))
        assert row.value == pytest.approx(np.mean(accuracies))
        interval = 1.96 * np.std(accuracies) / 20**0.5
        assert row.details["interval95"] == pytest.approx(interval, abs=1e-4)
        words = f"2-way {shots}-shot queries=4 episodes=20 split=train backbone"
        assert row.protocol == words + " normalized" * normalize
        assert row.metric == "top1"
    assert rows[1].value > 60  # the classes differ by colour


def test_an_episode_is_a_function_of_its_key() -> None:
    members = [torch.arange(30) + 30 * label for label in range(8)]

    def draw(**changes: int) -> tuple[list[int], list[int]]:
        key = {"ways": 5, "shots": 5, "queries": 15, "seed": 0, "number": 0, **changes}
        episode = draw_episode(members, **key)
        assert episode.support.shape == (5, key["shots"])
        assert episode.queries.shape == (5, 15)
        for support, queries in zip(episode.support, episode.queries, strict=True):
            rows = torch.cat([support, queries])
            assert len(rows.unique()) == len(rows)
            assert len(rows.div(30, rounding_mode="floor").unique()) == 1  # of one class
        classes = episode.support[:, 0].div(30, rounding_mode="floor")
        assert len(classes.unique()) == 5
        return episode.support.flatten().tolist(), episode.queries.flatten().tolist()

    assert draw() == draw()
    assert draw() != draw(seed=1)
    assert draw() != draw(number=1)
    assert draw()[0][:1] != draw(shots=1)[0][:1]


def test_features_that_tell_the_classes_apart_score_all() -> None:
    features = torch.eye(4).repeat_interleave(6, dim=0)
    members = [torch.arange(6) + 6 * label for label in range(4)]
    episode = draw_episode(members, ways=3, shots=2, queries=4, seed=0, number=0)
    assert episode_accuracy(features, episode) == 1.0


def test_val_is_the_default_and_too_many_shots_are_left_out(
    tiny_network: Path, image_tree: Path, tmp_path: Path
) -> None:
    """val/ has two images a class: one shot and one query, and no more."""
    few = config(tmp_path / "run", image_tree, shots=None, queries=1, split=None)
    (row,) = run_fewshot(few)
    assert row.details["num_images"] == 6
    assert row.details["shots"] == 1
    assert "up to 1 shots" in (tmp_path / "run" / "log.txt").read_text()
    assert " split=val " in row.protocol
    for split in (None, "all"):  # ten images a class are those of train/ and val/ together
        more = config(tmp_path / f"{split}", image_tree, shots=(1,), queries=9, split=split)
        (row,) = run_fewshot(more)
        assert row.details["num_images"] == 30
        assert " split=all " in row.protocol


def test_published_defaults() -> None:
    default = FewshotConfig()
    assert (default.ways, default.queries, default.episodes) == (5, 15, 600)
    assert SHOTS == (1, 5, 20)
    assert (default.features, default.normalize) == ("backbone", False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "an episode needs 5 classes with 16 images each, and 0 of the 3 classes"),
        (["--ways", "3", "--shots", "5", "--split", "train"], "3 classes with 20 images"),
        (["--ways", "1"], "--ways must be at least 2"),
        (["--shots", "0"], "--shots must be at least 1"),
        (["--shots", "1", "1"], "--shots: name at least one, and each once"),
        (["--queries", "0"], "--queries must be at least 1"),
        (["--episodes", "1"], "--episodes must be at least 2"),
        (["--features", "conv9"], "conv9"),
        (["--ways", "2", "--queries", "1", "--features", "stage1"], "has no stage1"),
    ],
)
def test_refusals(
    flags: list[str], message: str, tiny_network: Path, image_tree: Path, refusal: Refusal
) -> None:
    assert message in refusal(main, ["--data", str(image_tree), *flags])


def test_images_without_classes_are_refused(
    tiny_network: Path, image_tree: Path, refusal: Refusal
) -> None:
    line = refusal(main, ["--data", str(image_tree / "train" / "class0")])
    assert "have no classes" in line

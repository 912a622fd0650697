"""Retrieval: which images are found, which cases are shown, what the terminal says."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from instdisc.errors import UserError
from instdisc.features.extract import extract_features
from instdisc.images.sets import read_folder
from instdisc.images.tree import read_files, read_tree
from instdisc.networks.weights import open_weights
from instdisc.runs.results import read_results
from instdisc.training.dist import init_process
from transfer.nearest.cases import choose_cases
from transfer.nearest.feature_map import load_map
from transfer.nearest.gallery import to_printable
from transfer.retrieve import main


def unit_rows(network: Path, images_root: Path) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings and labels, computed without the store."""
    weights = open_weights(network)
    images = read_folder(images_root, "images", "train")
    assert weights.embedding is not None
    rows = extract_features(weights.embedding, images, weights.spec, init_process("cpu"))
    return rows.numpy().astype(np.float64), images.labels


def test_figure_of_validation_images(
    tiny_network: Path, image_tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--num-cases", "2", "-j", "0", "--device", "cpu"]) == 0
    bank, labels = unit_rows(tiny_network, image_tree / "train")
    queries, truth = unit_rows(tiny_network, image_tree / "val")
    nearest = np.argsort(-(queries @ bank.T), axis=1, kind="stable")[:, :10]
    expected = 100 * (labels[nearest] == truth[:, None]).mean()
    (row,) = read_results()
    assert row.value == pytest.approx(expected)
    assert (row.task, row.metric, row.protocol) == ("retrieve", "precision_at_10", "k=10 embedding")
    output = tiny_network.parents[2] / "retrieve" / "tiny"
    page = (output / "retrieval.html").read_text("utf-8")
    assert page.count("<img ") == 4 * 11 + 1  # and the thumbnails of the map
    assert page.index("Best cases") < page.index("Worst cases")
    # Query, margin, ten neighbours; two sections of two rows.
    assert Image.open(output / "retrieval.png").width > 11 * 112
    assert load_map(output / "map.json") is not None
    assert f"{expected:.2f}%" in capsys.readouterr().out


def test_query_in_any_folder_is_immediate_the_second_time(
    tiny_network: Path, tmp_path: Path, image_tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = tmp_path / "photos"
    shutil.copytree(image_tree / "train" / "class0", photos / "deep" / "er")
    for number in range(3):
        shutil.copy(image_tree / "train" / "class1" / f"{number}.png", photos / f"{number}.PNG")
    (photos / "notes.txt").write_text("not an image")
    (photos / "broken.jpg").write_bytes(b"\xff\xd8\xff nothing")
    query = str(photos / "1.PNG")
    command = ["--query", query, "--data", str(photos), "--k", "4", "-j", "0", "--device", "cpu"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "12 computed" in out
    assert "1 image cannot be read" in out
    lines = [line.split(maxsplit=2) for line in out.splitlines() if line.startswith("   ")]
    assert [line[0] for line in lines] == ["1", "2", "3", "4"]
    assert lines[0][1:] == ["1.0000", f"{query}  (the query itself)"]
    similarities = [float(line[1]) for line in lines]
    assert similarities == sorted(similarities, reverse=True)
    assert main(command) == 0
    again = capsys.readouterr().out
    assert "from the store" in again
    assert "computed" not in again
    assert [line for line in again.splitlines() if line.startswith("   ")] == [
        line for line in out.splitlines() if line.startswith("   ")
    ]


def test_query_in_a_data_set_searches_its_training_images(
    tiny_network: Path, image_tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    query = str(image_tree / "val" / "class0" / "0.png")
    assert main(["--query", query, "-j", "0", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "24 x 4" in out
    assert "/val/" not in out.partition(query)[2]


def test_a_query_may_be_relative_to_the_working_folder(
    tiny_network: Path,
    image_tree: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(image_tree.parent)
    query = f"{image_tree.name}/train/class1/1.png"
    command = ["--query", query, "--data", image_tree.name, "--k", "2", "-j", "0"]
    assert main([*command, "--device", "cpu"]) == 0
    assert f"1.0000  {query}  (the query itself)" in capsys.readouterr().out


def test_a_query_leaves_the_figure_alone(tiny_network: Path, image_tree: Path) -> None:
    assert main(["-j", "0", "--device", "cpu"]) == 0
    output = tiny_network.parents[2] / "retrieve" / "tiny"
    before = {file.name: file.read_bytes() for file in output.glob("retrieval.*")}
    query = str(image_tree / "val" / "class0" / "0.png")
    assert main(["--query", query, "-j", "0", "--device", "cpu"]) == 0
    assert {file.name for file in output.glob("query.*")} == {"query.html", "query.png"}
    assert {file.name: file.read_bytes() for file in output.glob("retrieval.*")} == before
    assert len(before) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--query", "absent.jpg"], "absent.jpg does not exist"),
        (["--query", "."], "is a folder"),
        (["--query", __file__], "not a readable image"),
        (["--num-neighbors", "0"], "--num-neighbors"),
        (["--features", "conv9"], "--features"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(
    arguments: list[str], message: str, tiny_network: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main([*arguments, "-j", "0", "--device", "cpu"])
    except SystemExit as stop:  # argparse's own
        code = int(stop.code or 0)
    assert code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def expect_cases(
    sign: int, agreement: np.ndarray, similarity: np.ndarray, labels: np.ndarray, left: list[int]
) -> list[int]:
    """All queries in the order of the rule, by rounds that take one of each class."""
    chosen: list[int] = []
    while left:
        ranked = sorted(left, key=lambda q: (sign * agreement[q], -similarity[q], q))
        best_of_class = {int(labels[q]): q for q in reversed(ranked)}
        chosen += [q for q in ranked if q in best_of_class.values()]
        left = [q for q in left if q not in chosen]
    return chosen


def test_cases_follow_the_rule() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        count, num_cases = int(rng.integers(1, 30)), int(rng.integers(1, 8))
        facts = (rng.integers(0, 4, count), rng.integers(0, 3, count), rng.integers(0, 4, count))
        best, worst = choose_cases(*facts, num_cases)
        everyone = list(range(count))
        half = (count + 1) // 2
        assert best == expect_cases(-1, *facts, everyone)[: min(num_cases, half)]
        rest = [query for query in everyone if query not in best]
        assert worst == expect_cases(1, *facts, rest)[:num_cases]


def test_tree_lists_all_images_and_nothing_else(tmp_path: Path) -> None:
    for name in ("b.png", "a/deep/c.JPG", ".hidden.png", ".git/d.png", "a/note.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4)).save(path, "PNG")
    (tmp_path / "empty.png").touch()
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
    (tmp_path / "a" / "up").symlink_to(tmp_path)  # a circle
    images = read_tree(tmp_path)
    assert [os.fsdecode(name) for name in images.names] == ["a/deep/c.JPG", "b.png"]
    assert images.open(0).size == (4, 4)
    with pytest.raises(UserError, match="no images below"):
        read_tree(Path(__file__).parent)


def test_files_keep_their_order(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("z.png", "a.png")]
    for path in paths:
        Image.new("RGB", (4, 4)).save(path)
    images = read_files(paths)
    assert [images.name(i) for i in range(2)] == paths


def test_control_characters_never_reach_the_terminal() -> None:
    assert to_printable("plain é 犬.jpg") == "plain é 犬.jpg"
    assert to_printable("a\x1b[31m\nb\u202ec") == "a\\x1b[31m\\nb\\u202ec"
    assert to_printable(os.fsdecode(b"\xff.jpg")) == "\\udcff.jpg"

"""kNN: the command against scikit-learn, and what it refuses."""

import functools
import importlib
import os
import re
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from instdisc.features.extract import build_extractor, extract_features
from instdisc.images import demo
from instdisc.images.sets import random_subset, read_folder
from instdisc.networks.backbones import backbone_payload
from instdisc.networks.weights import open_weights
from instdisc.runs.checkpoint import load_checkpoint, save_checkpoint
from instdisc.runs.results import Result, read_results
from instdisc.training import dist
from transfer.knn import main

CPU = ["-j", "0", "--device", "cpu"]


def rows_of(network: Path, name: str, root: Path) -> tuple[np.ndarray, np.ndarray]:
    """Features and labels, computed without the store."""
    weights = open_weights(network)
    images = read_folder(root, "images", "train")
    extractor = build_extractor(weights, name)
    rows = extract_features(extractor, images, weights.spec, dist.init_process("cpu"))
    return rows.double().numpy(), images.labels


def accuracy(
    bank: tuple[np.ndarray, np.ndarray], queries: tuple[np.ndarray, np.ndarray], k: int, rank: int
) -> float:
    """What scikit-learn says."""
    model = KNeighborsClassifier(
        k,
        metric="cosine",
        algorithm="brute",
        weights=lambda distance: np.exp((1 - distance) / 0.07),
    ).fit(*bank)
    ranked = model.classes_[np.argsort(-model.predict_proba(queries[0]), axis=1)]
    return 100 * float((ranked[:, :rank] == queries[1][:, None]).any(axis=1).mean())


def by_protocol() -> dict[tuple[str, str], Result]:
    return {(row.protocol, row.metric): row for row in read_results()}


@pytest.fixture
def run_folder(tiny_network: Path, image_tree: Path) -> Path:
    """The network as a finished run, with a bank of random unit rows."""
    save_run(tiny_network, image_tree)
    return tiny_network.parent


def save_run(network: Path, data: Path, **config: Any) -> None:
    weights = open_weights(network)
    assert weights.embedding is not None
    config = {"train_fraction": 1.0, "seed": 0, "skip_bad_images": False, **config}
    images = read_folder(data / "train", data.name, "train")
    images = random_subset(images, config["train_fraction"], config["seed"])
    bank = torch.randn(len(images), 4, generator=torch.Generator().manual_seed(1))
    state = {
        "config": config,
        "data_fingerprint": images.fingerprint,
        "model": weights.embedding.state_dict(),
        "bank": torch.nn.functional.normalize(bank),
    }
    save_checkpoint(network.parent / "last.pt", "train", state)


def test_all_features_equal_scikit_learn_side_by_side(
    run_folder: Path, image_tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    features = ["embedding", "bank", "backbone", "conv3"]
    ks = ["--k", "1", "5", "24"]
    assert main(["--features", *features, *ks, "--precision", "float32", *CPU]) == 0
    found = by_protocol()
    assert len(found) == 4 * 3 * 2
    network = run_folder / "backbone.pt"
    state = torch.load(run_folder / "last.pt", weights_only=True)
    for name in features:
        stage = "embedding" if name == "bank" else name
        queries = rows_of(network, stage, image_tree / "val")
        bank = rows_of(network, stage, image_tree / "train")
        if name == "bank":
            bank = (state["bank"].double().numpy(), bank[1])
        for k in (1, 5, 24):
            for rank in (1, 5):
                row = found[f"k={k} tau=0.07 {name}", f"top{rank}"]
                assert row.value == pytest.approx(accuracy(bank, queries, k, rank)), row
    out = capsys.readouterr().out
    header, *lines = out[out.index("embedding, 4-d") :].splitlines()[:5]
    assert [word for word in header.split() if word[0] in "ebc"] == [f"{f}," for f in features]
    assert [line.split()[0] for line in lines[1:]] == ["1", "5", "24"]
    shown = [float(word) for word in lines[2].split()[1:]]
    expected = [found[f"k=5 tau=0.07 {f}", f"top{r}"].value for f in features for r in (1, 5)]
    assert shown == pytest.approx(expected, abs=0.005)


def test_row_says_what_was_measured(tiny_network: Path, image_tree: Path) -> None:
    assert main(["--k", "3", *CPU]) == 0
    row = by_protocol()["k=3 tau=0.07 embedding", "top1"]
    assert (row.task, row.arch, row.weights) == ("knn", "tiny", "tiny")
    assert row.dataset == image_tree.name
    assert row.weights_hash == open_weights(tiny_network).hash
    details = row.details
    assert (details["num_train"], details["num_val"], details["dim"]) == (24, 6, 4)
    assert list(details["per_class"]) == ["class0", "class1", "class2"]
    assert np.mean(list(details["per_class"].values())) == pytest.approx(row.value, abs=1e-3)
    # The same images and network under other loader settings are the same measurement.
    assert main(["--k", "3", "-b", "2", *CPU]) == 0
    again = read_results()[-1]
    assert again.config_hash == row.config_hash
    # Rounded features are another one.
    assert main(["--k", "3", "--precision", "half", *CPU]) == 0
    half = read_results()[-1]
    assert (details["precision"], half.details["precision"]) == ("float32", "half")
    assert half.config_hash != row.config_hash


def test_paper_k_is_lowered_where_images_are_few_but_a_given_k_is_not(
    tiny_network: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(CPU) == 0
    assert "k is 24" in capsys.readouterr().out
    assert ("k=24 tau=0.07 embedding", "top1") in by_protocol()
    assert main(["--k", "10", "200", *CPU]) == 2
    assert "--k 200 is more than the 24 training images" in capsys.readouterr().err


def test_network_without_projection_uses_its_backbone(
    tiny_network: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    payload = {
        **backbone_payload(open_weights(tiny_network).backbone),
        "input": open_weights(tiny_network).spec.to_dict(),
        "pretraining": {"config": {"data": open_weights(tiny_network).data}},
    }
    save_checkpoint(tiny_network, "backbone", payload)
    assert main(CPU) == 0
    assert "no projection" in capsys.readouterr().out
    assert ("k=24 tau=0.07 backbone", "top1") in by_protocol()
    assert main(["--features", "embedding", *CPU]) == 2
    assert "no projection: use --features backbone" in capsys.readouterr().err
    assert main(["--features", "bank", *CPU]) == 2


def test_bank_of_a_part_of_the_images(tiny_network: Path, image_tree: Path) -> None:
    save_run(tiny_network, image_tree, train_fraction=0.5, seed=3)
    assert main(["--features", "bank", "embedding", "--k", "2", *CPU]) == 0
    found = by_protocol()
    assert found["k=2 tau=0.07 bank", "top1"].details["num_train"] == 12
    assert found["k=2 tau=0.07 embedding", "top1"].details["num_train"] == 24
    prints = {row.data_fingerprint for row in found.values()}
    assert len(prints) == 2


def remove_image(run: Path, data: Path) -> list[str]:
    other = Path(shutil.copytree(data, run / "other"))
    (other / "train" / "class1" / "3.png").unlink()
    return ["--data", str(other)]


def retrain(run: Path, data: Path) -> list[str]:
    state = torch.load(run / "last.pt", weights_only=True)
    state["model"]["projection.bias"] += 1
    del state["format"]
    save_checkpoint(run / "last.pt", "train", state)
    return []


def remove_bank(run: Path, data: Path) -> list[str]:
    (run / "last.pt").unlink()
    return []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_image, "training images of .* are others"),
        (retrain, "different steps"),
        (remove_bank, r"last\.pt does not exist"),
    ],
)
def test_bank_is_refused_unless_it_is_of_these_images_and_weights(
    change: Callable[[Path, Path], list[str]],
    message: str,
    run_folder: Path,
    image_tree: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = change(run_folder, image_tree)
    assert main(["--features", "embedding", "bank", "--k", "3", *arguments, *CPU]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)
    assert not read_results()


def test_labels_follow_class_names_not_positions(tiny_network: Path, tmp_path: Path) -> None:
    """A class without validation images must not shift the others."""
    data = tiny_network.parents[3] / "data"
    shutil.copytree(open_weights(tiny_network).data or "", data)
    whole = ["--data", str(data), "--k", "5", *CPU]
    assert main(whole) == 0
    before = by_protocol()["k=5 tau=0.07 embedding", "top1"].details["per_class"]
    shutil.rmtree(data / "val" / "class0")
    assert main(whole) == 0
    after = read_results()[-2].details["per_class"]
    assert after == {name: before[name] for name in ("class1", "class2")}


def test_unknown_validation_class_is_refused(
    tiny_network: Path, image_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path(shutil.copytree(image_tree, tmp_path / "data"))
    (data / "val" / "class2").rename(data / "val" / "klass2")
    assert main(["--data", str(data), *CPU]) == 2
    assert "klass2" in capsys.readouterr().err
    shutil.rmtree(data / "val")
    assert main(["--data", str(data), *CPU]) == 2
    assert "has no val/" in capsys.readouterr().err


@pytest.mark.parametrize("flat", ["train", "val"])
def test_images_without_classes_are_refused_in_one_line(
    tiny_network: Path,
    image_tree: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flat: str,
) -> None:
    data = Path(shutil.copytree(image_tree, tmp_path / "data"))
    for path in sorted((data / flat).glob("*/*")):
        path.rename(data / flat / f"{path.parent.name}-{path.name}")
    for folder in list((data / flat).iterdir()):
        if folder.is_dir():
            folder.rmdir()
    assert main(["--data", str(data), *CPU]) == 2
    error = capsys.readouterr().err
    assert f"the {flat} images of" in error
    assert "knn, linear, semisup, fewshot, and retrieve without --query need" in error
    assert error.count("\n") == 1


def test_archives_give_the_accuracy_of_their_folder(
    tiny_network: Path, image_tree: Path, tmp_path: Path
) -> None:
    for split in ("train", "val"):
        with tarfile.open(tmp_path / f"{split}.tar", "w") as tar:
            tar.add(image_tree / split, ".")
    for data in (image_tree, tmp_path / "train.tar"):
        assert main(["--data", str(data), "--k", "5", *CPU]) == 0
    rows = read_results()
    half = len(rows) // 2
    for ours, theirs in zip(rows[:half], rows[half:], strict=True):
        assert (ours.metric, ours.value) == (theirs.metric, theirs.value)
        assert ours.data_fingerprint == theirs.data_fingerprint


def test_unreadable_images_are_left_out_on_request(
    tiny_network: Path, image_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path(shutil.copytree(image_tree, tmp_path / "data"))
    (data / "train" / "class1" / "3.png").write_bytes(b"\x89PNG nothing")
    command = ["--data", str(data), "--k", "3", *CPU]
    assert main(command) == 2
    assert "--skip-bad-images" in capsys.readouterr().err
    assert main([*command, "--skip-bad-images"]) == 0
    assert "left out: 1 image" in capsys.readouterr().out
    assert read_results()[-1].details["num_train"] == 23


def test_official_archive(tiny_network: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    for name, count in (("data_batch_1.bin", 30), ("test_batch.bin", 10)):
        records = rng.integers(0, 256, (count, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(count) % 10
        records.tofile(folder / name)
    assert main(["--data", str(tmp_path), *CPU]) == 0
    row = by_protocol()["k=30 tau=0.07 embedding", "top5"]
    assert (row.dataset, row.details["num_classes"]) == ("cifar10", 10)


def test_pretraining_data_that_is_gone_is_named(
    tiny_network: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    payload = torch.load(tiny_network, weights_only=True)
    payload["pretraining"]["config"]["data"] = "no-such-folder"
    del payload["format"]
    save_checkpoint(tiny_network, "backbone", payload)
    assert main(CPU) == 2
    assert "no-such-folder does not exist" in capsys.readouterr().err


def test_two_processes_measure_what_one_does(
    tiny_network: Path, run_ranks: Callable[[Callable[[int], object]], list[int | None]]
) -> None:
    command = ["--features", "embedding", "backbone", "--k", "1", "7", *CPU]
    assert main(command) == 0
    expected = {key: row.value for key, row in by_protocol().items()}
    (tiny_network.parents[2] / "results.jsonl").unlink()
    shutil.rmtree(tiny_network.parents[2] / "features")

    def work(rank: int) -> None:
        os._exit(main(command))

    assert run_ranks(work) == [0, 0]
    assert {key: row.value for key, row in by_protocol().items()} == expected
    assert len(read_results()) == len(expected)  # written once


@pytest.fixture
def demo_run(tiny_network: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A network that was pretrained on the embedded images, of which there are few here."""
    few = functools.partial(demo.write_classification, train_per_class=6, val_per_class=2)
    monkeypatch.setattr(demo, "write_classification", few)
    payload = load_checkpoint(tiny_network, "backbone")
    settings = {"arch": "tiny", "stem": "imagenet", "embedding_dim": 4, "seed": 5, "data": "demo"}
    payload["pretraining"] = {"config": {**settings, "objective": "nce"}, "dataset": "demo"}
    save_checkpoint(tiny_network, "backbone", payload)
    return tiny_network


@pytest.mark.parametrize(
    ("command", "metric", "flags"),
    [
        ("knn", "top1", []),
        ("retrieve", "precision_at_10", []),
        ("linear", "top1", ["--stage", "conv5", "--solver", "liblinear"]),
        ("fewshot", "top1", ["--shots", "1", "--queries", "1", "--episodes", "50"]),
        ("voc_svm", "ap_envelope", ["--stage", "conv5", "--cost", "0.1", "1"]),
    ],
)
def test_on_the_demo_images_the_untrained_network_is_measured_beside(
    command: str,
    metric: str,
    flags: list[str],
    demo_run: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DETECTRON2_DATASETS", raising=False)
    run = importlib.import_module(f"transfer.{command}").main
    assert run([*CPU, *flags]) == 0
    said = capsys.readouterr().out
    assert said.count("DEMO DATA") == 1
    rows = {row.weights: row for row in read_results() if row.metric == metric}
    assert rows.keys() == {"tiny", "untrained:tiny"}
    value = rows["untrained:tiny"].value
    beside = said.partition("untrained")[2]
    assert f"{value:.2f}" in beside
    # The same number as by its name alone, and that name compares with nothing further.
    assert run([*CPU, *flags, "--weights", f"untrained:{demo_run}"]) == 0
    again = [row.value for row in read_results() if row.metric == metric]
    assert len(again) == 3
    assert again[-1] == value


def test_on_other_images_nothing_is_added(tiny_network: Path, image_tree: Path) -> None:
    assert main([*CPU, "--data", str(image_tree)]) == 0
    assert {row.weights for row in read_results()} == {"tiny"}

"""VOC07 classification: AP and labels against published ones, low-shot sets, the command."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.metrics import average_precision_score
from sklearn.model_selection import cross_val_score
from sklearn.svm import LinearSVC

from instdisc.errors import Interrupted
from instdisc.images.demo import write_detection
from instdisc.runs.results import read_results, summarize
from transfer.detection.voc import VOC_CLASSES, VocSplit, read_targets
from transfer.probing import voc_svm
from transfer.probing.settings import VOC_COSTS, VOC_SHOTS, VocSvmConfig
from transfer.probing.voc_svm import (
    draw_few,
    envelope_ap,
    most_shots,
    run_voc_svm,
    stepwise_ap,
)
from transfer.voc_svm import main


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the embedded images in VOC layout, every tenth with difficult objects alone."""
    root = write_detection(tmp_path_factory.mktemp("voc"), num_trainval=60, num_test=30)
    for number in range(4, 90, 11):
        note = root / "VOC2007" / "Annotations" / f"{number:06}.xml"
        note.write_text(note.read_text().replace("<difficult>0", "<difficult>1"))
    return root


def config(root: Path, output: Path, **changes: Any) -> VocSvmConfig:
    values = {"stage": ("conv2", "conv5"), "cost": (0.01, 0.1, 1.0), **changes}
    return VocSvmConfig(data=str(root), output=output, workers=0, device="cpu", **values)


def test_ap_equals_the_published_values(shared_data: Path) -> None:
    folder = shared_data / "voc2007-cls-check"
    with np.load(folder / "test_scores.npz") as file:
        scores, targets, classes = file["scores"], file["targets"], file["classes"].tolist()
    with (folder / "expected_ap.csv").open() as file:
        expected = list(csv.DictReader(file))
    found = []
    for row in expected[:-1]:
        column = classes.index(row["class"])
        own = scores[:, column], targets[:, column]
        found.append((envelope_ap(*own), stepwise_ap(*own)))
        shown = [f"{value:.6f}" for value in found[-1]]
        assert shown == [row["ap_envelope"], row["ap_sklearn"]], row["class"]
    means = [f"{value:.6f}" for value in np.mean(found, axis=0)]
    assert means == [expected[-1]["ap_envelope"], expected[-1]["ap_sklearn"]]


def test_targets_equal_the_published_ones(shared_data: Path) -> None:
    split = VocSplit(shared_data / "voc2007-ap-check", 2007, "test")
    classes, (targets,) = read_targets([split])
    with np.load(shared_data / "voc2007-cls-check" / "test_scores.npz") as file:
        assert split.ids == file["ids"].tolist()
        assert list(classes) == file["classes"].tolist() == list(VOC_CLASSES)
        np.testing.assert_array_equal(targets, file["targets"])


def test_an_image_with_difficult_objects_alone_is_ignored(tmp_path: Path) -> None:
    objects = {
        "a": [("cat", 0), ("cat", 1), ("dog", 1)],
        "b": [("cat", 1), ("cat", 1)],
        "c": [("dog", None)],  # no flag means not difficult
        "d": [],
    }
    for folder in ("Annotations", "ImageSets/Main"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "ImageSets" / "Main" / "trainval.txt").write_text("\n".join(objects))
    for name, found in objects.items():
        text = "".join(
            f"<object><name>{kind}</name>"
            + ("" if flag is None else f"<difficult>{flag}</difficult>")
            + "</object>"
            for kind, flag in found
        )
        (tmp_path / "Annotations" / f"{name}.xml").write_text(f"<annotation>{text}</annotation>")
    classes, (targets,) = read_targets([VocSplit(tmp_path, 2007, "trainval")])
    assert classes == VOC_CLASSES
    found = targets[:, [classes.index("cat"), classes.index("dog")]]
    assert found.tolist() == [[1, -1], [-1, 0], [0, 1], [0, 0]]
    assert (np.delete(targets, [classes.index("cat"), classes.index("dog")], axis=1) == 0).all()


def structure(targets: np.ndarray) -> list[list[int]]:
    return [(targets == value).sum(axis=0).tolist() for value in (1, 0, -1)]


def test_low_shot_sets_have_the_structure_of_the_published_ones(shared_data: Path) -> None:
    """As many positives, negatives and unused images a class, drawn anew for each k and sample."""
    rng = np.random.default_rng(0)
    targets = np.where(rng.random((5011, 20)) < 0.08, 1, 0).astype(np.int8)
    targets[rng.random((5011, 20)) < 0.01] = -1
    assert most_shots(targets) >= max(VOC_SHOTS)
    with np.load(shared_data / "voc2007-cls-check" / "low_shot_targets.npz") as file:
        for sample in range(5):
            for shots in VOC_SHOTS:
                published = file[f"s{sample + 1}_k{shots}"]
                drawn = draw_few(targets, shots, seed=sample)
                assert drawn.dtype == published.dtype
                assert structure(drawn) == structure(published)
                used = drawn != -1
                np.testing.assert_array_equal(drawn[used], targets[used])
    again = draw_few(targets, 96, seed=4)
    np.testing.assert_array_equal(again, drawn)
    assert (draw_few(targets, 96, seed=3) != again).any()
    # A set of four is not the set of two and two more.
    two, four = (draw_few(targets, shots, seed=0) for shots in (2, 4))
    assert not ((two == 1) <= (four == 1)).all()


def test_ap_by_a_loop_and_by_scikit_learn() -> None:
    """Also with equal scores, which the published file has none of, and ignored images."""
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = rng.integers(0, 15, 40).astype(float)
        targets = rng.choice([1, 0, -1], 40, p=[0.3, 0.6, 0.1]).astype(np.int8)
        used = targets != -1
        assert stepwise_ap(scores, targets) == pytest.approx(
            average_precision_score(targets[used] == 1, scores[used])
        )
        ranked = (targets[used] == 1)[np.argsort(-scores[used], kind="stable")]
        precision = [ranked[: n + 1].mean() for n in range(len(ranked))]
        best = [max(precision[n:]) for n in range(len(ranked)) if ranked[n]]
        assert envelope_ap(scores, targets) == pytest.approx(sum(best) / len(best))


def test_the_command_gives_what_scikit_learn_gives(
    tiny_network: Path, scenes: Path, tmp_path: Path
) -> None:
    """The public benchmark's own calls, on the stored features."""
    rows = run_voc_svm(config(scenes, tmp_path / "run", stage=("conv5",)))
    assert read_results() == rows
    (row,) = rows
    assert (row.task, row.metric, row.dataset) == ("voc_svm", "ap_envelope", "VOC2007")
    assert row.protocol == "stage=conv5 cost=0.01,0.1,1"
    assert (row.details["num_train"], row.details["num_test"]) == (60, 30)
    assert row.value == pytest.approx(np.mean(list(row.details["per_class"].values())))
    splits = [VocSplit(scenes, 2007, name) for name in ("trainval", "test")]
    classes, (train, test) = read_targets(splits)
    assert all((table == -1).any() for table in (train, test))
    tables = [np.load(path) for path in (tmp_path / "runs" / "features").glob("*/features.npy")]
    features = {len(table): table.astype(float) for table in tables}
    learnt, asked = (features[n] / np.linalg.norm(features[n], axis=1)[:, None] for n in (60, 30))
    assert len(row.details["per_class"]) >= 8
    for name, value in row.details["per_class"].items():
        label = classes.index(name)
        used = train[:, label] != -1
        signs = np.where(train[used, label] == 1, 1, -1)

        def svm(cost: float) -> LinearSVC:
            return LinearSVC(C=cost, class_weight={1: 2, -1: 1}, max_iter=10**5, tol=1e-8)

        means = [
            cross_val_score(svm(c), learnt[used], signs, cv=3, scoring="average_precision").mean()
            for c in (0.01, 0.1, 1.0)
        ]
        cost = (0.01, 0.1, 1.0)[int(np.argmax(means))]
        assert row.details["cost"][name] == cost
        assert row.details["folds"][name] == pytest.approx(100 * max(means))
        scores = svm(cost).fit(learnt[used], signs).decision_function(asked)
        assert value == pytest.approx(100 * envelope_ap(scores, test[:, label]))


def test_difficult_images_can_be_negatives(
    tiny_network: Path, scenes: Path, tmp_path: Path
) -> None:
    ignored, negative = (
        run_voc_svm(config(scenes, tmp_path / rule, stage=("conv5",), difficult=rule))[0]
        for rule in ("ignore", "negative")
    )
    assert "difficult=negative" in negative.protocol
    assert ignored.details["folds"] != negative.details["folds"]


def test_low_shot_rows_are_one_for_each_draw(
    tiny_network: Path, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    low = config(scenes, tmp_path / "run", low_shot=True, samples=3)
    rows = run_voc_svm(low)
    shown = capsys.readouterr().out
    assert "low-shot up to k = " in (tmp_path / "run" / "log.txt").read_text()
    few = [row for row in rows if row.protocol.startswith("stage=conv5 k=2 ")]
    assert [row.seed for row in few] == [0, 1, 2]
    assert all(row.details["cost_chosen_on"] == "test" for row in few)
    by_cost = few[0].details["by_cost"]
    mean = np.mean([row.value for row in few])
    assert mean == pytest.approx(max(by_cost.values()))
    assert by_cost[f"{few[0].details['cost']:g}"] == pytest.approx(mean)
    (found,) = [each for row, each in summarize(rows) if row.protocol == few[0].protocol]
    assert found.count == 3
    assert f"{found.mean:.2f} ± {found.std:.2f}" in shown
    whole = [row for row in rows if " k=" not in row.protocol]
    best = max(whole, key=lambda row: row.value)
    assert f"best stage: {best.details['stage']}, mAP {best.value:.2f}" in shown


def test_a_stopped_run_goes_on_with_the_next_stage(
    tiny_network: Path, scenes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    undisturbed = run_voc_svm(config(scenes, tmp_path / "a"))
    inner, fitted = voc_svm.fit, []

    def stop_in_second_stage(*arguments: Any) -> Any:
        fitted.append(1)
        if len(fitted) == 6:  # three costs and the last SVM of conv2, then two of conv5
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(*arguments)

    monkeypatch.setattr(voc_svm, "fit", stop_in_second_stage)
    with pytest.raises(Interrupted, match="stopped in conv5"):
        run_voc_svm(config(scenes, tmp_path / "b"))
    assert len(read_results()) == 2
    fitted.clear()
    resumed = run_voc_svm(config(scenes, tmp_path / "b"))
    assert len(fitted) == 4
    assert "conv2: finished before" in (tmp_path / "b" / "log.txt").read_text()
    assert [row.value for row in resumed] == [row.value for row in undisturbed]
    assert not list((tmp_path / "b").glob("conv*.json"))


def test_two_processes_measure_what_one_does(
    tiny_network: Path,
    scenes: Path,
    run_ranks: Callable[[Callable[[int], object]], list[int | None]],
) -> None:
    flags = ["--voc-root", str(scenes), "--stage", "conv5", "--cost", "0.1", "--device", "cpu"]
    assert main([*flags, "-j", "0"]) == 0
    (alone,) = read_results()
    runs = tiny_network.parents[2]
    (runs / "results.jsonl").unlink()
    shutil.rmtree(runs / "features")
    assert run_ranks(lambda rank: os._exit(main([*flags, "-j", "0"]))) == [0, 0]
    (together,) = read_results()
    assert together.value == pytest.approx(alone.value)


def test_embedded_images_are_the_default_and_said_loudly(
    tiny_network: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DETECTRON2_DATASETS", raising=False)
    monkeypatch.setenv("INSTDISC_DATA", "/nowhere")  # not for this command
    assert main(["--device", "cpu", "-j", "0", "--stage", "conv5"]) == 0
    shown = capsys.readouterr()
    assert "DEMO DATA" in shown.err + shown.out
    assert "--voc-root DIR or DETECTRON2_DATASETS" in shown.err + shown.out
    (row,) = read_results()
    assert row.is_demo
    (file,) = Path(os.environ["INSTDISC_RUNS"]).glob("voc_svm/*/config.json")
    assert json.loads(file.read_text())["cost"] == list(VOC_COSTS)


def test_the_published_protocol_is_the_default() -> None:
    assert VocSvmConfig().stage is None
    assert VocSvmConfig().cost == (0.01, 0.1, *(0.5**n for n in range(4, 20)))
    assert VOC_SHOTS == (1, 2, 4, 8, 16, 32, 64, 96)
    assert VocSvmConfig().samples == 5


@pytest.mark.slow
def test_it_needs_no_detectron2() -> None:
    code = "import sys, transfer.probing.voc_svm; sys.exit('detectron2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def copy(scenes: Path, tmp_path: Path) -> Path:
    """A data set that a test may damage."""
    return Path(shutil.copytree(scenes, tmp_path / "voc"))


Refusal = Callable[[Callable[..., int], list[str]], str]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--voc-root", "/nowhere"], "--voc-root /nowhere does not exist"),
        (["--stage", "conv9"], "conv9"),
        (["--stage", "stage3"], "has no stage3"),
        (["--cost", "0"], "--cost must be positive"),
        (["--cost", "nan"], "--cost must be positive"),
        (["--cost", "1", "1"], "--cost: name each one once"),
        (["--shots", "2"], "--shots needs --low-shot"),
        (["--samples", "3"], "--samples needs --low-shot"),
        (["--low-shot", "--shots", "0"], "--shots must be at least 1"),
        (["--low-shot", "--shots", "500"], "the trainval images allow"),
        (["--low-shot", "--samples", "0"], "--samples must be at least 1"),
    ],
)
def test_refusals(
    flags: list[str], message: str, tiny_network: Path, scenes: Path, refusal: Refusal
) -> None:
    where = [] if "--voc-root" in flags else ["--voc-root", str(scenes)]
    assert message in refusal(main, [*where, *flags])


def test_damaged_data_sets_are_refused_in_one_line(
    tiny_network: Path, copy: Path, refusal: Refusal
) -> None:
    flags = ["--voc-root", str(copy)]
    folder = copy / "VOC2007"
    image = folder / "JPEGImages" / "000003.jpg"
    pixels = image.read_bytes()
    image.unlink()
    assert "1 of 60 images of trainval are missing" in refusal(main, flags)
    image.write_bytes(b"no image")
    assert "000003.jpg" in refusal(main, flags)
    image.write_bytes(pixels)
    note = folder / "Annotations" / "000002.xml"
    text = note.read_text()
    note.write_text("<annotation>")
    assert "000002.xml is not XML" in refusal(main, flags)
    note.write_text("<annotation><object></object></annotation>")
    assert "has no <name> in <object>" in refusal(main, flags)
    note.write_text(text)
    (folder / "ImageSets" / "Main" / "test.txt").unlink()
    assert "no list" in refusal(main, flags)


def test_unreadable_images_can_be_left_out(tiny_network: Path, copy: Path, tmp_path: Path) -> None:
    (copy / "VOC2007" / "JPEGImages" / "000003.jpg").write_bytes(b"no image")
    (row,) = run_voc_svm(config(copy, tmp_path / "run", stage=("conv5",), skip_bad_images=True))
    assert row.details["num_train"] == 59


def test_classes_with_too_few_images_are_left_out_and_told(
    tiny_network: Path, copy: Path, tmp_path: Path, refusal: Refusal
) -> None:
    notes = copy / "VOC2007" / "Annotations"
    text = (notes / "000001.xml").read_text().rpartition("</annotation>")[0]
    text += "<object><name>yeti</name></object></annotation>"
    (notes / "000001.xml").write_text(text)
    (row,) = run_voc_svm(config(copy, tmp_path / "run", stage=("conv5",)))
    assert "yeti" not in row.details["per_class"]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "1 of 11 classes have too few images" in log
    assert "yeti" in log
    lists = copy / "VOC2007" / "ImageSets" / "Main"
    (lists / "trainval.txt").write_text("000001\n000002\n")
    assert "name more images" in refusal(main, ["--voc-root", str(copy)])


def test_images_of_other_kinds_and_any_class_names(tiny_network: Path, tmp_path: Path) -> None:
    """A data set of one's own in VOC layout, PNG files, no sizes and no difficult flags."""
    folder = tmp_path / "mine"
    for name in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (folder / name).mkdir(parents=True)
    colours = {"red": (200, 30, 30), "blue": (30, 30, 200)}
    for number in range(24):
        name = ("red", "blue")[number % 2]
        noise = np.random.default_rng(number).integers(0, 50, (24, 24, 3)) + colours[name]
        Image.fromarray(noise.astype(np.uint8)).save(folder / "JPEGImages" / f"{number:02}.png")
        note = f"<annotation><object><name>{name}</name></object></annotation>"
        (folder / "Annotations" / f"{number:02}.xml").write_text(note)
    for split, numbers in (("trainval", range(16)), ("test", range(16, 24))):
        lines = "".join(f"{number:02}\n" for number in numbers)
        (folder / "ImageSets" / "Main" / f"{split}.txt").write_text(lines)
    (row,) = run_voc_svm(config(folder, tmp_path / "run", stage=("conv5",)))
    assert row.dataset == "mine"
    assert row.details["per_class"] == {"blue": 100.0, "red": 100.0}

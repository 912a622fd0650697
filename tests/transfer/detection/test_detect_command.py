"""transfer/detect.py as a user meets it: refusals, demo run, trials, evaluation alone."""

import json
import os
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from instdisc.runs.results import check_results
from transfer.detect import main

QUICK = (
    *("SOLVER.MAX_ITER", "1", "INPUT.MIN_SIZE_TEST", "64", "INPUT.MIN_SIZE_TRAIN", "(64,)"),
    *("MODEL.RPN.POST_NMS_TOPK_TEST", "5", "MODEL.RPN.POST_NMS_TOPK_TRAIN", "20"),
    *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", "8", "DATALOADER.NUM_WORKERS", "0"),
    *("MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION", "4"),
)


@pytest.fixture
def changed(scenes: Path, tmp_path: Path) -> Path:
    """A copy of the scenes to damage."""
    shutil.copytree(scenes, tmp_path / "voc")
    return tmp_path / "voc"


VOC_METRICS = {"ap50_11point", "ap75_11point", "ap_11point", "ap50_area", "ap75", "ap"}


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return said


def first_annotation(root: Path) -> Path:
    return sorted((root / "VOC2007" / "Annotations").glob("*.xml"))[0]


def edit(root: Path, old: str, new: str) -> None:
    file = first_annotation(root)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def test_a_missing_folder_is_told_with_the_expected_tree(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = refused(capsys, "--cfg", "faster_r18", "--voc-root", str(tmp_path / "none"))
    assert "VOCdevkit/VOC2007/{Annotations/ID.xml" in said
    said = refused(capsys, "--cfg", "faster_r18", "--voc-root", str(tmp_path))
    assert "expected VOCdevkit/VOC2007" in said


def test_the_environment_names_data_too_and_is_never_passed_over(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DETECTRON2_DATASETS", str(tmp_path / "none"))
    assert "DETECTRON2_DATASETS" in refused(capsys, "--cfg", "faster_r18", "--init", "scratch")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("<xmax>", "<xmax>-", "xmax < xmin"),
        ("<xmax>", "<xmax>9", "outside its 160x120 image"),
        ("<annotation>", "<annotation", "is not XML"),
        ("<annotation>", '<!DOCTYPE a [<!ENTITY b "c">]><annotation>', "DOCTYPE"),
    ],
)
def test_damaged_annotations(
    capsys: pytest.CaptureFixture[str], changed: Path, old: str, new: str, said: str
) -> None:
    edit(changed, old, new)
    message = refused(
        capsys, "--cfg", "faster_r18", "--init", "scratch", "--voc-root", str(changed)
    )
    assert said in message
    assert first_annotation(changed).name in message


def test_a_missing_image(capsys: pytest.CaptureFixture[str], changed: Path) -> None:
    image = sorted((changed / "VOC2007" / "JPEGImages").glob("*.jpg"))[0]
    image.unlink()
    message = refused(
        capsys, "--cfg", "faster_r18", "--init", "scratch", "--voc-root", str(changed)
    )
    assert image.name in message


def test_an_image_that_is_none_is_told_while_training(
    capsys: pytest.CaptureFixture[str], changed: Path
) -> None:
    for image in (changed / "VOC2007" / "JPEGImages").glob("*.jpg"):
        image.write_bytes(b"not an image")
    flags = ("--cfg", "faster_r18", "--init", "scratch", "--voc-root", str(changed))
    assert "is not a readable image" in refused(capsys, *flags, *QUICK)


def test_classes_of_its_own_are_taken_from_the_annotations(
    capsys: pytest.CaptureFixture[str], changed: Path, tmp_path: Path
) -> None:
    flags = ("--cfg", "faster_r18", "--init", "scratch", "--voc-root", str(changed))
    assert main([*flags, "--pictures", "1", *QUICK]) == 0
    rows = [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").open()]
    classes = rows[0]["details"]["per_class"]
    assert {"disc", "star"} <= set(classes)
    assert rows[0]["dataset"] == "voc07-trainval -> voc07-test"
    assert rows[0]["weights"] == "scratch"
    assert {row["metric"] for row in rows} == VOC_METRICS
    folder = tmp_path / "runs" / "detect" / "faster_r18-scratch" / "trial-0"
    for name in ("model_final.pth", "metrics.json", "config.yaml", "precision_recall.png"):
        assert (folder / name).stat().st_size > 0
    assert len(list((folder / "pictures").glob("*.png"))) == 1
    # Again, and evaluation alone: the folder's own weights.
    assert main([*flags, "--pictures", "0", "--eval-only", *QUICK]) == 0
    values = json.loads((folder / "result.json").read_text())["values"]
    assert values == {row["metric"]: row["value"] for row in rows}
    # Another recipe does not slip into the same folder.
    message = refused(capsys, *flags, *QUICK, "SOLVER.BASE_LR", "0.5")
    assert "holds a run of another recipe" in message


def test_proposals_of_other_images_are_refused(
    capsys: pytest.CaptureFixture[str], scenes: Path, tmp_path: Path
) -> None:
    from transfer.detection.proposal_files import write_proposals

    file = tmp_path / "other.pkl"
    write_proposals(file, ["999999"], [[[0, 0, 5, 5]]])
    message = refused(
        capsys,
        *("--cfg", "fast_alexnet", "--init", "scratch", "--voc-root", str(scenes)),
        *("DATASETS.PROPOSAL_FILES_TRAIN", f"('{file}',)"),
        *("DATASETS.PROPOSAL_FILES_TEST", f"('{file}',)"),
    )
    assert "have no proposals" in message


def test_fast_rcnn_makes_proposals_only_when_asked(
    capsys: pytest.CaptureFixture[str], scenes: Path
) -> None:
    flags = ("--cfg", "fast_alexnet", "--init", "scratch", "--voc-root", str(scenes))
    assert "--make-proposals" in refused(capsys, *flags)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--cfg", "faster_r99"), "no such file"),
        (("--cfg", "faster_r18", "--init", "supervised:nowhere.pth"), "no file nowhere.pth"),
        (("--cfg", "faster_r18", "--init", "theirs"), "expected ours, scratch"),
        (("--cfg", "faster_r18", "SOLVER.MAX_ITER"), "pairs KEY VALUE"),
        (("--cfg", "faster_r18", "--init", "scratch", "--weights", "x"), "leave one out"),
        (("--cfg", "faster_r18", "--trials", "0"), "at least one"),
        (("--cfg", "faster_r18", "SOLVER.MAX_ITERS", "5"), "SOLVER.MAX_ITERS"),
        (("--cfg", "faster_r18"), "python pretrain/run.py --arch resnet18"),
    ],
)
def test_other_refusals(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    assert said in refused(capsys, *argv)


@pytest.mark.slow
def test_trials_give_rows_that_group(
    scenes: Path,
    backbone_file: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    weights = str(backbone_file("resnet18"))
    flags = ("--cfg", "faster_r18", "--weights", weights, "--voc-root", str(scenes))
    assert main([*flags, "--trials", "2", "--pictures", "0", *QUICK]) == 0
    assert "over 2 trials" in capsys.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").open()]
    assert {row["seed"] for row in rows} == {0, 1}
    assert len({row["config_hash"] for row in rows}) == 1
    results, complaints = check_results(tmp_path / "runs" / "results.jsonl")
    assert (len(results), complaints) == (12, [])


FAST = ("faster_r18", 4)  # of the combinations below, the one that is not slow
ALL = sorted(path.stem for path in Path(str(files("detection_configs"))).glob("fast*.yaml"))


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        pytest.param(name, count, marks=[] if (name, count) == FAST else [pytest.mark.slow])
        for name in ALL
        for count in (1, 2, 4, 8)
    ],
)
def test_every_recipe_runs_with_any_number_of_processes(
    name: str,
    world_size: int,
    scenes: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    run_processes: Callable[..., None],
) -> None:
    small = (
        *("MODEL.ROI_BOX_HEAD.FC_DIM", "16", "MODEL.RPN.PRE_NMS_TOPK_TRAIN", "50"),
        *("DATASETS.TRAIN", "('voc_2007_trainval',)", "TEST.PRECISE_BN.NUM_ITER", "2"),
    )
    run_processes(
        world_size,
        *("--cfg", name, "--init", "scratch", "--voc-root", str(scenes), "--pictures", "0"),
        *("--make-proposals", *QUICK, *small),
    )
    batch = 16 if name == "faster_r50_syncbn" else max(2, world_size)
    said = " ".join(capfd.readouterr().out.replace("*", " ").split())
    assert f"recipe: 1 iterations of {batch} images" in said
    results, _ = check_results(tmp_path / "runs" / "results.jsonl")
    assert {row.metric for row in results} == VOC_METRICS
    row = results[0]
    assert (row.details["batch_size"], row.details["processes"]) == (batch, world_size)
    note = f"{batch} images an iteration, 1 iterations, lr {0.0005 * batch:g}"
    scaled = world_size > 2 and name != "faster_r50_syncbn"
    assert ("Scaled linearly" in said) == row.protocol.endswith(note) == scaled
    assert (tmp_path / "runs/detect" / f"{name}-scratch" / "trial-0/model_final.pth").exists()


@pytest.mark.slow
def test_only_the_first_process_converts_the_weights(
    scenes: Path,
    backbone_file: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    run_processes: Callable[..., None],
) -> None:
    from transfer.detection import weights

    log, convert = tmp_path / "converted", weights.save_detectron2

    def save_detectron2(folder: Path, *rest: Any) -> None:
        with log.open("a") as file:
            file.write(f"{os.environ['RANK']} ")
        convert(folder, *rest)

    monkeypatch.setattr(weights, "save_detectron2", save_detectron2)
    run_processes(
        2,
        *("--cfg", "faster_r18", "--weights", str(backbone_file("resnet18"))),
        *("--voc-root", str(scenes), "--pictures", "0", *QUICK),
    )
    assert log.read_text() == "0 "
    assert "100 of 100 tensors" in capfd.readouterr().out

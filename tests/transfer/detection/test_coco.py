"""COCO's format: what is read and refused, AP against pycocotools, masks through augmentation."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.data import DatasetMapper
from detectron2.data import transforms as T
from PIL import Image
from pycocotools import mask as mask_tools
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from instdisc.runs.results import check_results
from transfer.detect import main
from transfer.detection import coco
from transfer.detection.coco import CocoSplit, read_coco, run_lengths, to_ground_truth
from transfer.detection.coco_ap import Found, score
from transfer.detection.data import CocoSource, DetectionData, MappedImages, load_data
from transfer.detection.evaluation import RESULTS, measure, save_evaluation
from transfer.detection.recipe import read_config
from transfer.detection.settings import find_config

Content = dict[str, Any]
TINY = (
    *("SOLVER.MAX_ITER", "1", "INPUT.MIN_SIZE_TEST", "64", "INPUT.MIN_SIZE_TRAIN", "(64,)"),
    *("MODEL.RPN.POST_NMS_TOPK_TEST", "5", "MODEL.RPN.POST_NMS_TOPK_TRAIN", "20"),
    *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", "8", "DATALOADER.NUM_WORKERS", "0"),
    *("MODEL.ROI_BOX_HEAD.FC_DIM", "16", "MODEL.RPN.PRE_NMS_TOPK_TRAIN", "50"),
)


def split(root: Path, part: str) -> CocoSplit:
    file = root / "annotations" / f"instances_{part}2017.json"
    return CocoSplit(file, root / f"{part}2017", part)


def as_data(root: Path) -> DetectionData:
    cfg = read_config(find_config(Path("coco/mask_r18_fpn")))
    source = CocoSource([split(root, "train")], [split(root, "val")], is_demo=False)
    return load_data(cfg, source, make_missing=False)


@pytest.mark.parametrize("seed", range(20))
def test_run_lengths_are_those_of_pycocotools(seed: int) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random((rng.integers(1, 60), rng.integers(1, 60))) < rng.choice([0.02, 0.5, 0.98])
    packed = mask_tools.encode(np.asfortranarray(mask, np.uint8))
    lengths = run_lengths(packed["counts"].decode())
    assert lengths is not None
    unpacked = np.repeat(np.arange(len(lengths)) % 2, lengths)
    np.testing.assert_array_equal(unpacked.reshape(mask.shape[::-1]).T, mask)


@pytest.mark.parametrize("text", ["", "0o", "o", " ", "é", "oooooooo0", "p"])
def test_text_that_is_no_run_lengths(text: str) -> None:
    assert run_lengths(text) is None


def test_the_embedded_scenes_are_read_as_they_were_drawn(coco_scenes: Path, scenes: Path) -> None:
    found = read_coco(split(coco_scenes, "train"), with_masks=True)
    assert [record["image_id"] for record in found.records] == [1, 2, 3, 4, 5, 6]
    assert len(found.categories) == 10
    for record in found.records:
        same = scenes / "VOC2007" / "JPEGImages" / f"{record['image_id']:06d}.jpg"
        assert Path(record["file_name"]).read_bytes() == same.read_bytes()
        for annotation in record["annotations"]:
            mask = annotation["segmentation"]
            assert mask_tools.area(mask) == annotation["area"]
            assert mask_tools.toBbox(mask).tolist() == annotation["bbox"]


@pytest.fixture
def changed(coco_scenes: Path, tmp_path: Path) -> Callable[[Callable[[Content], object]], Path]:
    """A copy of the scenes whose training file was changed."""

    def make(change: Callable[[Content], object]) -> Path:
        root = tmp_path / "changed"
        shutil.copytree(coco_scenes, root)
        file = split(root, "train").file
        content = json.loads(file.read_text())
        change(content)
        file.write_text(json.dumps(content))
        return root

    return make


def put(*path: Any) -> Callable[[Content], object]:
    """Exchanges the part at a path for the last word."""

    def change(content: Any) -> None:
        *place, key, value = path
        for step in place:
            content = content[step]
        content[key] = value

    return change


FIRST = ("annotations", 0)
POLYGON = [1, 1, 50, 1, 50, 40]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.pop("categories"), "has no list of categories"),
        (put("annotations", {}), "has no list of annotations"),
        (put("categories", []), "has no categories"),
        (put("images", []), "lists no images"),
        (put(*FIRST, "category_id", 99), "category_id 99, which is none of its 10 categories"),
        (put(*FIRST, "image_id", 99), "image_id 99, which no image of it has"),
        (put(*FIRST, "image_id", "1"), "image_id '1'"),
        (put(*FIRST, 5), "annotation 1 is not an object"),
        (put(*FIRST, "iscrowd", 7), "iscrowd 7"),
        (put(*FIRST, "area", -1), "area -1"),
        (put(*FIRST, "bbox", [1, 2, 3]), "expected [x, y, width, height]"),
        (put(*FIRST, "bbox", [1, 2, float("nan"), 4]), "expected [x, y, width, height]"),
        (put(*FIRST, "bbox", [1, 2, -3, 4]), "expected [x, y, width, height]"),
        (put(*FIRST, "bbox", [500, 2, 3, 4]), "outside its 160x120 image"),
        (put(*FIRST, "segmentation", []), "has no mask, and the config learns masks"),
        (put(*FIRST, "segmentation", None), "has no mask"),
        (put(*FIRST, "segmentation", [[]]), "empty polygons"),
        (put(*FIRST, "segmentation", [[1, 2, 3, 4]]), "empty polygons"),
        (put(*FIRST, "segmentation", [[1, 2, 3]]), "polygon [1, 2, 3]"),
        (put(*FIRST, "segmentation", [[1, 2, 3, 4, 5, 1e9]]), "far outside"),
        (put(*FIRST, "segmentation", "size", [160, 120]), "image is [120, 160]"),
        (put(*FIRST, "segmentation", "counts", [5, 6]), "do not add up to 120 x 160"),
        (put(*FIRST, "segmentation", "counts", [-5, 19205]), "do not add up"),
        (put(*FIRST, "segmentation", "counts", "00"), "do not add up"),
        (put("images", 0, "file_name", "other.jpg"), "1 of 6 images of"),
        (put("images", 0, "file_name", "../train2017/000000000001.jpg"), "outside its folder"),
        (put("images", 0, "height", 0), "height 0"),
        (put("images", 0, "id", 2), "image id 2 occurs twice"),
        (put("images", 0, "height", 121), "image is [121, 160]"),
        (put("categories", 0, "id", 2), "occurs twice"),
        (put("categories", 0, "name", "other"), "other categories than"),
        (put("annotations", []), "has objects to learn"),
    ],
)
def test_wrong_files_are_one_line(
    changed: Callable[..., Path],
    change: Callable[[Content], object],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--cfg", "coco/mask_r18_fpn", "--init", "scratch", "--coco-root")
    assert main([*flags, str(changed(change))]) == 2
    message = capsys.readouterr().err.strip()
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"images": [', "is not JSON"),
        ("[]", "has no list of images"),
        ("1" * 5000, "is not JSON"),
    ],
)
def test_text_that_is_no_coco_file(
    changed: Callable[..., Path], text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = changed(lambda content: None)
    split(root, "train").file.write_text(text)
    flags = ("--cfg", "coco/faster_r18_fpn", "--init", "scratch", "--coco-root", str(root))
    assert main(flags) == 2
    message = capsys.readouterr().err.strip()
    assert said in message
    assert "\n" not in message


def test_the_size_of_a_file_is_bounded(
    coco_scenes: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(coco, "MAX_BYTES", 1000)
    flags = ("--cfg", "coco/faster_r18_fpn", "--init", "scratch", "--coco-root", str(coco_scenes))
    assert main(flags) == 2
    assert "more than 1,000" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--cfg", "coco/mask_r18_fpn", "--coco-root", "nowhere"),
            "does not exist: expected",
        ),
        (("--cfg", "coco/mask_r18_fpn", "--coco-root", "."), "instances_train2017.json"),
        (("--cfg", "coco/mask_r18_fpn", "--voc-root", "."), "is for COCO"),
        (("--cfg", "coco/mask_r18_fpn", "--clip-boxes", "1"), "is for COCO"),
        (("--cfg", "faster_r18", "--coco-root", "."), "is for VOC"),
        (("--coco-train", "a.json"), "go together"),
        (("--coco-images", "."), "is for --coco-train"),
        (("--coco-train", "a", "--coco-test", "b", "--voc-root", "."), "leave out --voc-root"),
        (("--coco-train", "a.json", "--coco-test", "b.json"), "a.json cannot be read"),
        (
            ("--coco-train", "a", "--coco-test", "b", "DATASETS.TEST", "('coco_2017_val',)"),
            "leave out DATASETS.TRAIN",
        ),
        (("--cfg", "faster_r18", "DATASETS.TEST", "('coco_2017_val',)"), "expected all of them"),
        (("--cfg", "faster_r18", "MODEL.MASK_ON", "True"), "VOC annotations have boxes only"),
        (
            ("--cfg", "fast_alexnet", "--coco-train", "a.json", "--coco-test", "b.json"),
            "Fast R-CNN's proposals",
        ),
        (("--cfg", "coco/mask_r18_fpn", "INPUT.MASK_FORMAT", "polygon"), "run lengths"),
    ],
)
def test_flags_that_do_not_fit(
    flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags[:2], "--init", "scratch", *flags[2:]]) == 2
    message = capsys.readouterr().err.strip()
    assert said in message
    assert "\n" not in message


def test_boxes_alone_need_no_masks(changed: Callable[..., Path]) -> None:
    def without_masks(content: Content) -> None:
        for annotation in content["annotations"]:
            del annotation["segmentation"], annotation["area"], annotation["iscrowd"]
            annotation["bbox"][2] = 12.5

    found = read_coco(split(changed(without_masks), "train"), with_masks=False)
    first = found.records[0]["annotations"][0]
    assert first["area"] == 12.5 * first["bbox"][3]
    assert "segmentation" not in first


def truth_as_found(data: DetectionData) -> list[Found]:
    """What a perfect detector would say; it leaves crowds alone."""
    found = []
    for record in data.test:
        own = [a for a in record["annotations"] if not a["iscrowd"]]
        boxes = [[x, y, x + w, y + h] for x, y, w, h in (a["bbox"] for a in own)]
        masks = [a["segmentation"] for a in own]
        classes = [a["category_id"] for a in own]
        found.append(Found(record["image_id"], classes, [1.0] * len(own), boxes, masks))
    return found


def spoilt(found: list[Found], seed: int) -> list[Found]:
    """The same moved, cut, scored at random, some left out, some of another class."""
    rng = np.random.default_rng(seed)
    result = []
    for row in found:
        kept = [i for i in range(len(row.scores)) if rng.random() < 0.8]
        kept += [i for i in kept if rng.random() < 0.3]
        assert row.masks is not None
        masks = []
        for i in kept:
            mask = mask_tools.decode(row.masks[i])
            mask[:, : rng.integers(0, 1 + mask.shape[1] // 2)] = 0
            packed = mask_tools.encode(np.asfortranarray(mask))
            masks.append({"size": packed["size"], "counts": packed["counts"].decode()})
        boxes = [(np.array(row.boxes[i]) + rng.normal(0, 4, 4)).tolist() for i in kept]
        classes = [row.categories[i] if rng.random() < 0.9 else 0 for i in kept]
        scores = rng.random(len(kept)).round(2).tolist()
        result.append(Found(row.image_id, classes, scores, boxes, masks))
    return result


def by_pycocotools(file: Path, results: Path, kind: str) -> list[float]:
    """The official way: its own reader, its own results file."""
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(file))
        rows = json.loads(results.read_text())
        if kind == "segm":
            rows = [{k: v for k, v in row.items() if k != "bbox"} for row in rows]
        evaluator = COCOeval(truth, truth.loadRes(rows), kind)
        evaluator.evaluate()
        evaluator.accumulate()
        evaluator.summarize()
    return [100 * float(value) for value in evaluator.stats[:6]]


@pytest.fixture(params=["embedded", "coco-mini"])
def annotated(request: pytest.FixtureRequest, coco_scenes: Path) -> Path:
    """The embedded scenes, and real images where they are."""
    if request.param == "embedded":
        return coco_scenes
    return request.getfixturevalue("shared_data") / "coco-mini"


def test_ground_truth_as_detections_scores_100(annotated: Path) -> None:
    data = as_data(annotated)
    found = measure(truth_as_found(data), data)
    assert list(found.values.values()) == pytest.approx([100.0] * len(found.values))
    assert {"ap_box", "ap50_box", "ap75_box", "ap_mask", "ap50_mask"} <= set(found.values)
    assert min(v for v in found.per_class.values() if v is not None) == pytest.approx(100.0)


def test_stored_detections_score_as_pycocotools_says(annotated: Path, tmp_path: Path) -> None:
    data = as_data(annotated)
    found = spoilt(truth_as_found(data), seed=1)
    evaluation = measure(found, data)
    save_evaluation(tmp_path, found, evaluation, data, "val")
    names = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
    for kind, suffix in (("bbox", "_box"), ("segm", "_mask")):
        expected = by_pycocotools(
            split(annotated, "val").file, tmp_path / "inference" / RESULTS, kind
        )
        named = {n + suffix: v for n, v in zip(names, expected, strict=True) if v >= 0}
        assert {n: evaluation.values[n] for n in named} == named
        assert 5 < named["ap" + suffix] < 95
    means = [value for value in evaluation.per_class.values() if value is not None]
    assert np.mean(means) == pytest.approx(evaluation.values["ap_box"])
    stored = json.loads((tmp_path / "inference" / "ap.json").read_text())
    assert {name: stored[name] for name in evaluation.values} == evaluation.values


def test_an_object_numbered_0_counts(coco_scenes: Path) -> None:
    found = read_coco(split(coco_scenes, "val"), with_masks=False)
    truth = to_ground_truth(found.records[:1], found.categories)
    assert min(a["id"] for a in truth["annotations"]) == 1
    results = [{**a, "score": 1.0} for a in truth["annotations"]]
    assert score(truth, results, "bbox").values["ap_box"] == pytest.approx(100.0)
    assert score(truth, [], "bbox").values["ap_box"] == 0.0


def draw_shape() -> tuple[Image.Image, list[float]]:
    """An L, which no flip maps onto itself, white on black, and its corners."""
    pixels = np.zeros((120, 140, 3), np.uint8)
    pixels[10:90, 20:44] = pixels[70:90, 20:100] = 255
    corners = [20, 10, 44, 10, 44, 70, 100, 70, 100, 90, 20, 90]
    return Image.fromarray(pixels), [float(value) for value in corners]


@pytest.mark.parametrize("form", ["polygon", "run lengths"])
@pytest.mark.parametrize("size", [(60, "none"), (120, "horizontal"), (233, "horizontal")])
def test_masks_and_boxes_follow_flip_and_resize(
    form: str, size: tuple[int, str], tmp_path: Path
) -> None:
    image, points = draw_shape()
    image.save(tmp_path / "shape.png")
    pixels = np.asarray(image)[..., 0] > 127
    packed = mask_tools.encode(np.asfortranarray(pixels, np.uint8))
    runs = {"size": [120, 140], "counts": packed["counts"].decode()}
    content = {
        "images": [{"id": 7, "file_name": "shape.png", "height": 120, "width": 140}],
        "categories": [{"id": 3, "name": "shape"}],
        "annotations": [
            {
                "id": 1,
                "image_id": 7,
                "category_id": 3,
                "bbox": [20, 10, 80, 80],
                "segmentation": [points] if form == "polygon" else runs,
            }
        ],
    }
    (tmp_path / "shape.json").write_text(json.dumps(content))
    found = read_coco(CocoSplit(tmp_path / "shape.json", tmp_path, "x"), with_masks=True)
    short_side, flip = size
    steps = [T.ResizeShortestEdge(short_side), T.RandomFlip(1.0 if flip == "horizontal" else 0.0)]
    mapper = DatasetMapper(
        is_train=True,
        augmentations=steps,
        image_format="RGB",
        use_instance_mask=True,
        instance_mask_format="bitmask",
    )
    mapped = MappedImages(found.records, mapper, seed=0)[(0, 0)]
    drawn = mapped["image"][0] > 127  # the shape as the network sees it
    mask = mapped["instances"].gt_masks.tensor[0]
    overlap = (drawn & mask).sum() / (drawn | mask).sum()
    assert overlap > 0.9  # unflipped it would be 0.3
    rows, columns = torch.nonzero(drawn, as_tuple=True)
    tight = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    box = mapped["instances"].gt_boxes.tensor[0]
    assert torch.allclose(box, torch.stack(tight).float(), atol=2.0)


def test_mask_rcnn_learns_and_is_evaluated(coco_scenes: Path, tmp_path: Path) -> None:
    """Any file in COCO's format, named alone: the images lie beside it."""
    files = {}
    for part in ("train", "val"):
        own = split(coco_scenes, part)
        shutil.copytree(own.images, tmp_path / part)
        files[part] = shutil.copy(own.file, tmp_path / part / "labels.json")
    flags = ("--cfg", "coco/mask_r18_fpn", "--init", "scratch", "--pictures", "1")
    named = ("--coco-train", str(files["train"]), "--coco-test", str(files["val"]))
    assert main([*flags, *named, *TINY]) == 0
    rows, complaints = check_results(tmp_path / "runs" / "results.jsonl")
    assert not complaints
    metrics = {row.metric for row in rows}
    assert {"ap_box", "ap50_box", "ap75_box", "ap_mask", "ap50_mask", "ap75_mask"} <= metrics
    assert not metrics & {"ap", "ap50_11point", "ap75"}  # VOC's columns
    assert rows[0].dataset == "train/labels -> val/labels"
    assert rows[0].protocol.startswith("coco/mask_r18_fpn, train/labels -> val/labels, SOLVER")
    folder = tmp_path / "runs" / "detect" / "coco-mask_r18_fpn-scratch" / "trial-0"
    assert (folder / "inference" / RESULTS).exists()
    assert len(list((folder / "pictures").glob("*.png"))) == 1
    assert "MASK_FORMAT: bitmask" in (folder / "config.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["coco/mask_r50_c4", "coco/mask_r50_fpn_2x"])
def test_mocos_recipes_run_over_two_processes(
    name: str, coco_scenes: Path, tmp_path: Path, run_processes: Callable[..., None]
) -> None:
    run_processes(
        2,
        *("--cfg", name, "--init", "scratch", "--coco-root", str(coco_scenes), "--pictures", "0"),
        *(*TINY, "SOLVER.IMS_PER_BATCH", "2", "TEST.PRECISE_BN.NUM_ITER", "1"),
        *("MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION", "4"),
    )
    rows, complaints = check_results(tmp_path / "runs" / "results.jsonl")
    assert not complaints
    assert {"ap_box", "ap_mask"} <= {row.metric for row in rows}
    assert rows[0].dataset == "coco17-train (6 images) -> coco17-val (4 images)"
    assert rows[0].details["processes"] == 2

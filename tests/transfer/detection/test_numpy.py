"""What .ci/amend_detectron2.py claims: Detectron2 works with the numpy that is installed here."""

import json
import math
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import numpy as np
import pytest
from packaging.requirements import Requirement

pytest.importorskip("detectron2")
from detectron2.evaluation.pascal_voc_evaluation import voc_ap

from transfer.detect import main


def test_the_metadata_admits_the_numpy_that_is_installed() -> None:
    try:
        declared = [Requirement(each) for each in requires("sal-detectron2") or []]
    except PackageNotFoundError:
        pytest.skip("another build of Detectron2, whose metadata is not amended")
    of_numpy = [each for each in declared if each.name == "numpy" and not each.marker]
    assert of_numpy
    assert all(each.specifier.contains(np.__version__) for each in of_numpy)


def test_a_detector_trains_and_evaluates(scenes: Path, tmp_path: Path) -> None:
    quick = ["SOLVER.MAX_ITER", "2", "INPUT.MIN_SIZE_TEST", "64", "INPUT.MIN_SIZE_TRAIN", "(64,)"]
    quick += ["MODEL.RPN.POST_NMS_TOPK_TEST", "5", "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", "8"]
    quick += ["MODEL.RPN.POST_NMS_TOPK_TRAIN", "20", "MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION", "4"]
    quick += ["DATALOADER.NUM_WORKERS", "0", "MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.0"]
    flags = ["--cfg", "faster_r18", "--init", "scratch", "--voc-root", str(scenes)]
    assert main([*flags, *quick]) == 0
    rows = [json.loads(line) for line in (tmp_path / "runs" / "results.jsonl").open()]
    assert {row["metric"] for row in rows} >= {"ap50_11point", "ap"}
    assert all(math.isfinite(row["value"]) for row in rows)
    assert rows[0]["provenance"]["versions"]["numpy"] == np.__version__
    (log,) = (tmp_path / "runs" / "detect").rglob("metrics.json")
    losses = [json.loads(line).get("total_loss") for line in log.open()]
    assert all(math.isfinite(loss) for loss in losses if loss is not None)
    assert any(losses)


@pytest.mark.parametrize("eleven_points", [False, True])
def test_detectron2s_own_average_precision(eleven_points: bool) -> None:
    draw = np.random.default_rng(0)
    right = draw.random(50) < 0.6
    found = np.cumsum(right)
    recall, precision = found / 41, found / np.arange(1, 51)
    if eleven_points:
        points = [p / 10 for p in range(11)]
        best = [
            max((q for r, q in zip(recall, precision, strict=True) if r >= p), default=0.0)
            for p in points
        ]
        expected = sum(best) / 11
    else:
        steps = zip([0.0, *recall[:-1]], recall, range(50), strict=True)
        expected = sum((after - before) * max(precision[i:]) for before, after, i in steps)
    assert voc_ap(recall, precision, eleven_points) == pytest.approx(expected, abs=1e-12)

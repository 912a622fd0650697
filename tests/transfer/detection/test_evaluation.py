"""The numbers of an evaluation: VOC's as Detectron2's own evaluator has them."""

from pathlib import Path

import numpy as np
import pytest
from detectron2.evaluation.pascal_voc_evaluation import voc_eval

from transfer.detection.coco_ap import Found
from transfer.detection.data import load_data
from transfer.detection.evaluation import LINES, class_table, measure, save_evaluation, table
from transfer.detection.recipe import read_config
from transfer.detection.settings import find_config
from transfer.detection.voc import VocSource


@pytest.mark.parametrize("seed", [0, 1])
def test_the_11_point_rows_are_what_detectron2_computes(
    seed: int, scenes: Path, tmp_path: Path
) -> None:
    cfg = read_config(find_config(Path("faster_r18")))
    data = load_data(cfg, VocSource(scenes, is_demo=False), make_missing=False)
    rng = np.random.default_rng(seed)
    found = []
    for record in data.test:
        objects = [a for a in record["annotations"] for _ in range(rng.integers(0, 4))]
        boxes = [(np.array(a["bbox"]) + rng.normal(0, 5, 4)).tolist() for a in objects]
        classes = [a["category_id"] for a in objects]
        found.append(Found(record["image_id"], classes, rng.random(len(boxes)).tolist(), boxes))
    evaluation = measure(found, data)
    save_evaluation(tmp_path, found, evaluation, data, "test")
    folder = scenes / "VOC2007"
    seen = [a for r in data.test for a in r["annotations"] if not a["difficult"]]
    present = sorted({data.class_names[a["category_id"]] for a in seen})
    aps = {
        percent: [
            voc_eval(
                str(tmp_path / "inference" / "comp4_det_test_{}.txt"),
                str(folder / "Annotations" / "{}.xml"),
                str(folder / "ImageSets" / "Main" / "test.txt"),
                name,
                ovthresh=percent / 100,
                use_07_metric=True,
            )[2]
            for name in present
        ]
        for percent in range(50, 100, 5)
    }
    assert 0 < np.mean(aps[50]) < 1
    assert evaluation.values["ap50_11point"] == pytest.approx(100 * np.mean(aps[50]))
    assert evaluation.values["ap75_11point"] == pytest.approx(100 * np.mean(aps[75]))
    means = [np.mean(values) for values in aps.values()]
    assert evaluation.values["ap_11point"] == pytest.approx(100 * np.mean(means))
    shown = table(evaluation)
    assert f"{evaluation.values['ap_11point']:.1f}" in shown
    assert [line in shown for line in LINES] == [True, True, False, False]
    assert f"{evaluation.values['ap50_11point']:.1f} |\n" in class_table(evaluation)

import csv
import math
import time

import numpy as np
import pytest

from instdisc.errors import UserError
from transfer.detection.average_precision import (
    COCO_THRESHOLDS,
    Detections,
    box_iou,
    collect,
    evaluate,
    from_devkit,
    load_comp4,
    save_comp4,
    to_devkit,
)
from transfer.detection.voc import VOC_CLASSES, read_voc

NAMES = ("ant", "bee", "cow")


def slow_iou(a, b):
    """Of two inclusive pixel boxes, by counting."""
    width = min(a[2], b[2]) - max(a[0], b[0]) + 1
    height = min(a[3], b[3]) - max(a[1], b[1]) + 1
    if width <= 0 or height <= 0:
        return 0.0
    shared = width * height
    return shared / (
        (a[2] - a[0] + 1) * (a[3] - a[1] + 1) + (b[2] - b[0] + 1) * (b[3] - b[1] + 1) - shared
    )


def slow_ap(detections, objects, method, threshold):
    """From the definition: (image, score, box) against (image, box, difficult), devkit boxes."""
    num_positives = sum(not difficult for _, _, difficult in objects)
    if num_positives == 0:
        return math.nan
    taken = set()
    hits = misses = 0
    points = []
    for image, _, box in sorted(detections, key=lambda d: -d[1]):
        best, best_overlap = None, 0.0
        for index, (other_image, other, _) in enumerate(objects):
            if other_image == image and slow_iou(box, other) > best_overlap:
                best, best_overlap = index, slow_iou(box, other)
        if best is None or best_overlap < threshold:
            misses += 1
        elif not objects[best][2]:
            hits += best not in taken
            misses += best in taken
            taken.add(best)
        if hits + misses:
            points.append((hits / num_positives, hits / (hits + misses)))
    if method == "11point":
        levels = [0.1 * k for k in range(11)]
        return sum(max([p for r, p in points if r >= t], default=0.0) for t in levels) / 11
    area, reached = 0.0, 0.0
    for recall in sorted({r for r, _ in points}):
        area += (recall - reached) * max(p for r, p in points if r >= recall)
        reached = recall
    return area


def random_scene(seed, num_objects=45, num_detections=90, ties=True):
    """Devkit boxes of three classes in eight images; detections near objects, some doubled."""
    rng = np.random.default_rng(seed)

    def a_box():
        x, y = rng.integers(1, 60, 2)
        width, height = rng.integers(0, 40, 2)
        return [int(x), int(y), int(x + width), int(y + height)]

    objects = [
        (f"{rng.integers(8):06d}", a_box(), bool(rng.random() < 0.25), int(rng.integers(3)))
        for _ in range(num_objects)
    ]
    detections = []
    for _ in range(num_detections):
        image, box, category = f"{rng.integers(8):06d}", a_box(), int(rng.integers(3))
        if objects and rng.random() < 0.7:
            image, target, _, category = objects[rng.integers(len(objects))]
            x1, y1, x2, y2 = (int(v) for v in np.array(target) + rng.integers(-4, 5, 4))
            box = [min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)]
        score = float(rng.integers(8)) if ties else float(rng.random())
        detections.append((image, score, box, category))
    return objects, detections


def to_records(objects, num_images=8):
    boxes = from_devkit(np.array([o[1] for o in objects], float).reshape(-1, 4)).tolist()
    return [
        {
            "file_name": "",
            "image_id": f"{row:06d}",
            "height": 200,
            "width": 200,
            "annotations": [
                {"bbox": box, "bbox_mode": 0, "category_id": o[3], "difficult": o[2]}
                for o, box in zip(objects, boxes, strict=True)
                if o[0] == f"{row:06d}"
            ],
        }
        for row in range(num_images)
    ]


def to_detections(detections):
    rows = {}
    for image, score, box, category in detections:
        rows.setdefault(NAMES[category], []).append((image, score, box))
    return {
        name: Detections(
            [row[0] for row in own],
            np.array([row[1] for row in own], float),
            from_devkit(np.array([row[2] for row in own], float).reshape(-1, 4)),
        )
        for name, own in rows.items()
    }


def assert_equals_slow(objects, detections, method, ties):
    thresholds = (0.3, 0.5, 0.75)
    fast = evaluate(
        to_detections(detections),
        to_records(objects),
        NAMES,
        method=method,
        thresholds=thresholds,
        ties=ties,
    )
    slow = [
        [
            slow_ap(
                [d[:3] for d in detections if d[3] == category],
                sorted((o[:3] for o in objects if o[3] == category), key=lambda o: o[0]),
                method,
                threshold,
            )
            for category in range(3)
        ]
        for threshold in thresholds
    ]
    np.testing.assert_allclose(fast.table, slow, rtol=0, atol=1e-12)
    return fast


@pytest.mark.parametrize("method", ["11point", "area"])
@pytest.mark.parametrize("seed", range(8))
def test_equals_the_definition_on_random_detections(seed, method):
    objects, detections = random_scene(seed)
    found = assert_equals_slow(objects, detections, method, "stable")
    assert 0 < found.mean_ap(0.5) < 1
    objects, detections = random_scene(seed, ties=False)
    assert_equals_slow(objects, detections, method, "numpy")


@pytest.mark.parametrize("method", ["11point", "area"])
def test_equals_the_definition_where_something_is_missing(method):
    objects, detections = random_scene(1)
    only_difficult = [(*o[:2], True, o[3]) if o[3] == 1 else o for o in objects]
    cases = {
        "no detections at all": (objects, []),
        "no objects at all": ([], detections),
        "a class without detections": (objects, [d for d in detections if d[3] != 1]),
        "a class without objects": ([o for o in objects if o[3] != 1], detections),
        "a class with difficult objects only": (only_difficult, detections),
        "every detection twice": (objects, detections + detections),
        "one detection": (objects, detections[:1]),
        "nothing": ([], []),
    }
    for own_objects, own_detections in cases.values():
        assert_equals_slow(own_objects, own_detections, method, "stable")


def evaluate_one(boxes, scores, objects, difficult=None, **options):
    """One class, one image; devkit boxes."""
    flags = difficult or [False] * len(objects)
    records = to_records([("000000", o, f, 0) for o, f in zip(objects, flags, strict=True)], 1)
    found = Detections(
        ["000000"] * len(scores),
        np.array(scores, float),
        from_devkit(np.array(boxes, float).reshape(-1, 4)),
    )
    return evaluate({"ant": found}, records, ("ant",), **options)


def test_a_duplicate_is_a_false_positive_and_a_difficult_object_is_nothing():
    objects = [[1, 1, 10, 10], [31, 1, 40, 10], [61, 1, 70, 10]]
    boxes = [objects[1], objects[0], objects[0], objects[2]]
    curve = evaluate_one(boxes, [4, 3, 2, 1], objects, [False, True, False]).curves["ant"]
    assert curve.num_positives == 2
    assert curve.precision.tolist() == [0, 1, 0.5, 2 / 3]
    assert curve.recall.tolist() == [0, 0.5, 0.5, 1]
    assert curve.scores.tolist() == [4, 3, 2, 1]


def test_overlap_counts_inclusive_pixels_and_may_equal_the_threshold():
    # 10 x 10 pixels against the 10 x 5 inside it: exactly one half.
    assert evaluate_one([[1, 1, 10, 5]], [1], [[1, 1, 10, 10]]).mean_ap(0.5) == 1
    assert evaluate_one([[1, 1, 10, 4]], [1], [[1, 1, 10, 10]]).mean_ap(0.5) == 0
    assert box_iou(np.array([0.0, 0, 10, 5]), np.array([0.0, 0, 10, 10])) == 0.5
    assert box_iou(np.zeros(4), np.zeros(4)) == 0


def test_equal_scores_keep_their_order_when_stable():
    objects = [[1, 1, 10, 10]]
    hit, miss = objects[0], [50, 50, 60, 60]
    for boxes, wanted in (([hit, miss], 1.0), ([miss, hit], 0.5)):
        found = evaluate_one(boxes, [1, 1], objects, ties="stable", method="area")
        assert found.mean_ap() == wanted


def test_a_class_without_objects_stays_out_of_the_mean():
    objects, detections = random_scene(3)
    without = [o for o in objects if o[3] != 2]
    found = evaluate(to_detections(detections), to_records(without), NAMES)
    assert math.isnan(found.per_class()["cow"])
    assert found.mean_ap() == np.mean([found.per_class()[n] for n in ("ant", "bee")])
    assert found.ap == pytest.approx(np.mean(found.table[:, :2]))
    assert math.isnan(evaluate({}, to_records([]), NAMES).ap)


def test_bad_detections_are_refused():
    records = to_records([])
    stranger = Detections(["999999"], np.ones(1), np.ones((1, 4)))
    with pytest.raises(UserError, match="'999999', which the annotations lack"):
        evaluate({"ant": stranger}, records, NAMES)
    with pytest.raises(UserError, match="unknown class 'elk'"):
        evaluate({"elk": stranger}, records, NAMES)
    with pytest.raises(UserError, match="11point or area"):
        evaluate({}, records, NAMES, method="coco")
    with pytest.raises(UserError, match="NaN"):
        Detections(["000000"], np.array([np.nan]), np.ones((1, 4)))
    with pytest.raises(UserError, match=r"expected \(N,\)"):
        Detections(["000000"], np.ones(2), np.ones((1, 4)))
    with pytest.raises(UserError, match=r"0\.42 was not asked for"):
        evaluate({}, records, NAMES).mean_ap(0.42)


def test_comp4_files_keep_full_precision(tmp_path):
    _, detections = random_scene(5)
    found = to_detections(detections)
    found["ant"].scores[:] = np.random.default_rng(0).random(len(found["ant"].scores))
    save_comp4(tmp_path / "Main", "test", {**found, "cow": to_detections([]).get("cow", EMPTY)})
    read = load_comp4(tmp_path / "Main", "test", NAMES)
    for name in ("ant", "bee"):
        assert read[name].image_ids == found[name].image_ids
        assert (read[name].scores == found[name].scores).all()
        assert (read[name].boxes == found[name].boxes).all()
    assert len(read["cow"].image_ids) == 0
    first = (tmp_path / "Main/comp4_det_test_bee.txt").read_text().split("\n")[0].split()
    assert [float(v) for v in first[2:]] == next(d[2] for d in detections if d[3] == 1)


EMPTY = Detections([], np.zeros(0), np.zeros((0, 4)))


def test_bad_comp4_files_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"no detections .*comp4_det_test_ant.txt"):
        load_comp4(tmp_path, "test", ["ant"])
    for line in ("000001 0.5 1 2 3\n", "000001 high 1 2 3 4\n"):
        (tmp_path / "comp4_det_test_ant.txt").write_text(line)
        with pytest.raises(UserError, match="expected `id score x1 y1 x2 y2`"):
            load_comp4(tmp_path, "test", ["ant"])


def test_collect_sorts_by_class_in_the_given_order():
    found = collect(
        [
            ("a", [2, 0], [0.1, 0.2], [[1, 2, 3, 4], [5, 6, 7, 8]]),
            ("b", np.zeros(0, int), np.zeros(0), np.zeros((0, 4))),
            ("c", np.array([2]), np.float32([0.3]), np.ones((1, 4), np.float32)),
        ],
        NAMES,
    )
    assert found["cow"].image_ids == ["a", "c"]
    assert found["cow"].scores.tolist() == [0.1, float(np.float32(0.3))]
    assert found["ant"].boxes.tolist() == [[5, 6, 7, 8]]
    assert len(found["bee"].image_ids) == 0
    assert (to_devkit(found["ant"].boxes) == [[6, 7, 7, 8]]).all()


@pytest.fixture(scope="module")
def published(shared_data):
    """Annotations, a published detector's detections, and the AP stored with them."""
    folder = shared_data / "voc2007-ap-check"
    with (folder / "expected_ap.csv").open() as stream:
        expected = list(csv.DictReader(stream))
    return (
        read_voc(folder, 2007, "test", with_images=False),
        load_comp4(folder / "results" / "VOC2007" / "Main", "test", VOC_CLASSES),
        {row["class"]: row for row in expected},
    )


@pytest.mark.parametrize("method", ["11point", "area"])
def test_published_ap_comes_out_to_six_decimals(published, method):
    records, detections, expected = published
    found = evaluate(detections, records, VOC_CLASSES, method=method, thresholds=(0.5,))
    ours = {**found.per_class(), "mean": found.mean_ap()}
    stored = {name: row[f"ap_{method}_iou0.5"] for name, row in expected.items()}
    # The stored AP ordered equal scores as the AVX-512 sort of numpy 1 does.
    old = np.lib.NumpyVersion(np.__version__) < "2.0.0"
    if old and np.core._multiarray_umath.__cpu_features__.get("AVX512_SKX"):
        assert {name: f"{value:.6f}" for name, value in ours.items()} == stored
    differences = {name: abs(ours[name] - float(value)) for name, value in stored.items()}
    assert max(differences.values()) < 5e-6
    # Where no equal scores matter, all six decimals are there; so it is for most classes.
    assert sum(difference <= 5.1e-7 for difference in differences.values()) >= 16


def test_published_ap_is_met_whatever_the_order_of_equal_scores(published):
    """On any CPU: the stored AP lies between hits last and hits first among equals."""
    records, detections, expected = published
    ordered: list[dict[str, Detections]] = [{}, {}]
    for category, (name, own) in enumerate(detections.items()):
        overlap = np.zeros(len(own.scores))
        image_ids = np.array(own.image_ids)
        starts = np.flatnonzero(np.append(True, image_ids[1:] != image_ids[:-1]))
        rows = dict(
            zip(image_ids[starts], np.split(np.arange(len(overlap)), starts[1:]), strict=True)
        )
        for record in records:
            objects = [a["bbox"] for a in record["annotations"] if a["category_id"] == category]
            mine = rows.get(record["image_id"])
            if objects and mine is not None:
                overlap[mine] = box_iou(own.boxes[mine, None], np.array(objects)).max(axis=1)
        for bound, sign in zip(ordered, (1, -1), strict=True):
            order = np.lexsort((sign * overlap, -own.scores))
            bound[name] = Detections(image_ids[order].tolist(), own.scores[order], own.boxes[order])
    for method in ("11point", "area"):
        low, high = (
            evaluate(
                bound, records, VOC_CLASSES, method=method, thresholds=(0.5,), ties="stable"
            ).per_class()
            for bound in ordered
        )
        for name in VOC_CLASSES:
            stored = float(expected[name][f"ap_{method}_iou0.5"])
            assert low[name] - 5e-7 <= stored <= high[name] + 5e-7
            assert high[name] - low[name] < 1e-5


def test_all_ten_thresholds_on_254590_detections_take_seconds(published):
    records, detections, _ = published
    assert sum(len(found.image_ids) for found in detections.values()) == 254_590
    start = time.process_time()
    found = evaluate(detections, records, VOC_CLASSES)
    assert time.process_time() - start < 5
    assert found.mean_ap(0.5) > found.mean_ap(0.75) > found.mean_ap(0.95) > 0
    assert found.ap == pytest.approx(np.mean([found.mean_ap(t) for t in COCO_THRESHOLDS]))


@pytest.mark.parametrize(("method", "wanted"), [("11point", 0.268398), ("area", 0.245687)])
def test_padillas_example(shared_data, method, wanted):
    folder = shared_data / "padilla-sample2"

    def rows(kind):
        for file in sorted((folder / kind).glob("*.txt")):
            for line in file.read_text().splitlines():
                *score, left, top, width, height = (float(v) for v in line.split()[1:])
                yield f"{int(file.stem):06d}", score, [left, top, left + width, top + height]

    objects = [(image, box, False, 0) for image, _, box in rows("groundtruths")]
    detections = [(image, score[0], box, 0) for image, score, box in rows("detections")]
    assert (len(objects), len(detections)) == (15, 24)
    found = evaluate(
        to_detections(detections),
        to_records(objects),
        NAMES[:1],
        method=method,
        thresholds=(0.3,),
        ties="stable",
    )
    assert round(found.mean_ap(0.3), 6) == wanted

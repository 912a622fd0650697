import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
import scipy.io

from instdisc.errors import UserError
from transfer.detection import proposals as library
from transfer.detection.proposals import (
    Proposals,
    check_proposals,
    from_detectron_pkl,
    from_mat,
    make_proposals,
    read_proposals,
    recall,
    selective_search,
    write_proposals,
)
from transfer.detection.voc import VocSplit, read_voc
from transfer.proposals import main

IDS = ["000005", "000007", "000012"]


def some_boxes(seed=0, counts=(4, 0, 7)):
    """Continuous boxes inside 100 x 100 images."""
    rng = np.random.default_rng(seed)
    corners = [np.sort(rng.permutation(101)[: 4 * n].reshape(n, 2, 2), axis=1) for n in counts]
    return [c.reshape(-1, 4).astype(np.float32) for c in corners]


def records_of(ids=IDS, size=(100, 100), objects=()):
    annotations = [
        {"bbox": list(box), "bbox_mode": 0, "category_id": 0, "difficult": difficult}
        for box, difficult in objects
    ]
    return [
        {
            "file_name": "",
            "image_id": i,
            "width": size[0],
            "height": size[1],
            "annotations": annotations,
        }
        for i in ids
    ]


def a_picture(seed, width=96, height=72):
    rng = np.random.default_rng(seed)
    image = np.full((height, width, 3), 40, np.uint8)
    for _ in range(6):
        x, y = (int(v) for v in rng.integers(0, (width - 20, height - 20)))
        w, h = (int(v) for v in rng.integers(8, 30, 2))
        colour = tuple(int(v) for v in rng.integers(60, 255, 3))
        cv2.rectangle(image, (x, y), (x + w, y + h), colour, -1)
    return image


def a_devkit(root, num_images, width=96, height=72):
    folder = root / "VOC2007"
    for name in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (folder / name).mkdir(parents=True)
    ids = [f"{i:06d}" for i in range(num_images)]
    (folder / "ImageSets/Main/test.txt").write_text("".join(f"{i}\n" for i in ids))
    for i, image_id in enumerate(ids):
        cv2.imwrite(str(folder / f"JPEGImages/{image_id}.jpg"), a_picture(i, width, height))
        (folder / f"Annotations/{image_id}.xml").write_text(
            f"<annotation><size><width>{width}</width><height>{height}</height></size>"
            "<object><name>cat</name><bndbox><xmin>1</xmin><ymin>1</ymin>"
            f"<xmax>{width}</xmax><ymax>{height}</ymax></bndbox></object></annotation>"
        )
    return VocSplit(root, 2007, "test")


# Files


def test_written_proposals_are_what_detectron2_reads_in_order_and_cut_at_the_top(tmp_path):
    build = pytest.importorskip("detectron2.data.build")
    utils = pytest.importorskip("detectron2.data.detection_utils")
    transforms = pytest.importorskip("detectron2.data.transforms")
    boxes = some_boxes()
    path = tmp_path / "new" / "p.pkl"
    write_proposals(path, IDS, boxes)
    records = build.load_proposals_into_dataset(records_of(list(reversed(IDS))), str(path))
    for record, own in zip(records, reversed(boxes), strict=True):
        assert (record["proposal_boxes"] == own).all()
        utils.transform_proposals(record, (100, 100), transforms.TransformList([]), proposal_topk=3)
        kept = record["proposals"].proposal_boxes.tensor.numpy()
        assert (kept == own[:3]).all()


def test_written_file_has_string_ids_float32_boxes_and_a_plain_mode(tmp_path):
    write_proposals(tmp_path / "p.pkl", IDS, [b.astype(int) for b in some_boxes()])
    content = pickle.loads((tmp_path / "p.pkl").read_bytes())
    assert content["ids"] == IDS
    assert content["bbox_mode"] == 0
    assert {b.dtype for b in content["boxes"]} == {np.dtype(np.float32)}
    assert [b.shape for b in content["boxes"]] == [(4, 4), (0, 4), (7, 4)]
    assert [len(s) for s in content["objectness_logits"]] == [4, 0, 7]
    assert list(tmp_path.iterdir()) == [tmp_path / "p.pkl"]


@pytest.mark.parametrize(
    ("scores", "order"),
    [
        (None, [0, 1, 2, 3]),
        ([0, 0, 0, 0], [0, 1, 2, 3]),
        ([0.5, 0.5, 0.5, 0.5], [0, 1, 2, 3]),
        ([0.1, 0.4, 0.3, 0.2], [1, 2, 3, 0]),
        ([0, 0, 1, 0], [2, 0, 1, 3]),
        ([1, 2, 2, 2], [1, 2, 3, 0]),
    ],
)
def test_scores_fall_strictly_and_keep_the_order_of_equals(tmp_path, scores, order):
    boxes = some_boxes(counts=(4,))[0]
    write_proposals(tmp_path / "p.pkl", ["a"], [boxes], None if scores is None else [scores])
    read = read_proposals(tmp_path / "p.pkl")
    assert (np.diff(read.scores[0]) < 0).all()
    assert (read.boxes[0] == boxes[order]).all()
    # Detectron2's own sort, which turns ties around, changes nothing any more.
    assert (read.scores[0].argsort()[::-1] == np.arange(4)).all()
    if scores is not None and len(set(scores)) > 1:
        np.testing.assert_allclose(read.scores[0], np.array(scores)[order], atol=1e-6)


def test_wrong_shapes_are_refused(tmp_path):
    for ids, boxes, scores in (
        (["a"], [np.ones((2, 5))], None),
        (["a", "b"], [np.ones((2, 4))], None),
        (["a", "a"], [np.ones((2, 4))] * 2, None),
        (["a"], [np.ones((2, 4))], [np.ones(3)]),
        (["a"], [np.full((2, 4), np.nan)], None),
    ):
        with pytest.raises(UserError):
            write_proposals(tmp_path / "p.pkl", ids, boxes, scores)
    assert not (tmp_path / "p.pkl").exists()


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("names", [("ids", "objectness_logits"), ("indexes", "scores")])
def test_pickles_of_every_protocol_and_both_dialects_read(tmp_path, protocol, names):
    boxes = some_boxes()
    content = {
        names[0]: [np.int64(5), 7, "000012"],
        "boxes": [np.asfortranarray(boxes[0]), boxes[1], boxes[2].astype(">f8")],
        names[1]: [np.arange(4, 0, -1), np.zeros(0), np.zeros(7)],
    }
    path = tmp_path / "d.pkl"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    read = from_detectron_pkl(path, IDS)
    assert read.ids == IDS
    assert all((a == b).all() for a, b in zip(read.boxes, boxes, strict=True))
    assert from_detectron_pkl(path, IDS[2:]).ids == IDS[2:]
    assert read_proposals(path).ids == ["5", "7", "000012"]
    with pytest.raises(UserError, match="1 of 1 images have no proposals, the first: 000099"):
        from_detectron_pkl(path, ["000099"])


def test_object_arrays_width_height_boxes_and_detectron2s_enum_read(tmp_path):
    structures = pytest.importorskip("detectron2.structures")
    boxes = some_boxes(counts=(4, 4))
    sized = np.empty(2, object)
    sized[:] = [np.concatenate([b[:, :2], b[:, 2:] - b[:, :2]], axis=1) for b in boxes]
    content = {
        "ids": np.array(["a", "b"]),
        "boxes": sized,
        "bbox_mode": structures.BoxMode.XYWH_ABS,
    }
    (tmp_path / "d.pkl").write_bytes(pickle.dumps(content))
    read = read_proposals(tmp_path / "d.pkl")
    assert read.ids == ["a", "b"]
    assert all((a == b).all() for a, b in zip(read.boxes, boxes, strict=True))


def test_a_python_2_pickle_reads(tmp_path):
    # As Python 2 wrote it: bytes without a codec, dtype with integer flags.
    raw = np.array([[1, 2, 3, 4]], "<f4").tobytes()  # has bytes that are not ASCII
    data = (
        b"(dp0\nS'boxes'\n(lp1\n"
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\ntS'b'\ntR"
        b"(I1\n(I1\nI4\ntcnumpy\ndtype\n(S'f4'\nI0\nI1\ntR(I3\nS'<'\nNNNI-1\nI-1\nI0\ntb"
        b"I00\n%btbasS'ids'\n(lI5\nas."
    )
    escaped = b"S'" + b"".join(b"\\x%02x" % byte for byte in raw) + b"'\n"  # protocol 0
    for numbers in (b"U" + bytes([len(raw)]) + raw, escaped):
        (tmp_path / "d.pkl").write_bytes(data % numbers)
        read = from_detectron_pkl(tmp_path / "d.pkl", ["000005"])
        assert read.boxes[0].tolist() == [[1, 2, 3, 4]]


class Attack:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_a_pickle_that_would_run_code_is_refused_and_does_not_run(tmp_path):
    mark = tmp_path / "ran"
    good = {"ids": ["a"], "boxes": [np.ones((1, 4), np.float32)]}
    attacks = [
        Attack(os.mkdir, str(mark)),
        Attack(eval, f"__import__('os').mkdir({str(mark)!r})"),
        Attack(subprocess.check_call, ["mkdir", str(mark)]),
        Attack(getattr, "", "format"),
        Attack(bytes, 10),
        Attack(np.load, "x"),
        Path("a"),
    ]
    for attack in attacks:
        for content in (attack, {**good, "extra": [attack]}, {**good, "boxes": [attack]}):
            for protocol in (0, 2, 4):
                (tmp_path / "p.pkl").write_bytes(pickle.dumps(content, protocol=protocol))
                for read in (read_proposals, from_detectron_pkl):
                    with pytest.raises(UserError, match=r"refused: (it names|.*takes 0)"):
                        read(tmp_path / "p.pkl")
    assert not mark.exists()
    pickle.loads(pickle.dumps(attacks[0]))
    assert mark.exists(), "the attack is a real one"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a pickle",
        pickle.dumps(some_boxes())[:-20],
        pickle.dumps([1, 2]),
        pickle.dumps({"boxes": [np.ones((1, 4))]}),
        pickle.dumps({"ids": ["a"], "boxes": [np.ones((1, 5))]}),
        pickle.dumps({"ids": ["a"], "boxes": [["x"]]}),
        pickle.dumps({"ids": ["a"], "boxes": [np.array(["2020"], "datetime64[D]")]}),
        pickle.dumps({"ids": ["a"], "boxes": [np.ones((1, 4))], "bbox_mode": 4}),
        b"cnumpy\nndarray\n(I9\ntR.",
        b"cnumpy\ndtype\n(S'f4'\ntR(I1\ntb.",
    ],
)
def test_other_pickles_are_one_clear_line(tmp_path, data):
    (tmp_path / "p.pkl").write_bytes(data)
    with pytest.raises(UserError, match=r"p\.pkl") as caught:
        read_proposals(tmp_path / "p.pkl")
    assert "\n" not in str(caught.value)


def save_classic(path, ids, boxes, with_images=True):
    """The layout of the selective-search archive: cells, 1-based inclusive [y1 x1 y2 x2]."""
    cells, images = np.empty((1, len(ids)), object), np.empty((len(ids), 1), object)
    for i, (image_id, own) in enumerate(zip(ids, boxes, strict=True)):
        x1, y1, x2, y2 = np.asarray(own, float).T
        cells[0, i] = np.stack([y1 + 1, x1 + 1, y2, x2], axis=1)
        images[i, 0] = image_id
    content = {"boxes": cells, "images": images} if with_images else {"boxes": cells}
    scipy.io.savemat(path, content, do_compression=True)


def test_classic_mat_round_trip_ids_order_offsets_and_pseudo_scores(tmp_path):
    boxes = some_boxes()
    boxes[0][0] = [0, 0, 100, 100]
    save_classic(tmp_path / "s.mat", IDS, boxes)
    read = from_mat(tmp_path / "s.mat")
    assert read.ids == IDS
    assert all((a == b).all() for a, b in zip(read.boxes, boxes, strict=True))
    assert [s.tolist() for s in read.scores] == [[4, 3, 2, 1], [], [7, 6, 5, 4, 3, 2, 1]]
    raw = scipy.io.loadmat(tmp_path / "s.mat")["boxes"][0, 0]
    assert raw[0].tolist() == [1, 1, 100, 100]
    assert from_mat(tmp_path / "s.mat", [IDS[2], IDS[0]]).ids == [IDS[2], IDS[0]]
    with pytest.raises(UserError, match="the first: 000001"):
        from_mat(tmp_path / "s.mat", ["000001"])


def test_classic_mat_without_ids_follows_the_list(tmp_path):
    boxes = some_boxes()
    save_classic(tmp_path / "s.mat", IDS, boxes, with_images=False)
    read = from_mat(tmp_path / "s.mat", IDS)
    assert read.ids == IDS
    assert (read.boxes[2] == boxes[2]).all()
    for ids in (None, IDS[:2]):
        with pytest.raises(UserError, match="3 images and no ids"):
            from_mat(tmp_path / "s.mat", ids)


def test_zero_based_cells_are_refused(tmp_path):
    save_classic(tmp_path / "s.mat", ["a"], [np.array([[-1, 0, 5, 5]])])
    with pytest.raises(UserError, match="below 1"):
        from_mat(tmp_path / "s.mat")


def test_other_mat_files_are_one_clear_line(tmp_path):
    path = tmp_path / "s.mat"
    with pytest.raises(UserError, match="no file"):
        from_mat(path)
    header = b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM"
    path.write_bytes(header.ljust(512, b"\0") + b"\x89HDF\r\n\x1a\n".ljust(512, b"\0"))
    with pytest.raises(UserError, match=r"v7\.3.*save it with -v7"):
        from_mat(path)
    save_classic(path, IDS, some_boxes())
    whole = path.read_bytes()
    for data in (b"", b"text" * 50, whole[:150], whole[:-30]):
        path.write_bytes(data)
        with pytest.raises(UserError, match="is not a MATLAB file"):
            from_mat(path)
    scipy.io.savemat(path, {"other": np.ones((2, 4))})
    with pytest.raises(UserError, match="no variable `boxes`"):
        from_mat(path)
    scipy.io.savemat(path, {"boxes": np.ones((2, 5))})
    with pytest.raises(UserError, match=r"shape \(2, 5\)"):
        from_mat(path)


def test_the_real_demo_files_read_and_their_classic_form_equals_them(shared_data, tmp_path):
    folder = shared_data / "selective-search"
    ids = ["000004", "001551"]
    demo = [from_mat(folder / f"{i}_boxes.mat", ids) for i in ids]
    assert [d.ids for d in demo] == [[i] for i in ids]
    for own, count in zip(demo, (2888, 2057), strict=True):
        raw = scipy.io.loadmat(folder / f"{own.ids[0]}_boxes.mat")["boxes"].astype(int)
        assert len(own.boxes[0]) == count
        assert (own.boxes[0] == raw + np.array([0, 0, 1, 1])).all()
        height, width, _ = cv2.imread(str(folder / f"{own.ids[0]}.jpg")).shape
        assert own.boxes[0].max(axis=0)[2:].tolist() == [width, height]
    save_classic(tmp_path / "both.mat", ids, [d.boxes[0] for d in demo])
    classic = from_mat(tmp_path / "both.mat", ids)
    assert all((a == d.boxes[0]).all() for a, d in zip(classic.boxes, demo, strict=True))


# Checks and recall


def test_check_counts_and_notes():
    boxes = some_boxes()
    boxes[0][1, 2] = boxes[0][1, 0]
    ours = Proposals.build([*IDS[::-1], "999999"], [*boxes[::-1], boxes[0]], None)
    found = check_proposals(ours, records_of())
    assert (found.num_images, found.num_boxes, found.fewest, found.most) == (3, 11, 0, 7)
    assert found.median == 4
    assert [note.split()[0] for note in found.notes] == ["1", "the", "1", "1"]
    clean = check_proposals(Proposals.build(IDS, some_boxes(counts=(1, 2, 3)), None), records_of())
    assert clean.notes == ()


@pytest.mark.parametrize(
    "box", [[-1, 0, 5, 5], [0, 0, 101, 5], [0, 0, 5, 101], [9, 0, 5, 5], [0, 9, 5, 5]]
)
def test_check_refuses_boxes_that_no_image_of_this_size_has(box):
    ours = Proposals.build(["a"], [[[0, 0, 100, 100], box]], None)
    with pytest.raises(UserError, match="1 proposals of image a are inverted or outside"):
        check_proposals(ours, records_of(["a"]))


def test_check_refuses_proposals_of_other_images():
    ours = Proposals.build(["000001"], [some_boxes()[0]], None)
    with pytest.raises(UserError, match="3 of 3 images have no proposals, the first: 000005"):
        check_proposals(ours, records_of())


def test_recall_by_hand():
    objects = [([0, 0, 10, 10], False), ([50, 50, 60, 60], False), ([80, 80, 90, 90], True)]
    boxes = [[0, 0, 10, 6], [50, 50, 60, 58], [0, 0, 100, 100]]
    ours = Proposals.build(["a"], [boxes], None)
    records = records_of(["a"], objects=objects)
    assert recall(ours, records) == {0.5: 1.0, 0.7: 0.5}
    assert recall(ours, records, (0.6, 0.81), max_boxes=1) == {0.6: 0.5, 0.81: 0.0}
    assert recall(Proposals.build(["a"], [[]], None), records) == {0.5: 0.0, 0.7: 0.0}
    assert math.isnan(recall(ours, records_of(["a"], objects=objects[2:]))[0.5])


# Selective search


def test_selective_search_finds_the_rectangles_and_repeats_itself():
    image = np.full((80, 120, 3), 30, np.uint8)
    cv2.rectangle(image, (20, 10), (59, 49), (0, 0, 255), -1)
    cv2.rectangle(image, (80, 30), (109, 69), (0, 255, 0), -1)
    boxes = selective_search(image)
    assert boxes.dtype == np.float32
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, :2] < boxes[:, 2:]).all()
    assert (boxes[:, 2:] <= [120, 80]).all()
    assert len(np.unique(boxes, axis=0)) == len(boxes)
    assert (selective_search(image) == boxes).all()
    objects = [([20, 10, 60, 50], False), ([80, 30, 110, 70], False)]
    ours = Proposals.build(["a"], [boxes], None)
    records = records_of(["a"], (120, 80), objects)
    assert recall(ours, records, (0.9,)) == {0.9: 1.0}
    assert len(check_proposals(ours, records).notes) == 0
    with pytest.raises(UserError, match="expected fast or quality"):
        selective_search(image, "slow")


def test_large_regions_come_early():
    noise = np.random.default_rng(0).integers(0, 60, (120, 160, 3), np.uint8)
    boxes = selective_search(cv2.blur(a_picture(1, 160, 120) + noise, (3, 3)))
    areas = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    half = len(areas) // 2
    assert half > 20
    assert areas[:half].mean() > areas[half:].mean()


def test_real_photo_has_the_recall_of_selective_search(shared_data):
    folder = shared_data / "voc2007-mini"
    records = read_voc(folder, 2007, "test")[:1]
    found = [selective_search(cv2.imread(record["file_name"])) for record in records]
    ours = Proposals.build([record["image_id"] for record in records], found, None)
    assert check_proposals(ours, records).fewest > 500
    assert recall(ours, records)[0.5] == 1


def test_make_is_the_same_with_one_and_two_processes(tmp_path):
    split = a_devkit(tmp_path / "data", 6)
    one, two = tmp_path / "one.pkl", tmp_path / "two.pkl"
    made = make_proposals(split, one, 1, progress=False)
    make_proposals(split, two, 2, progress=False)
    assert one.read_bytes() == two.read_bytes()
    assert made.ids == split.ids
    assert (made.boxes[3] == selective_search(cv2.imread(str(split.image_paths["000003"])))).all()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "one.pkl", "two.pkl"]
    with pytest.raises(UserError, match=r"one\.pkl exists"):
        make_proposals(split, one)


def test_make_names_an_unreadable_image_and_keeps_the_others(tmp_path):
    split = a_devkit(tmp_path / "data", 3)
    split.image_paths["000001"].write_bytes(b"no picture")
    for workers in (1, 2):
        with pytest.raises(UserError, match=r"000001\.jpg is not an image"):
            make_proposals(split, tmp_path / "p.pkl", workers, progress=False)
    assert not (tmp_path / "p.pkl").exists()
    assert list(tmp_path.glob("p.pkl.*.work/000000.npy"))


def children_of(pid):
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at processes in /proc")
def test_make_resumes_after_a_kill_with_the_same_result(tmp_path, monkeypatch, repo):
    split = a_devkit(tmp_path / "data", 50, 150, 120)
    out = tmp_path / "p.pkl"
    command = [sys.executable, str(repo / "transfer/proposals.py"), "make", "--split", "test"]
    command += ["--voc-root", str(split.root), "--out", str(out), "--workers", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("p.pkl.*.work/*.npy"))) < 5:
            assert time.monotonic() < deadline
            assert run.poll() is None
            time.sleep(0.01)
        workers = children_of(run.pid)
        run.send_signal(signal.SIGKILL)
    assert len(workers) >= 2, "both cores work"
    while any(Path(f"/proc/{pid}/exe").exists() for pid in workers):
        assert time.monotonic() < deadline, "workers outlive the run that was killed"
        time.sleep(0.05)
    assert not out.exists()
    done = {p.stem for p in tmp_path.glob("p.pkl.*.work/*.npy")}
    assert 5 <= len(done) < 50

    searched = []
    original = library._search_file
    monkeypatch.setattr(
        library, "_search_file", lambda *job: (searched.append(Path(job[0]).stem), original(*job))
    )
    make_proposals(split, out, 1, progress=False)
    assert sorted(searched) == sorted(set(split.ids) - done)
    make_proposals(split, tmp_path / "whole.pkl", 1, progress=False)
    assert out.read_bytes() == (tmp_path / "whole.pkl").read_bytes()
    assert not list(tmp_path.glob("*.work"))


@pytest.mark.parametrize(
    ("workers", "number"),
    [(1, signal.SIGTERM), pytest.param(2, signal.SIGUSR2, marks=pytest.mark.slow)],
)
def test_make_stops_on_a_signal_with_code_75_and_goes_on(tmp_path, repo, workers, number):
    split = a_devkit(tmp_path / "data", 20, 150, 120)
    out = tmp_path / "p.pkl"
    command = [sys.executable, str(repo / "transfer/proposals.py"), "make", "--split", "test"]
    command += ["--voc-root", str(split.root), "--out", str(out), "--workers", str(workers)]
    # In a session of its own: a scheduler's signal reaches the workers too.
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as run:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("p.pkl.*.work/*.npy"))) < 3:
            assert time.monotonic() < deadline
            assert run.poll() is None
            time.sleep(0.01)
        os.killpg(run.pid, number)
        sent = time.monotonic()
        said = run.stderr.read().splitlines()[-1]
        assert run.wait() == 75
    assert time.monotonic() - sent < 10
    done = len(list(tmp_path.glob("p.pkl.*.work/*.npy")))
    assert f"stopped after selective search in {done} of 20 images" in said
    assert 3 <= done < 20
    assert not out.exists()
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"selective search: goes on at {done}/20" in again.stdout
    assert not again.stderr  # no bar where there is no terminal
    assert read_proposals(out).ids == split.ids
    assert not list(tmp_path.glob("*.work"))


def _make_slowly(split, out, log):
    def search(*job):
        time.sleep(0.05)
        with log.open("a") as file:
            file.write(f"{Path(job[0]).stem}\n")
        original(*job)

    original, library._search_file = library._search_file, search
    make_proposals(split, out, 1)


def test_processes_that_want_the_same_proposals_share_one_search(tmp_path, capfd):
    split = a_devkit(tmp_path / "data", 8)
    out, log = tmp_path / "p.pkl", tmp_path / "log"
    fork = multiprocessing.get_context("fork")
    jobs = [fork.Process(target=_make_slowly, args=(split, out, log)) for _ in range(3)]
    rank = fork.Process(target=library.await_proposals, args=(out,))
    for each in (*jobs, rank):
        each.start()
    for each in (*jobs, rank):
        each.join()
        assert each.exitcode == 0
    assert sorted(log.read_text().split()) == split.ids  # each image once
    assert capfd.readouterr().out.count("waiting for its proposals") == 2
    assert read_proposals(out).ids == split.ids
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "log", "p.pkl"]


# The command


def test_the_command_needs_neither_detectron2_nor_torch(repo):
    code = "import sys; sys.modules.update(detectron2=None, torch=None)\n"
    code += "import transfer.proposals, transfer.detection.proposals"
    assert subprocess.run([sys.executable, "-c", code], cwd=repo, check=False).returncode == 0


def test_command_makes_checks_and_imports(tmp_path, capsys):
    split = a_devkit(tmp_path / "data", 3)
    source = ["--voc-root", str(split.root), "--split", "test"]
    made, imported = tmp_path / "made.pkl", tmp_path / "imported.pkl"
    assert main(["make", *source, "--out", str(made), "--workers", "1"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"wrote {made}\n3 images, ")
    assert "recall of all: 1.0000 at IoU 0.5, 1.0000 at IoU 0.7" in told
    assert main(["check", str(made), *source]) == 0
    assert capsys.readouterr().out == told.split("\n", 1)[1]

    ours = read_proposals(made)
    save_classic(tmp_path / "s.mat", ours.ids, ours.boxes)
    assert main(["import", str(tmp_path / "s.mat"), *source, "--out", str(imported)]) == 0
    assert imported.read_bytes() == made.read_bytes()


def test_command_makes_several_lists_and_skips_what_is_there(tmp_path, capsys):
    split = a_devkit(tmp_path / "data", 3)
    lists = split.folder / "ImageSets/Main"
    (lists / "trainval.txt").write_text("000000\n000002\n")
    argv = ["make", "--voc-root", str(split.root), "--workers", "1", "--split", "trainval", "test"]
    assert main(argv) == 0
    told = capsys.readouterr().out
    assert ("2 images, " in told, "3 images, " in told, told.count("wrote ")) == (True, True, 2)
    files = sorted((tmp_path / "runs" / "proposals").iterdir())
    times = [file.stat().st_mtime_ns for file in files]
    files[0].unlink()  # as if it had been stopped during the second list
    assert main(argv) == 0
    again = capsys.readouterr().out
    assert f"wrote {files[0]}" in again
    assert f"{files[1]} is there already" in again
    assert files[1].stat().st_mtime_ns == times[1]


def test_command_ends_bad_input_with_one_line_and_code_2(tmp_path, capsys):
    split = a_devkit(tmp_path / "data", 3)
    source = ["--voc-root", str(split.root), "--split", "test"]
    other, strange = tmp_path / "other.pkl", tmp_path / "strange.txt"
    write_proposals(other, IDS, some_boxes())
    for argv, message in (
        (["check", str(other), *source], "3 of 3 images have no proposals"),
        (["import", str(other), *source, "--out", str(tmp_path / "o")], "have no proposals"),
        (["import", str(strange), *source], "expected .mat or .pkl"),
        (["check", str(tmp_path / "absent.pkl"), *source], "no such file"),
        (["make", "--voc-root", str(tmp_path / "absent")], "VOCdevkit/VOC2007/{Annotations"),
        ([], "name make, import or check"),
        (["fly", *source], "name make, import or check"),
        (["make", str(other), *source], "make takes no files"),
        (["import", *source], "name at least one file"),
        (["check", *source], "check: name one file"),
        (["check", str(other), str(other), *source], "check: name one file"),
        (["check", str(other), *source, "trainval"], "--split: name one list"),
        (["make", *source[:-1]], "--split: name one list"),
        (["make", *source, "trainval", "--out", str(tmp_path / "o")], "--split: name one list"),
        (["check", str(other), *source, "--out", str(tmp_path / "o")], "check has no --out"),
        (["import", str(other), *source, "-j", "1"], "import has no --workers"),
    ):
        assert main(argv) == 2
        told = capsys.readouterr().err
        assert told.startswith("transfer/proposals.py: error: ")
        assert message in told
        assert told.count("\n") == 1
    assert not (tmp_path / "o").exists()

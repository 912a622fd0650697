"""The embedded images: layout, determinism, atomic writing, honest boxes, no pixel shortcut."""

import hashlib
import subprocess
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier

from instdisc.errors import UserError
from instdisc.images import demo

GOLDEN = "c7bb4e6949af3c210f7d96245a933a037a89e527d20dcbfb238e890d32bcc6c5"
PROBES = [("train", "star", 0), ("val", "star", 0), ("train", "ring", 7), ("train", "dots", 199)]


@pytest.fixture(scope="module")
def devkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("detection")
    return demo.write_detection(root, num_trainval=24, num_test=12) / "VOC2007"


def _digest(probes: list[tuple[str, str, int]]) -> dict[tuple[str, str, int], str]:
    return {p: hashlib.sha256(demo._paint_image(*p).tobytes()).hexdigest() for p in probes}


def _pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def test_classification_is_an_image_folder(tmp_path: Path) -> None:
    folder = demo.write_classification(tmp_path, train_per_class=3, val_per_class=2)
    assert folder.parent == tmp_path
    assert folder.name.startswith(f"classification-{demo.DEMO_VERSION}")
    assert sorted(p.name for p in folder.iterdir()) == ["train", "val"]
    for split, count in (("train", 3), ("val", 2)):
        assert tuple(sorted(p.name for p in (folder / split).iterdir())) == demo.CLASS_NAMES
        for name in demo.CLASS_NAMES:
            files = sorted((folder / split / name).iterdir())
            assert len(files) == count
            for number, path in enumerate(files):
                with Image.open(path) as image:
                    assert (image.format, image.mode, image.size) == ("PNG", "RGB", (72, 72))
                assert (_pixels(path) == demo._paint_image(split, name, number)).all()


def test_counts_that_the_documentation_promises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blank = np.zeros((72, 72, 3), np.uint8)
    monkeypatch.setattr(demo, "_paint_image", lambda *_: blank)
    folder = demo.write_classification(tmp_path)
    assert folder == tmp_path / f"classification-{demo.DEMO_VERSION}"
    assert len(list(folder.glob("train/*/*.png"))) == 10 * 200
    assert len(list(folder.glob("val/*/*.png"))) == 10 * 40


def test_an_image_depends_on_its_own_name_only() -> None:
    first = _digest(PROBES)
    assert _digest(PROBES[::-1]) == first
    assert len(set(first.values())) == len(PROBES)


def test_golden_pixels() -> None:
    # A change here changes the data of every recorded demo result: raise DEMO_VERSION with it.
    scene, objects = demo._paint_scene("test", 3)
    joined = "".join(_digest(PROBES).values()) + hashlib.sha256(scene.tobytes()).hexdigest()
    joined += str([(thing.name, thing.box) for thing in objects])
    assert hashlib.sha256(joined.encode()).hexdigest() == GOLDEN


def test_another_version_is_another_set(monkeypatch: pytest.MonkeyPatch) -> None:
    before = _digest(PROBES)
    monkeypatch.setattr(demo, "DEMO_VERSION", "other")
    assert not set(before.values()) & set(_digest(PROBES).values())


def test_a_finished_folder_is_returned_untouched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"train_per_class": 1, "val_per_class": 1}
    folder = demo.write_classification(tmp_path, **counts)
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    monkeypatch.setattr(demo, "_paint_image", lambda *_: pytest.fail("painted again"))
    assert demo.write_classification(tmp_path, **counts) == folder
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before


def test_other_counts_are_another_folder(tmp_path: Path) -> None:
    small = demo.write_detection(tmp_path, num_trainval=1, num_test=1)
    larger = demo.write_detection(tmp_path, num_trainval=2, num_test=1)
    assert small != larger
    assert len(list(larger.rglob("*.jpg"))) == 3


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_an_interrupted_build_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    real, painted = demo._paint_image, []

    def paint(split: str, name: str, number: int) -> np.ndarray:
        painted.append(name)
        if len(painted) == 5:
            raise stop
        return real(split, name, number)

    monkeypatch.setattr(demo, "_paint_image", paint)
    with pytest.raises(stop):
        demo.write_classification(tmp_path, train_per_class=2, val_per_class=1)
    assert len(painted) == 5
    assert list(tmp_path.iterdir()) == []


def test_the_folder_appears_only_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = demo._paint_scene

    def paint(split: str, number: int):  # type: ignore[no-untyped-def]  # passes the real one on
        assert not list(tmp_path.glob("detection-*"))
        return real(split, number)

    monkeypatch.setattr(demo, "_paint_scene", paint)
    assert demo.write_detection(tmp_path, num_trainval=2, num_test=1).is_dir()


def test_two_builders_at_once_make_one_folder(tmp_path: Path) -> None:
    def build(_: int) -> Path:
        return demo.write_classification(tmp_path, train_per_class=2, val_per_class=1)

    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(build, range(4)))
    assert [*tmp_path.iterdir()] == [*folders]
    assert len(list(folders.pop().rglob("*.png"))) == 30


def test_the_loser_of_the_race_discards_its_copy(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        folder.mkdir()
        (folder / "mine").touch()
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "theirs").touch()

    assert demo._publish(tmp_path, "set", build) == tmp_path / "set"
    assert [p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")] == [
        "set",
        "set/theirs",
    ]


def test_an_unusable_root_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="another folder"):
        demo.write_classification(tmp_path / "file")


def test_the_module_is_torch_free() -> None:
    code = "import sys, instdisc.images.demo; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_devkit_layout(devkit: Path) -> None:
    ids = {
        split: (devkit / "ImageSets" / "Main" / f"{split}.txt").read_text().split()
        for split in ("trainval", "test")
    }
    assert ids["trainval"] == [f"{i:06d}" for i in range(1, 25)]
    assert ids["test"] == [f"{i:06d}" for i in range(25, 37)]
    everything = ids["trainval"] + ids["test"]
    assert sorted(p.stem for p in (devkit / "JPEGImages").glob("*.jpg")) == everything
    assert sorted(p.stem for p in (devkit / "Annotations").glob("*.xml")) == everything


def test_annotations_are_voc(devkit: Path) -> None:
    seen = set()
    for path in sorted((devkit / "Annotations").iterdir()):
        root = ET.parse(path).getroot()
        assert root.findtext("filename") == f"{path.stem}.jpg"
        width, height = int(root.findtext("size/width", "")), int(root.findtext("size/height", ""))
        with Image.open(devkit / "JPEGImages" / f"{path.stem}.jpg") as image:
            assert (image.format, image.size) == ("JPEG", (width, height))
        objects = root.findall("object")
        assert 1 <= len(objects) <= 4
        for node in objects:
            seen.add(node.findtext("name"))
            assert node.findtext("pose") == "Unspecified"
            assert {node.findtext("truncated"), node.findtext("difficult")} <= {"0", "1"}
            x1, y1, x2, y2 = (
                int(node.findtext(f"bndbox/{side}", ""))
                for side in ("xmin", "ymin", "xmax", "ymax")
            )
            assert 1 <= x1 < x2 <= width
            assert 1 <= y1 < y2 <= height
    assert seen == set(demo.CLASS_NAMES)


def test_jpegs_hold_the_painted_scene(devkit: Path) -> None:
    # Quality 95: hue is stored at half resolution, so thin edges differ and the bulk does not.
    for image_id, split, number in (("000001", "trainval", 0), ("000025", "test", 0)):
        painted = demo._paint_scene(split, number)[0].astype(int)
        stored = _pixels(devkit / "JPEGImages" / f"{image_id}.jpg").astype(int)
        assert np.median(np.abs(stored - painted)) <= 3


def test_boxes_are_tight_around_what_is_visible() -> None:
    for number in range(40):
        _, objects = demo._paint_scene("trainval", number)
        for thing in objects:
            x1, y1, x2, y2 = thing.box
            inside = thing.mask[y1 - 1 : y2, x1 - 1 : x2]
            assert inside.sum() == thing.mask.sum()
            assert all(edge.any() for edge in (inside[0], inside[-1], inside[:, 0], inside[:, -1]))
        for one, thing in enumerate(objects):
            for other in objects[one + 1 :]:
                assert not (thing.mask & other.mask).any()


def test_a_lone_object_lies_inside_its_box_to_the_eye() -> None:
    # Judged from the pixels, not from the mask: outside the box hardly anything has its colour.
    checked = 0
    for number in range(60):
        pixels, objects = demo._paint_scene("trainval", number)
        if len(objects) > 1 or objects[0].visible < 1:
            continue
        x1, y1, x2, y2 = objects[0].box
        outside = np.ones(pixels.shape[:2], bool)
        outside[y1 - 1 : y2, x1 - 1 : x2] = False
        colours = [np.median(pixels[where], axis=0) for where in (objects[0].mask, outside)]
        to_object, to_ground = (np.abs(pixels - colour).sum(axis=2) for colour in colours)
        assert (to_object < to_ground)[outside].mean() < 0.05
        assert (to_object < to_ground)[objects[0].mask].mean() > 0.8
        checked += 1
    assert checked >= 5


def test_difficult_objects_are_few_and_mostly_hidden() -> None:
    scenes = [demo._paint_scene("test", number) for number in range(60)]
    everything = [thing for _, objects in scenes for thing in objects]
    difficult = [thing for thing in everything if thing.visible < demo._HIDDEN]
    assert 2 <= len(difficult) <= 0.1 * len(everything)
    xml = ET.fromstring(demo._annotation("000001", difficult[:1]))
    assert [xml.findtext(f"object/{tag}") for tag in ("difficult", "truncated")] == ["1", "1"]


def test_pixels_alone_hardly_give_the_class_away() -> None:
    def load(split: str, count: int) -> tuple[np.ndarray, list[str]]:
        keys = [(name, i) for name in demo.CLASS_NAMES for i in range(count)]
        images = [demo._paint_image(split, *key)[4:68:2, 4:68:2].ravel() for key in keys]
        return np.stack(images).astype(np.float32), [name for name, _ in keys]

    nearest = KNeighborsClassifier(20).fit(*load("train", 80))
    assert nearest.score(*load("val", 40)) < 0.4

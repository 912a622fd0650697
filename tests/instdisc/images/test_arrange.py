"""Class folders of links from small lists in the official forms."""

import os
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from instdisc.images.arrange import main

SYNSETS = ["n01440764", "n01443537", "n01484850"]


@pytest.fixture
def val(tmp_path: Path) -> Path:
    folder = tmp_path / "val-flat"
    folder.mkdir()
    for number in range(1, 5):
        (folder / f"ILSVRC2012_val_{number:08d}.JPEG").write_bytes(b"%d" % number)
    return folder


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    """The kit numbers its classes in an order of its own."""
    data = tmp_path / "kit" / "data"
    data.mkdir(parents=True)
    rows = np.zeros((3, 1), dtype=[("ILSVRC2012_ID", object), ("WNID", object)])
    for place, number in enumerate((2, 3, 1)):
        rows[place, 0] = (float(number), SYNSETS[place])
    scipy.io.savemat(data / "meta.mat", {"synsets": rows})
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text("3\n1\n2\n3\n")
    return tmp_path / "kit"


def run(layout: str, images: Path, names: Path, output: Path) -> int:
    argv = ["--layout", layout, "--images", str(images), "--list", str(names)]
    return main([*argv, "--output", str(output)])


def found(output: Path) -> dict[str, str]:
    files = (path for path in output.rglob("*") if path.is_file())
    return {str(path.relative_to(output)): path.read_text() for path in files}


EXPECTED = {
    "n01443537/ILSVRC2012_val_00000001.JPEG": "1",
    "n01484850/ILSVRC2012_val_00000002.JPEG": "2",
    "n01440764/ILSVRC2012_val_00000003.JPEG": "3",
    "n01443537/ILSVRC2012_val_00000004.JPEG": "4",
}


def test_imagenet_from_the_kit_and_from_kaggles_list(
    val: Path, kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("imagenet-val", val, kit, tmp_path / "val") == 0
    assert "4 images in 3 class folders, 4 links made" in capsys.readouterr().out
    assert found(tmp_path / "val") == EXPECTED
    links = [path for path in (tmp_path / "val").rglob("*") if path.is_symlink()]
    assert len(links) == 4
    assert not any(os.readlink(path).startswith("/") for path in links)  # noqa: PTH115
    assert run("imagenet-val", val, kit, tmp_path / "val") == 0
    assert "0 links made" in capsys.readouterr().out
    lines = [
        f"{Path(name).stem},{Path(name).parent} 1 2 3 4 {Path(name).parent} 5 6 7 8"
        for name in reversed(EXPECTED)
    ]
    (tmp_path / "LOC.csv").write_text("\n".join(["ImageId,PredictionString", *lines, ""]))
    assert run("imagenet-val", val, tmp_path / "LOC.csv", tmp_path / "other") == 0
    assert found(tmp_path / "other") == EXPECTED


def test_places_keeps_nested_classes_apart(tmp_path: Path) -> None:
    for name in ("a/abbey/1.jpg", "a/apartment/outdoor/1.jpg", "a/apartment/indoor/2.jpg"):
        path = tmp_path / "images256" / name
        path.parent.mkdir(parents=True)
        path.write_text(name)
    (tmp_path / "train.csv").write_text(
        "a/abbey/1.jpg 0\na/apartment/outdoor/1.jpg 7\na/apartment/indoor/2.jpg,6\n"
    )
    assert run("places205", tmp_path / "images256", tmp_path / "train.csv", tmp_path / "out") == 0
    assert found(tmp_path / "out") == {
        "a-abbey/1.jpg": "a/abbey/1.jpg",
        "a-apartment-outdoor/1.jpg": "a/apartment/outdoor/1.jpg",
        "a-apartment-indoor/2.jpg": "a/apartment/indoor/2.jpg",
    }


@pytest.mark.parametrize(
    ("layout", "text", "message"),
    [
        ("imagenet-val", "ImageId,PredictionString\n", "is empty"),
        ("imagenet-val", "ImageId,PredictionString\nx,cat\n", "line 2: no class"),
        ("imagenet-val", "I,P\nILSVRC2012_val_00000009,n01440764 1\n", "1 of the 1 images are not"),
        ("imagenet-val", "I,P\n../val-flat/x,n01440764 1\n", "names ../val-flat/x.JPEG"),
        ("places205", "1.jpg 0\n", "line 1: expected"),
        ("places205", "a/b/1.jpg 0\na/b/2.jpg 1\n", "line 2: expected"),
        ("places205", "a/b/1.jpg\n", "line 1: expected"),
    ],
)
def test_lists_that_are_not_the_official_ones(
    val: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    layout: str,
    text: str,
    message: str,
) -> None:
    (tmp_path / "list.csv").write_text(text)
    assert run(layout, val, tmp_path / "list.csv", tmp_path / "out") == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_damaged_kit_a_missing_list_and_files_in_the_way(
    val: Path, kit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "out" / "n01443537" / "ILSVRC2012_val_00000001.JPEG"
    taken.parent.mkdir(parents=True)
    taken.write_text("mine")
    assert run("imagenet-val", val, kit, tmp_path / "out") == 2
    assert "is another file" in capsys.readouterr().err
    assert taken.read_text() == "mine"
    scipy.io.savemat(kit / "data" / "meta.mat", {"other": [1]})
    assert run("imagenet-val", val, kit, tmp_path / "out") == 2
    assert "meta.mat is not that of the kit" in capsys.readouterr().err
    (kit / "data" / "meta.mat").write_bytes(b"junk")
    assert run("imagenet-val", val, kit, tmp_path / "out") == 2
    assert "meta.mat is not a MATLAB file" in capsys.readouterr().err
    assert run("imagenet-val", val, tmp_path / "no", tmp_path / "out") == 2
    assert "cannot be read" in capsys.readouterr().err
    assert main(["--layout", "places205"]) == 2
    assert "--images is missing" in capsys.readouterr().err

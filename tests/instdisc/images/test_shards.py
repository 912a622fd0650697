"""Images in tar archives and in list files: the same set as in a folder, or one line of refusal."""

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from instdisc.errors import UserError
from instdisc.images import shards
from instdisc.images.locations import locate_data
from instdisc.images.sets import UNLABELLED, ImageSet, find_bad_images, has_split, load_images
from instdisc.images.shards import list_shards

FLAT = ["b.jpg", "a.jpg", "c d,1.JPG", "é.png"]
CLASSES = ["b/2.png", "b/10.png", "a-b/x/1.jpg", "a/z.PNG", "a/0.bmp"]


def write_images(root: Path, names: list[str]) -> Path:
    for number, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        noise = np.random.default_rng(number).integers(0, 256, (9, 7, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
    return root


def as_list(root: Path, names: list[str], label: Callable[[str], str] = lambda _: "") -> Path:
    path = root / "images.txt"
    path.write_text("".join(f"{name}{label(name)}\n" for name in names))
    return path


def as_shards(root: Path, names: list[str], output: Path) -> Path:
    """Two archives in different formats, in an order that is not the names'."""
    output.mkdir()
    for number, form in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)):
        with tarfile.open(output / f"{number}.tar", "w", format=form) as tar:
            for name in names[number::2]:
                tar.add(root / name, f"./{name}" if number else name)
    return output


def load(path: Path) -> ImageSet:
    return load_images(locate_data(str(path)), "train")


@pytest.mark.parametrize("names", [FLAT, CLASSES], ids=["flat", "classes"])
def test_the_container_does_not_matter(tmp_path: Path, names: list[str]) -> None:
    folder = write_images(tmp_path / "folder", names)
    expected = load(folder)
    assert expected.is_labelled == (names is CLASSES)
    others = [load(as_shards(folder, names, tmp_path / "shards")), load(as_list(folder, names))]
    for other in others:
        assert other.fingerprint == expected.fingerprint
        assert other.names.tolist() == expected.names.tolist()
        assert (other.classes, other.labels.tolist()) == (
            expected.classes,
            expected.labels.tolist(),
        )
        assert not find_bad_images(other)
        for index in range(len(names)):
            assert np.array_equal(other.open(index), expected.open(index))
        part = other.subset([2, 0])
        assert np.array_equal(part.open(1), expected.open(0))
    (whole,) = as_shards(folder, names, tmp_path / "one").glob("0.tar")
    assert len(load(whole)) == len(names[0::2])


def test_images_at_any_depth_without_classes(tmp_path: Path) -> None:
    names = ["top.jpg", "2019/a.jpg", "2019/05/b.jpg", ".trash/c.jpg", "x/.thumbs/d.jpg"]
    folder = write_images(tmp_path / "photos", names)
    (folder / "readme.txt").write_text("hello")
    images = load(folder)
    assert images.names.tolist() == [b"2019/05/b.jpg", b"2019/a.jpg", b"top.jpg"]
    assert images.classes == UNLABELLED
    (folder / "empty.jpg").touch()
    with pytest.raises(UserError, match=r"empty.jpg: remove"):
        load(folder)
    # In train/ the class folders count, as ever, and a picture beside them does not.
    (tmp_path / "data").mkdir()
    folder.rename(tmp_path / "data" / "train")
    assert load(tmp_path / "data").classes == ("2019", "x")


def test_the_label_column_of_a_list(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "set", CLASSES)
    expected = load(folder).fingerprint
    for separator in (" ", "\t", ",", " , "):
        listed = as_list(folder, CLASSES, lambda name, s=separator: s + name.split("/")[0])
        assert load(listed).fingerprint == expected
    flat = write_images(tmp_path / "flat", FLAT)
    (flat / "l.csv").write_text('path,label\n"c d,1.JPG",7\nb.jpg,10\r\n\né.png,7\na.jpg,7\n')
    images = load(flat / "l.csv")
    assert images.classes == ("10", "7")
    assert images.labels.tolist() == [1, 0, 1, 1]
    assert images.names.tolist() == [b"a.jpg", b"b.jpg", b"c d,1.JPG", "é.png".encode()]


def test_absolute_and_outer_paths(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "set", FLAT)
    expected = load(folder).fingerprint
    (folder / "l.txt").write_text("".join(f"{folder}/{name}\n" for name in FLAT))
    assert load(folder / "l.txt").fingerprint == expected
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "l.txt").write_text(f"../set/a.jpg\n{folder}/b.jpg\n")
    images = load(tmp_path / "lists" / "l.txt")
    assert (len(images), images.classes) == (2, UNLABELLED)
    assert not find_bad_images(images)


def test_val_stands_beside_train(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "set", CLASSES)
    (folder / "train.txt").write_text("b/2.png\na/z.PNG\n")
    location = locate_data(str(folder / "train.txt"))
    assert not has_split(location, "val")
    (folder / "val.txt").write_text("a/0.bmp\n")
    assert has_split(location, "val")
    assert load_images(location, "val").names.tolist() == [b"a/0.bmp"]
    assert load_images(location, "train").dataset == "set"
    for split, names in (("train", CLASSES[:3]), ("val", CLASSES[3:])):
        as_shards(folder, names, tmp_path / split)
    location = locate_data(str(tmp_path))
    assert len(load_images(location, "train")) == 3
    assert load_images(location, "val").classes == ("a",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("a.jpg\nno.jpg\nnor.jpg\n", r"names 2 files that do not exist: no.jpg, nor.jpg"),
        ("a.jpg\nb.jpg\n./a.jpg\n", r"names a.jpg in line 1 and in line 3"),
        ("a.jpg 1\nb.jpg\n", "line 2: no label"),
        ("a.jpg\n\0.jpg\n", "line 2: no name"),
        ("a.jpg\n" + "x" * 5000 + ".jpg\n", "line 2: no name"),
        ("a.jpg\nnotes.md\n", "1 of the files"),
        ("a.jpg\nsub.jpg\n", "sub.jpg"),
    ],
)
def test_bad_lists(tmp_path: Path, text: str, message: str) -> None:
    write_images(tmp_path, ["a.jpg", "b.jpg", "sub.jpg/x.jpg"])
    (tmp_path / "notes.md").write_text("no image")
    (tmp_path / "l.txt").write_text(text)
    with pytest.raises(UserError, match=message):
        load(tmp_path / "l.txt")


def add(tar: tarfile.TarFile, name: str, **fields: object) -> None:
    header = tarfile.TarInfo(name)
    header.size = 3 if fields.get("type", tarfile.REGTYPE) == tarfile.REGTYPE else 0
    for field, value in fields.items():
        setattr(header, field, value)
    tar.addfile(header, io.BytesIO(b"abc") if header.isreg() else None)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("../x.jpg", {}),
        ("a/../../x.jpg", {}),
        ("/etc/x.jpg", {}),
        ("x.jpg", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}),
        ("x.jpg", {"type": tarfile.LNKTYPE, "linkname": "ok.jpg"}),
        ("x.jpg", {"type": tarfile.CHRTYPE}),
        ("x.jpg", {"type": tarfile.BLKTYPE}),
        ("x.jpg", {"type": tarfile.FIFOTYPE}),
        ("d" * 5000 + ".jpg", {}),
    ],
)
def test_members_that_do_not_stay_inside(
    tmp_path: Path, name: str, fields: dict[str, object]
) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        add(tar, "ok.jpg")
        add(tar, name, **fields)
    with pytest.raises(UserError, match=r"x.tar is not taken \(.*: make it anew"):
        list_shards([path])


def test_absurd_sizes_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.tar"
    header = tarfile.TarInfo("huge.jpg")
    header.size = 2**60
    path.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(4096))
    with pytest.raises(UserError, match=r"longer than the archive|end of data"):
        list_shards([path])
    with tarfile.open(path, "w") as tar:
        for number in range(4):
            add(tar, f"{number}.jpg")
    assert len(list_shards([path]).names) == 4
    monkeypatch.setattr(shards, "MAX_MEMBERS", 3)
    with pytest.raises(UserError, match="more than 3 members"):
        list_shards([path])
    monkeypatch.setattr(shards, "MAX_BYTES", 2)
    with pytest.raises(UserError, match="has 3 bytes"):
        list_shards([path])


def test_a_truncated_archive_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.tar", tmp_path / "x.tar"
    with tarfile.open(whole, "w") as tar:
        for number in range(3):
            add(tar, f"{number}.jpg")
    content = whole.read_bytes()
    for end in range(0, 3 * 1024 + 1, 100):  # behind the third member follow the zeros of the end
        path.write_bytes(content[:end])
        with pytest.raises(UserError, match="is not taken"):
            list_shards([path])
    damaged = bytearray(content)
    damaged[1024:1030] = b"\xff" * 6  # tarfile alone would take this for the end
    path.write_bytes(damaged)
    with pytest.raises(UserError, match="cut off at byte 1024"):
        list_shards([path])


def test_compressed_and_empty_archives(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w:gz") as tar:
        add(tar, "a.jpg")
    with pytest.raises(UserError, match="uncompressed"):
        load(tmp_path / "x.tar")
    with tarfile.open(tmp_path / "y.tar", "w") as tar:
        add(tar, "a.txt")
        add(tar, "._a.jpg")
    with pytest.raises(UserError, match="holds no images"):
        load(tmp_path / "y.tar")


def test_names_twice_in_archives(tmp_path: Path) -> None:
    for name in ("x.tar", "y.tar"):
        with tarfile.open(tmp_path / name, "w") as tar:
            add(tar, "a.jpg")
    with pytest.raises(UserError, match=r"a.jpg is in .*x.tar and again in .*y.tar"):
        load(tmp_path)


def test_damage_inside_an_archive_names_the_member(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "set", ["a.png", "b.png"])
    (folder / "b.png").write_bytes(b"no image")
    images = load(as_shards(folder, ["a.png", "b.png"], tmp_path / "shards"))
    assert find_bad_images(images) == [1]
    with pytest.raises(UserError, match=r"1.tar/b.png is not a readable image"):
        images.open(1)
    os.truncate(tmp_path / "shards" / "0.tar", 600)
    with pytest.raises(UserError, match=r"0.tar/a.png is not a readable image"):
        images.open(0)

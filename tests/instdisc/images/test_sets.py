"""Image sets: order, fingerprints, subsets, and what is done with files that are no images."""

import hashlib
import os
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from instdisc.errors import UserError
from instdisc.images.locations import DataLocation
from instdisc.images.sets import find_bad_images, has_split, load_images, random_subset, read_folder


def write_image(path: Path, value: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(value).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for i, name in enumerate(["b/2.png", "b/10.png", "a/x/1.jpg", "a/z.PNG", "c/k.bmp"]):
        write_image(tmp_path / "train" / name, i)
    write_image(tmp_path / "val" / "a" / "1.png", 9)
    return tmp_path


def test_images_are_sorted_by_bytes_whatever_the_file_system_says(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    images = read_folder(tree / "train", "t", "train")
    assert images.names.tolist() == [b"a/x/1.jpg", b"a/z.PNG", b"b/10.png", b"b/2.png", b"c/k.bmp"]
    assert images.labels.tolist() == [0, 0, 1, 1, 2]
    assert images.classes == ("a", "b", "c")
    # Another creation order, another machine: the same fingerprint.
    other = tmp_path_factory.mktemp("other") / "copy"
    for name in reversed(images.names.tolist()):
        source = tree / "train" / os.fsdecode(name)
        target = other / os.fsdecode(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    assert read_folder(other, "t", "train").fingerprint == images.fingerprint


def test_the_fingerprint_is_that_of_a_plain_walk(tree: Path) -> None:
    """Checkpoints of earlier versions hold it: it must never change."""
    root = tree / "train"
    write_image(root / "a-b" / ".thumbs" / "1.png", 7)  # "a-b/" comes before "a/", a before a-b
    write_image(root / "a" / ".hidden.png", 8)
    (root / "empty").mkdir()
    (root / "b" / "linked").symlink_to(root / "c")
    classes = ("a", "a-b", "b", "c", "empty")
    rows = sorted(
        (os.fsencode(os.path.relpath(Path(parent, file), root)), Path(parent, file).stat().st_size)
        for parent, _, files in os.walk(root, followlinks=True)
        for file in files
        if not file.startswith(".")
    )
    labels = [classes.index(os.fsdecode(name).split("/")[0]) for name, _ in rows]
    digest = hashlib.sha256(repr(classes).encode())
    digest.update(b"\n".join(name for name, _ in rows))
    digest.update(struct.pack(f"<{len(rows)}q", *labels))
    digest.update(struct.pack(f"<{len(rows)}q", *(size for _, size in rows)))
    assert read_folder(root, "t", "train").fingerprint == digest.hexdigest()
    assert load_images(DataLocation("folder", tree), "train").fingerprint == digest.hexdigest()


@pytest.mark.parametrize("change", ["rename", "resize", "remove", "relabel"])
def test_the_fingerprint_sees_every_change_of_the_list(tree: Path, change: str) -> None:
    before = read_folder(tree / "train", "t", "train").fingerprint
    file = tree / "train" / "b" / "2.png"
    if change == "rename":
        file.rename(file.with_name("3.png"))
    elif change == "resize":
        Image.new("RGB", (3, 3)).save(file)
    elif change == "remove":
        file.unlink()
    else:
        file.rename(tree / "train" / "a" / "2.png")
    assert read_folder(tree / "train", "t", "train").fingerprint != before


def test_splits_of_a_folder(tree: Path) -> None:
    location = DataLocation("folder", tree)
    assert len(load_images(location, "train")) == 5
    assert len(load_images(location, "val")) == 1
    assert has_split(location, "val")
    flat = DataLocation("folder", tree / "train")
    assert len(load_images(flat, "train")) == 5
    assert not has_split(flat, "val")


def test_files_that_are_no_images_are_refused_or_left_out(tree: Path) -> None:
    (tree / "train" / "a" / "notes.txt").write_text("hello")
    (tree / "train" / "c" / "empty.png").touch()
    (tree / "train" / "c" / ".DS_Store").touch()
    with pytest.raises(UserError, match=r"2 of the files .*notes.txt.*empty.png.*--skip-bad"):
        read_folder(tree / "train", "t", "train")
    assert len(read_folder(tree / "train", "t", "train", skip_bad=True)) == 5


def test_folders_without_images_say_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_folder(tmp_path / "no", "t", "train")
    with pytest.raises(UserError, match="holds no class folders"):
        read_folder(tmp_path, "t", "train")
    (tmp_path / "a").mkdir()
    with pytest.raises(UserError, match="holds no images"):
        read_folder(tmp_path, "t", "train")


def test_a_circle_of_links_ends(tree: Path) -> None:
    (tree / "train" / "a" / "again").symlink_to(tree / "train" / "a", target_is_directory=True)
    assert len(read_folder(tree / "train", "t", "train")) == 5


def test_damaged_images_are_found_and_named(tree: Path) -> None:
    file = tree / "train" / "a" / "x" / "1.jpg"
    file.write_bytes(file.read_bytes()[:200])
    images = read_folder(tree / "train", "t", "train")
    assert find_bad_images(images) == [0]
    with pytest.raises(UserError, match=r"1.jpg is not a readable image"):
        images.open(0)
    assert images.open(1).mode == "RGB"


def test_random_subsets_are_nested_seeded_and_of_the_right_size() -> None:
    names = np.array([f"{i:04d}".encode() for i in range(1000)])
    from instdisc.images.sets import ImageSet

    images = ImageSet("t", "train", ("a",), names, np.zeros(1000, int), np.zeros(1000, int))
    small, large = random_subset(images, 0.1, 0), random_subset(images, 0.3, 0)
    assert (len(small), len(large)) == (100, 300)
    assert set(small.names) < set(large.names)
    assert set(random_subset(images, 0.1, 1).names) != set(small.names)
    assert random_subset(images, 1.0, 0) is images
    with pytest.raises(UserError, match="leaves 1"):
        random_subset(images, 0.001, 0)

"""Large lists in one file: mapped by every process, the same images, never trusted blindly."""

import hashlib
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from instdisc.errors import UserError
from instdisc.images import sets
from instdisc.images.locations import locate_data
from instdisc.images.sets import ImageSet, load_images, share_lists
from instdisc.training import dist


@pytest.fixture
def images(image_tree: Path, monkeypatch: pytest.MonkeyPatch) -> ImageSet:
    monkeypatch.setattr(sets, "MAPPED_FROM", 24)
    return load_images(locate_data(str(image_tree)), "train")


def assert_same(one: ImageSet, two: ImageSet) -> None:
    for name in ("names", "labels", "sizes"):
        assert np.array_equal(getattr(one, name), getattr(two, name)), name
        assert getattr(one, name).dtype == getattr(two, name).dtype
    assert one.fingerprint == two.fingerprint
    assert one.name(5) == two.name(5)
    assert np.array_equal(np.asarray(one.open(5)), np.asarray(two.open(5)))


def plain_fingerprint(images: ImageSet) -> str:
    """In one piece, as it was always defined."""
    digest = hashlib.sha256(repr(images.classes).encode() + b"\n".join(images.names.tolist()))
    digest.update(images.labels.astype("<i8").tobytes() + images.sizes.astype("<i8").tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("hashed", [1, 5, 8, 24, 100])
def test_a_fingerprint_does_not_depend_on_its_parts(
    images: ImageSet, monkeypatch: pytest.MonkeyPatch, hashed: int
) -> None:
    monkeypatch.setattr(sets, "HASHED", hashed)
    assert images.subset(range(24)).fingerprint == plain_fingerprint(images)


def test_a_shared_list_is_sent_as_the_name_of_its_file(images: ImageSet) -> None:
    shared = share_lists(images)
    assert shared.mapped is not None
    assert_same(shared, images)
    sent = pickle.dumps(shared)
    assert b"5.png" not in sent
    again = pickle.loads(sent)
    assert_same(again, images)
    assert str(shared.mapped) in Path("/proc/self/maps").read_text()
    # A part of it is a list of its own.
    part = pickle.loads(pickle.dumps(again.subset([3, 1])))
    assert part.mapped is None
    assert part.names.tolist() == images.names[[3, 1]].tolist()
    shared.mapped.unlink()
    with pytest.raises(UserError, match="INSTDISC_RUNS name a folder on a disk that all"):
        pickle.loads(sent)


def test_small_sets_are_sent_as_they_are(
    images: ImageSet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sets, "MAPPED_FROM", 25)
    assert share_lists(images) is images
    assert_same(pickle.loads(pickle.dumps(images)), images)
    assert not list((tmp_path / "runs").rglob("*.lists"))


def test_a_good_file_is_used_again_and_a_damaged_one_replaced(images: ImageSet) -> None:
    file = share_lists(images).mapped
    assert file is not None
    first = file.stat().st_ino
    assert share_lists(images).mapped == file
    assert file.stat().st_ino == first
    content = file.read_bytes()
    for damaged in (content.replace(b"class1/5.png", b"class1/9.png"), content[:-200], b"", b"x"):
        file.write_bytes(damaged)
        assert_same(share_lists(images), images)
        assert file.read_bytes() == content


def test_without_a_place_for_the_file_everybody_has_a_copy(
    images: ImageSet, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "listings").write_text("in the way")
    assert share_lists(images) is images


def test_two_processes_map_one_file(
    images: ImageSet, run_ranks: Callable[..., list[int | None]]
) -> None:
    def work(rank: int) -> None:
        dist.init_process("cpu")
        found = dist.from_first(lambda: share_lists(images))
        assert_same(found, images)
        line = next(
            line
            for line in Path("/proc/self/maps").read_text().splitlines()
            if line.endswith(str(found.mapped))
        )
        assert found.mapped is not None
        assert int(line.split()[4]) == found.mapped.stat().st_ino
        dist.close()
        os._exit(0)

    assert run_ranks(work) == [0, 0]

"""Listings: one look at a file, kept on disk, made anew when something has changed."""

import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instdisc.images import catalog, listing
from instdisc.images.catalog import load_listing
from instdisc.images.listing import list_folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b/2.png", "b/10.png", "a/x/1.jpg", "a/z.PNG", "c/k.bmp", "top.jpg"):
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path / "set"


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Listings made, and looks at files and at folders."""
    found = dict.fromkeys(("list_images", "find_size", "find_state"), 0)

    def count(module: Any, name: str) -> None:
        inner: Callable[..., Any] = getattr(module, name)

        def counted(*args: Any) -> Any:
            found[name] += 1
            return inner(*args)

        monkeypatch.setattr(module, name, counted)

    count(catalog, "list_images")
    count(listing, "find_size")
    count(listing, "find_state")
    return found


def settle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the files be old enough for their listing to be kept."""
    monkeypatch.setattr(catalog, "SETTLED", 0)
    time.sleep(0.02)


def test_one_look_at_each_file_and_folder(tree: Path, counts: dict[str, int]) -> None:
    (tree / "a" / "link.jpg").symlink_to(tree / "c" / "k.bmp")
    (tree / "a" / "gone.jpg").symlink_to(tree / "nowhere")
    found = list_folder(tree)
    assert len(found.names) == 8
    assert counts["find_size"] == 8
    assert counts["find_state"] == 5  # the root, a, a/x, b, c
    assert found.sizes.tolist() == [-1, 7, 9, 7, 8, 7, 7, 7]


def test_a_second_start_lists_nothing(
    tree: Path, counts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    first = load_listing(tree)
    second = load_listing(tree)
    assert counts["list_images"] == 1
    for name, values in vars(first).items():
        assert values.tolist() == getattr(second, name).tolist(), name


def test_a_folder_that_has_just_changed_is_not_kept(tree: Path, counts: dict[str, int]) -> None:
    (tree / "b" / "new.png").write_bytes(b"x")
    load_listing(tree)
    load_listing(tree)
    assert counts["list_images"] == 2


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file more": lambda tree: (tree / "a" / "x" / "2.jpg").write_bytes(b"new"),
    "a file less": lambda tree: (tree / "top.jpg").unlink(),
    "a name": lambda tree: (tree / "b" / "2.png").rename(tree / "b" / "3.png"),
    "a folder": lambda tree: (tree / "a" / "y").mkdir(),
    "a size in place": lambda tree: (tree / "c" / "k.bmp").write_bytes(b"longer than before"),
    "an old date": lambda tree: (
        (tree / "b" / "4.png").write_bytes(b"x"),
        os.utime(tree / "b", ns=(BEFORE, BEFORE)),
    ),
}
BEFORE = 1_600_000_000_000_000_000


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_makes_a_new_listing(
    tree: Path, counts: dict[str, int], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    os.utime(tree / "b", ns=(BEFORE, BEFORE))
    settle(monkeypatch)
    before = load_listing(tree)
    CHANGES[change](tree)
    after = load_listing(tree)
    assert counts["list_images"] == 2
    assert [before.names.tolist(), before.sizes.tolist(), before.folders.tolist()] != [
        after.names.tolist(),
        after.sizes.tolist(),
        after.folders.tolist(),
    ] or change == "a folder"


def test_lists_and_archives_are_kept_too(
    tree: Path, tmp_path: Path, counts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    with tarfile.open(shards / "0.tar", "w") as tar:
        tar.add(tree / "top.jpg", "top.jpg")
    names = tree / "l.txt"
    names.write_text("top.jpg\nb/2.png\n")
    settle(monkeypatch)
    for path in (shards, names):
        assert load_listing(path).names.tolist() == load_listing(path).names.tolist()
    assert counts["list_images"] == 2
    (tree / "b" / "2.png").unlink()
    with tarfile.open(shards / "1.tar", "w") as tar:
        tar.add(tree / "top.jpg", "again.jpg")
    assert load_listing(names).sizes.tolist() == [-1, 7]
    assert len(load_listing(shards).names) == 2


def test_a_damaged_listing_is_made_anew(
    tree: Path, tmp_path: Path, counts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    expected = load_listing(tree).names.tolist()
    (kept,) = (tmp_path / "runs" / "listings").iterdir()
    content = kept.read_bytes()
    patched = bytearray(content)
    patched[6] |= 0x20  # a flag of the first file: it could not be unpacked
    patched[content.index(b"PK\1\2") + 8] |= 0x20
    cut, other = content[:-100], content.replace(b"b/10.png", b"b/99.png")
    for damaged in (b"", b"junk", cut, other, bytes(patched)):
        kept.write_bytes(damaged)
        assert load_listing(tree).names.tolist() == expected
    assert counts["list_images"] == 6


def test_runs_that_cannot_be_written_to_do_without(
    tree: Path, tmp_path: Path, counts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    settle(monkeypatch)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "listings").write_text("in the way")
    assert len(load_listing(tree).names) == len(load_listing(tree).names) == 6
    assert counts["list_images"] == 2

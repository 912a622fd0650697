"""Labelled subsets: size, balance, nesting, seeds, list files, and what is refused."""

import dataclasses
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from instdisc.errors import UserError
from instdisc.images.locations import locate_data
from instdisc.images.sets import ImageSet, load_images, read_folder
from instdisc.images.subsets import LabeledSubset, choose_labeled, hold_out, read_list
from instdisc.names import SubsetMode

FRACTIONS = (0.01, 0.02, 0.04, 0.1, 0.2, 0.5, 1.0)


def make_images(counts: list[int], dataset: str = "fake") -> ImageSet:
    """Names as ImageNet has them; no file is behind them."""
    names = [
        f"n{label:08d}/n{label:08d}_{number}.JPEG".encode()
        for label, count in enumerate(counts)
        for number in range(count)
    ]
    labels = np.repeat(np.arange(len(counts)), counts)
    order = sorted(range(len(names)), key=lambda i: names[i])
    return ImageSet(
        dataset=dataset,
        split="train",
        classes=tuple(f"n{label:08d}" for label in range(len(counts))),
        names=np.array([names[i] for i in order]),
        labels=labels[order],
        sizes=np.full(len(names), 7),
        root=Path("nowhere"),
    )


@pytest.fixture(scope="module")
def images() -> ImageSet:
    return make_images([300, 300, 300, 300])


@pytest.mark.parametrize("mode", ["random", "balanced"])
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_size_is_the_fraction_rounded_down(
    images: ImageSet, mode: SubsetMode, fraction: float
) -> None:
    subset = choose_labeled(images, fraction, mode=mode, seed=3)
    assert len(subset) == len(subset.images) == int(1200 * fraction + 1e-9)
    assert len(set(subset.indices.tolist())) == len(subset)
    assert subset.images.names.tolist() == images.names[subset.indices].tolist()
    assert subset.images.labels.tolist() == images.labels[subset.indices].tolist()
    assert subset.indices.tolist() == sorted(subset.indices.tolist())


def test_one_percent_of_imagenet_is_the_customary_number() -> None:
    labels = np.repeat(np.arange(1000), [1281] * 999 + [1448])
    whole = dataclasses.replace(
        make_images([1] * 1000), names=labels.astype("S"), labels=labels, sizes=labels
    )
    subset = choose_labeled(whole, 0.01, mode="balanced")
    assert len(subset) == 12_811
    counts = np.bincount(subset.images.labels)
    assert (counts.min(), counts.max(), len(counts)) == (12, 13, 1000)


@pytest.mark.parametrize("mode", ["random", "balanced"])
def test_smaller_fractions_lie_inside_larger_ones(images: ImageSet, mode: SubsetMode) -> None:
    chosen = [set(choose_labeled(images, f, mode=mode, seed=1).indices.tolist()) for f in FRACTIONS]
    for smaller, larger in itertools.pairwise(chosen):
        assert smaller < larger


@pytest.mark.parametrize("counts", [[300, 300, 300, 300], [5, 40, 300, 17]])
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_balanced_classes_differ_by_one_unless_used_up(counts: list[int], fraction: float) -> None:
    whole = make_images(counts)
    if int(sum(counts) * fraction) < 4:
        with pytest.raises(UserError, match="raise the fraction"):
            choose_labeled(whole, fraction, mode="balanced")
        return
    found = np.bincount(choose_labeled(whole, fraction, mode="balanced").images.labels)
    most = found.max()
    for count, available in zip(found, counts, strict=True):
        assert count in (most, most - 1) or count == available


def test_random_is_not_balanced_and_covers_all_images_over_seeds(images: ImageSet) -> None:
    draws = [choose_labeled(images, 0.1, seed=seed) for seed in range(60)]
    assert any(len(set(np.bincount(d.images.labels))) > 2 for d in draws)
    hits = np.bincount(np.concatenate([d.indices for d in draws]), minlength=1200)
    assert (hits == 0).mean() < 0.02  # 0.9 ** 60 = 0.0018
    assert hits.max() < 20


@pytest.mark.parametrize("mode", ["random", "balanced"])
def test_the_seed_decides(images: ImageSet, mode: SubsetMode) -> None:
    def draw(seed: int) -> LabeledSubset:
        return choose_labeled(images, 0.1, mode=mode, seed=seed)

    assert draw(5).hash == draw(5).hash
    assert len({draw(seed).hash for seed in range(5)}) == 5


def test_two_copies_in_other_order_give_the_same_hash(image_tree: Path, tmp_path: Path) -> None:
    """Copied backwards, so that the folders list their files in another order."""
    copy = tmp_path / "other" / "train"
    for file in sorted((image_tree / "train").rglob("*.png"), reverse=True):
        target = copy / file.relative_to(image_tree / "train")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    modes: tuple[SubsetMode, ...] = ("random", "balanced")
    for mode in modes:
        one, two = (
            choose_labeled(read_folder(root, "x", "train"), 0.5, mode=mode, seed=2)
            for root in (image_tree / "train", copy)
        )
        assert one.hash == two.hash
        assert one.text == two.text


def test_scandir_order_does_not_matter(image_tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = choose_labeled(read_folder(image_tree / "train", "x", "train"), 0.5, seed=0).hash
    walk = os.walk

    def backwards(top: Path, **options: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        for parent, folders, files in walk(str(top), **options):
            yield parent, folders, files[::-1]

    monkeypatch.setattr(os, "walk", backwards)
    assert choose_labeled(read_folder(image_tree / "train", "x", "train"), 0.5).hash == before


def test_a_list_file_round_trip(images: ImageSet, tmp_path: Path) -> None:
    subset = choose_labeled(images, 0.1, seed=4)
    file = tmp_path / "labels.txt"
    file.write_text(subset.text)
    again = read_list(images, file)
    assert again.hash == subset.hash
    assert again.indices.tolist() == subset.indices.tolist()
    assert (again.mode, again.fraction) == ("list", pytest.approx(0.1))


@pytest.mark.parametrize(
    "form",
    [
        "{file}",
        "{folder}/{file}",
        "train/{folder}/{file}",
        "/somewhere/imagenet/train/{folder}/{file}",
        "{folder}/{file} {label}",
        "{file}  {label}\r",
        "  {file}\n",
    ],
)
def test_published_forms_of_lists_are_read(images: ImageSet, tmp_path: Path, form: str) -> None:
    chosen = [3, 700, 350, 1100]
    lines = []
    for index in chosen:
        folder, file = images.names[index].decode().split("/")
        lines.append(form.format(folder=folder, file=file, label=images.labels[index]))
    path = tmp_path / "1percent.txt"
    path.write_text("\n".join([*lines, lines[0]]) + "\n", newline="")
    assert read_list(images, path).indices.tolist() == sorted(chosen)


def test_archives_have_lists_too(shared_data: Path, tmp_path: Path) -> None:
    cifar = load_images(locate_data(str(shared_data / "cifar10-mini")), "train")
    subset = choose_labeled(cifar, 0.1, mode="balanced", seed=1)
    (tmp_path / "labels.txt").write_text(subset.text)
    assert read_list(cifar, tmp_path / "labels.txt").hash == subset.hash


def line(images: ImageSet, index: int) -> str:
    return images.names[index].decode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("dog.jpg\ncat.jpg\n", r"of its 2 names none among .* of fake \(dog.jpg, cat.jpg\)"),
        ("{a}\n{b}\n{c}\n{d}\nn9/x.JPEG\n", r"of its 5 names 1 not among .*\(n9/x.JPEG\).*another"),
        ("n00000001/n00000000_3.JPEG\n{b}\n", "1 not among"),
        ("{a} 2\n{b} 1\n", r"class number 2 there and 0 here: .*another data set"),
        ("{a}\n{b}\n{c}\n", "has no image of class n00000003: add"),
    ],
)
def test_bad_lists_are_refused(images: ImageSet, tmp_path: Path, text: str, message: str) -> None:
    names = {letter: line(images, 300 * number) for number, letter in enumerate("abcd")}
    path = tmp_path / "list.txt"
    path.write_text(text.format(**names))
    with pytest.raises(UserError, match=message) as caught:
        read_list(images, path)
    assert "\n" not in str(caught.value)


def test_missing_list_and_ambiguous_name(images: ImageSet, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        read_list(images, tmp_path / "none.txt")
    with pytest.raises(UserError, match="is a folder"):
        read_list(images, tmp_path)
    twice = dataclasses.replace(images, names=images.names.copy())
    twice.names[0] = b"n00000000/0.png"
    twice.names[300] = b"n00000001/0.png"
    (tmp_path / "list.txt").write_text("0.png\n")
    with pytest.raises(UserError, match=r"0.png is in 2 class folders: write the class folder"):
        read_list(twice, tmp_path / "list.txt")


def test_fractions_that_miss_a_class_are_refused(images: ImageSet) -> None:
    with pytest.raises(UserError, match=r"is 1, and seed 0 gives no image of .*: raise the"):
        choose_labeled(images, 0.001)
    with pytest.raises(UserError, match=r"is 3, .*: raise the fraction$"):
        choose_labeled(images, 0.003, mode="balanced")
    with pytest.raises(UserError, match=r"is 4, .*raise the fraction, or use --subset balanced$"):
        choose_labeled(images, 0.0034, seed=0)  # four images of four classes miss one, mostly
    for fraction in (0.0, 0.0009, 1.1, -1.0, float("nan")):
        with pytest.raises(UserError, match=r"from 0.001 to 1"):
            choose_labeled(images, fraction)


def test_hold_out_takes_from_every_class_and_keeps_one() -> None:
    labels = np.repeat([0, 1, 2, 3], [10, 2, 1, 40])
    kept, held = hold_out(labels, 0.2, seed=0)
    assert sorted([*kept, *held]) == list(range(53))
    assert np.bincount(labels[held], minlength=4).tolist() == [2, 1, 0, 8]
    assert hold_out(labels, 0.2, seed=0)[1].tolist() == held.tolist()
    assert hold_out(labels, 0.2, seed=1)[1].tolist() != held.tolist()

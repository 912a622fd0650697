"""Class folders of links, made from the official lists of ImageNet and Places205."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from instdisc.cli import say
from instdisc.errors import UserError
from instdisc.images.settings import ArrangeConfig
from instdisc.untrusted.limits import read_limited

GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
SYNSET = re.compile(r"n\d{8}")
Pairs = Iterator[tuple[str, str]]


def _lines(path: Path) -> list[str]:
    try:
        return read_limited(path).decode("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--list {path} cannot be read ({error}): name the official list") from None


def _synsets(path: Path) -> dict[int, str]:
    """The kit's number of each of the thousand classes -> its WordNet name."""
    from instdisc.untrusted.matlab import read_mat  # scipy is not needed for the other lists

    content = read_mat(path, squeeze=True)
    try:
        rows = content["synsets"].reshape(-1)
        found = {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in rows}
    except Exception as error:  # anything may stand in their place
        raise UserError(f"{path} is not that of the kit ({error}): unpack it again") from None
    return found


def read_imagenet(path: Path) -> Pairs:
    """(image, class) of ImageNet's validation images: of the kit's folder, or of Kaggle's list."""
    if not path.is_dir():
        for number, line in enumerate(_lines(path)[1:], start=2):  # the first names the columns
            name, _, boxes = line.partition(",")
            if name:
                synset = boxes.strip().partition(" ")[0]
                if not SYNSET.fullmatch(synset):
                    raise UserError(
                        f"--list {path}, line {number}: no class: name the official list"
                    )
                yield f"{name}.JPEG", synset
        return
    folder = path / "data" if (path / "data").is_dir() else path
    synsets = _synsets(folder / "meta.mat")
    for number, line in enumerate(filter(None, _lines(folder / GROUND_TRUTH)), start=1):
        synset = synsets.get(int(line) if line.strip().isdigit() else -1, "")
        if not SYNSET.fullmatch(synset):
            raise UserError(f"{folder / GROUND_TRUTH}, line {number}: no class: unpack it again")
        yield f"ILSVRC2012_val_{number:08d}.JPEG", synset


def read_places(path: Path) -> Pairs:
    """(image, class) of a list of Places205: `a/abbey/NAME.jpg 0`, the class from the folders."""
    numbers: dict[str, str] = {}
    for number, line in enumerate(map(str.strip, _lines(path)), start=1):
        if not line:
            continue
        name, _, label = line.replace(",", " ").rpartition(" ")
        folder = name.strip().rpartition("/")[0]
        if not label.isdigit() or not folder or numbers.setdefault(folder, label) != label:
            raise UserError(
                f"--list {path}, line {number}: expected FOLDER/NAME.jpg and the number of its "
                "class: name the official list"
            )
        yield name.strip(), folder.replace("/", "-")


def arrange(config: ArrangeConfig) -> None:
    """Makes the folders and links; all images must be there, and nothing else in their places."""
    assert config.images is not None
    assert config.list is not None
    assert config.output is not None
    read = read_imagenet if config.layout == "imagenet-val" else read_places
    links: dict[Path, Path] = {}
    missing = []
    for name, folder in read(config.list):
        if name.startswith("/") or ".." in name.split("/"):
            raise UserError(f"--list {config.list} names {name}: name the official list")
        image = config.images / name
        if not image.is_file():
            missing.append(name)
        links[config.output / folder / name.rpartition("/")[2]] = image
    if not links:
        raise UserError(f"--list {config.list} is empty: name the official list")
    if missing:
        raise UserError(
            f"{len(missing):,} of the {len(links):,} images are not in {config.images} (such as "
            f"{missing[0]}): unpack all of them, or name another folder"
        )
    made = 0
    for link, image in links.items():
        # Relative, so that the data set can be moved as a whole.
        target = os.path.relpath(image.resolve(), link.parent.resolve())
        if link.is_symlink() and os.readlink(link) == target:  # noqa: PTH115 (as it is written)
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            link.symlink_to(target)
        except FileExistsError:
            raise UserError(f"{link} exists and is another file: choose another --output") from None
        made += 1
    classes = len({link.parent for link in links})
    say(f"{config.output}: {len(links):,} images in {classes:,} class folders, {made:,} links made")

"""A location that was named and is missing is an error, never a silent fall-back."""

from pathlib import Path

import pytest

from instdisc.errors import UserError
from instdisc.images.locations import locate_data


def test_nothing_named_is_the_demo_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("INSTDISC_DATA", raising=False)
    assert locate_data(None).is_demo
    assert locate_data("demo").is_demo


def test_flag_and_environment_must_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INSTDISC_DATA", str(tmp_path / "missing"))
    with pytest.raises(UserError, match=r"INSTDISC_DATA .*missing does not exist"):
        locate_data(None)
    with pytest.raises(UserError, match=r"--data .*other does not exist"):
        locate_data(str(tmp_path / "other"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not a folder"):
        locate_data(str(tmp_path / "file"))
    assert locate_data(str(tmp_path)).kind == "folder"


@pytest.mark.parametrize(
    ("inside", "kind"),
    [
        ("cifar-10-batches-bin/data_batch_1.bin", "cifar10"),
        ("cifar-10-batches-py/data_batch_1", "cifar10"),
        ("cifar-100-python/train", "cifar100"),
        ("cifar-100-binary/train.bin", "cifar100"),
        ("FashionMNIST/raw/train-images-idx3-ubyte.gz", "fashion-mnist"),
        ("train/cat/1.jpg", "folder"),
    ],
)
def test_official_files_are_known_by_their_names(tmp_path: Path, inside: str, kind: str) -> None:
    file = tmp_path / inside
    file.parent.mkdir(parents=True)
    file.touch()
    assert locate_data(str(tmp_path)).kind == kind
    if kind != "folder":
        assert locate_data(str(file.parent)).kind == kind

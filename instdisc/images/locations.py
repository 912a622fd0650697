"""Which data set a path holds. Imports no torch, so that arguments can be checked anywhere."""

import dataclasses
import os
from pathlib import Path
from typing import Literal

from instdisc.errors import UserError
from instdisc.names import DATA_VARIABLE

Kind = Literal["folder", "list", "tar", "cifar10", "cifar100", "fashion-mnist", "demo"]
IN_FILES = ("folder", "list", "tar")  # kinds of which every image is a file
LIST_ENDINGS = (".txt", ".csv")

# The official archives, as they unpack: a file that only this data set has.
OFFICIAL_FILES: tuple[tuple[Kind, str], ...] = (
    ("cifar10", "data_batch_1.bin"),
    ("cifar10", "data_batch_1"),
    ("cifar100", "train.bin"),
    ("cifar100", "train"),
    ("fashion-mnist", "train-images-idx3-ubyte"),
    ("fashion-mnist", "train-images-idx3-ubyte.gz"),
)
# Folders that the archives and torchvision's downloaders put around those files.
OFFICIAL_FOLDERS = (
    "cifar-10-batches-bin",
    "cifar-10-batches-py",
    "cifar-100-binary",
    "cifar-100-python",
    "FashionMNIST/raw",
)


@dataclasses.dataclass(frozen=True)
class DataLocation:
    """A data set on disk: what it is and where. The demo set has no place until it is made."""

    kind: Kind
    root: Path | None

    @property
    def is_demo(self) -> bool:
        """Whether results on it are demo results."""
        return self.kind == "demo"


def _official_kind(folder: Path) -> Kind | None:
    for kind, name in OFFICIAL_FILES:
        if (folder / name).is_file():
            return kind
    return None


def locate_data(
    named: str | None, *, flag: str = "--data", env: str = DATA_VARIABLE
) -> DataLocation:
    """Finds the data set that a flag or the environment names; the demo set if neither does.

    Args:
        named: the flag's value; `demo` asks for the demo set.
        flag: how the flag is spelt, for messages.
        env: the environment variable that counts when the flag is not given.

    Raises:
        UserError: a location was named and is not there; never a silent fall-back.
    """
    source = flag
    if named is None:
        named, source = os.environ.get(env), env
    if not named:
        return DataLocation("demo", None)
    if named == "demo":
        return DataLocation("demo", None)
    root = Path(named).expanduser()
    if not root.is_dir():
        if root.is_file() and root.suffix.lower() in (*LIST_ENDINGS, ".tar"):
            return DataLocation("tar" if root.suffix.lower() == ".tar" else "list", root)
        what = "is not a folder" if root.exists() else "does not exist"
        raise UserError(
            f"{source} {root} {what}: name the folder that holds the images, a list of them "
            "(.txt, .csv) or a .tar archive"
        )
    for folder in (root, *(root / name for name in OFFICIAL_FOLDERS)):
        kind = _official_kind(folder)
        if kind is not None:
            return DataLocation(kind, folder)
    return DataLocation("folder", root)

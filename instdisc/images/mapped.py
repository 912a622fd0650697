"""Long arrays in one file, which all processes of a machine map: it is in their memory once.

    runs/listings/<key>.lists    arrays as in .npy files, one behind the other

Files are never changed, since others may have mapped them. Any may be deleted while no run is at
work.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from instdisc.errors import UserError
from instdisc.runs.folders import atomic_file

ALIGNED = 64  # bytes; where each array begins


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays of numbers or bytes; the file appears whole or not at all."""
    with atomic_file(path) as file:
        for array in arrays.values():
            np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
            file.write(bytes(-file.tell() % ALIGNED))


def map_arrays(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The arrays of a file by the names of those that were written, in the same order.

    Raises:
        OSError: there is no such file.
        ValueError: it does not hold so many arrays.
    """
    found = {}
    with path.open("rb") as file:
        for name in names:
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError(f"{path} holds another kind of arrays")
            shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            offset = file.tell()
            # Copy-on-write, so that torch accepts it; nothing writes to it.
            found[name] = np.asarray(np.memmap(path, dtype, "c", offset, shape))
            end = offset + found[name].nbytes
            file.seek(end + -end % ALIGNED)
    return found


def map_shared(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """What another process has written for this one; see `map_arrays`.

    Raises:
        UserError: this process does not see the file.
    """
    try:
        return map_arrays(path, names)
    except (OSError, ValueError):
        raise UserError(
            f"{path}, where the first process has put the list of images, cannot be read here: let "
            "INSTDISC_RUNS name a folder on a disk that all processes share"
        ) from None

"""Images inside tar archives: found once by their place, read from there, never unpacked."""

import os
import struct
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from instdisc.errors import UserError
from instdisc.images.listing import (
    EXTENSIONS,
    MAX_NAME,
    Listing,
    State,
    build_listing,
    find_state,
)

MAX_BYTES = 2**30  # of an image; Pillow's largest takes less
MAX_MEMBERS = 10**8  # of one archive
BLOCK = 512
# What tarfile raises for bytes that are no archive.
TAR_ERRORS = (
    *(tarfile.TarError, OSError, EOFError, ValueError, OverflowError, struct.error),
    *(LookupError, TypeError, RecursionError),
)


def _check_name(name: bytes) -> bytes:
    """The name as a folder would have it; ValueError for one that leads out of a folder."""
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if name.startswith(b"/") or b".." in parts or b"\0" in name or len(name) > MAX_NAME:
        raise ValueError(f"{os.fsdecode(name[:80])!r} is no name of a file inside it")
    return b"/".join(parts)


def _members(path: Path, length: int) -> Iterator[tuple[bytes, tarfile.TarInfo]]:
    """Names and headers of the files and folders of an archive; ValueError for anything else."""
    if not path.is_file():
        raise ValueError("a pipe or a device")  # opening it could wait forever
    with (
        path.open("rb") as file,
        tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as tar,
    ):
        count = 0
        while (member := tar.next()) is not None:
            vars(tar)["members"].clear()  # it would keep them all
            name, count = _check_name(os.fsencode(member.name)), count + 1
            if not (member.isdir() or (member.isreg() and not member.issparse())):
                raise ValueError(f"{member.name!r} is a link, a device or the like")
            if member.size < 0 or member.offset_data + member.size > length:
                raise ValueError(f"{member.name!r} is longer than the archive")
            if count > MAX_MEMBERS:
                raise ValueError(f"more than {MAX_MEMBERS:,} members")
            yield name, member
        # tarfile takes a damaged header for the end, which is a block of zeros.
        file.seek(tar.offset)
        if file.read(BLOCK) != bytes(BLOCK):
            raise ValueError(f"damaged or cut off at byte {tar.offset}")


def list_shards(paths: Sequence[Path]) -> Listing:
    """The images of archives, as if all had been unpacked into one folder.

    Files without an image's ending (the labels and texts of other tools) are left out.

    Raises:
        UserError: an archive is damaged, holds links, devices, names that lead out of a folder or
            something absurdly large, or a name occurs twice.
    """
    rows: list[tuple[bytes, int, tuple[int, int]]] = []
    folders: set[bytes] = set()
    owner: dict[bytes, Path] = {}
    watched: dict[bytes, State] = {}
    for number, path in enumerate(paths):
        state = find_state(path)
        watched[os.fsencode(path.absolute())] = state
        try:
            for name, member in _members(path, state[2]):
                top, slash, _ = name.partition(b"/")
                if (slash or member.isdir()) and top and not top.startswith(b"."):
                    folders.add(top)
                last = name.rpartition(b"/")[2]
                if member.isdir() or name.startswith(b".") or last.startswith(b"."):
                    continue
                if not last.lower().endswith(EXTENSIONS):
                    continue
                if member.size > MAX_BYTES:
                    raise ValueError(f"{member.name!r} has {member.size:,} bytes")
                if name in owner:
                    raise UserError(
                        f"{os.fsdecode(name)} is in {owner[name]} and again in {path}: a bank row "
                        "is an image, so rename or remove one"
                    )
                owner[name] = path
                rows.append((name, member.size, (number, member.offset_data)))
        except UserError:
            raise
        except TAR_ERRORS as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise UserError(
                f"{path} is not taken ({reason}): make it anew, uncompressed, of plain files, as "
                "`tar -C FOLDER -cf NAME.tar .` does"
            ) from None
    if not rows:
        raise UserError(f"{paths[0]} holds no images: expected files such as NAME.jpg in it")
    return build_listing(rows, folders, watched, shards=list(watched))

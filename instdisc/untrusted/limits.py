"""Text of unknown origin, read within bounds of size and depth."""

import io
import os
from pathlib import Path

import yaml

from instdisc.errors import UserError

LARGEST_TEXT = 1 << 30  # bytes; a list of all 14 million ImageNet images has half of that
LARGEST_CONFIG = 1 << 16  # Detectron2's, written out in full, has a sixth of that
DEEPEST = 32  # of a config or an annotation


def read_up_to(file: io.BufferedIOBase, limit: int) -> bytes:
    """The first bytes of a stream; unlike `file.read(limit)` it allocates no more than it reads."""
    data = bytearray()
    while len(data) < limit and (part := file.read(min(1 << 20, limit - len(data)))):
        data += part
    return bytes(data)


def read_limited(path: Path, limit: int = LARGEST_TEXT) -> bytes:
    """All bytes of a file of unknown origin; refuses one that is absurdly long.

    Raises:
        UserError: it has more than `limit` bytes.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size <= limit:  # 0 for pipes and devices
            data = read_up_to(file, limit + 1)
            if len(data) <= limit:
                return data
    raise UserError(f"{path} has more than {limit:,} bytes: is it the file that you mean?")


def check_yaml(text: str) -> None:
    """Refuses YAML whose content is far larger than the file, or nested without end.

    Raises:
        ValueError: it uses aliases, or is nested deeply.
        yaml.YAMLError: it is not YAML.
    """
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"nested more than {DEEPEST} deep")
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"has an alias, *{event.anchor}: write out what it stands for")

"""Makes the installed Detectron2 wheel say what was verified of it, so that `pip check` is right.

The wheel is tagged for CPython 3.10 and declares numpy<2. Its Python code runs on 3.11 to 3.14
and with numpy 2, which tests/transfer/detection/test_numpy.py shows by training and evaluating a
detector. Its compiled module loads on none of these Pythons; what uses it (deformable and rotated
operators) is used by no detector here.

Run by .ci/setup with the environment's own Python. A second call changes nothing, and any other
build of Detectron2 is left as it is.
"""

import base64
import hashlib
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

NAME, VERSION = "sal-detectron2", "0.7.2"
# file in .dist-info: lines as they come -> lines as verified
AMENDED = {
    "METADATA": {"Requires-Dist: numpy<2": "Requires-Dist: numpy<3"},
    "WHEEL": {
        "Root-Is-Purelib: false": "Root-Is-Purelib: true",
        "Tag: cp310-cp310-linux_x86_64": "Tag: py3-none-any",
    },
}


def amend(found: Distribution) -> bool:
    """Rewrites the metadata of an installed wheel and removes its compiled modules.

    Returns:
        Whether anything was changed.
    """
    changed: dict[str, bytes | None] = {}
    for entry in found.files or []:
        path = Path(str(found.locate_file(entry)))
        if entry.suffix == ".so":
            changed[str(entry)] = None
            path.unlink(missing_ok=True)
        elif entry.parent.name.endswith(".dist-info") and entry.name in AMENDED:
            text = path.read_text("utf-8")
            lines = [AMENDED[entry.name].get(line, line) for line in text.splitlines()]
            if (amended := "\n".join(lines) + "\n") != text:
                path.write_text(amended, "utf-8")
                changed[str(entry)] = amended.encode()
    if changed:
        record = next(each for each in found.files or [] if each.name == "RECORD")
        path = Path(str(found.locate_file(record)))
        kept = [_entry(line, changed) for line in path.read_text("utf-8").splitlines()]
        path.write_text("".join(f"{line}\n" for line in kept if line), "utf-8")
    return bool(changed)


def _entry(line: str, changed: dict[str, bytes | None]) -> str | None:
    """A line of RECORD (`name,hash,size`); None if its file was removed."""
    name = line.rsplit(",", 2)[0]
    if name not in changed:
        return line
    if (content := changed[name]) is None:
        return None
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(content)}"


if __name__ == "__main__":
    try:
        installed = distribution(NAME)
    except PackageNotFoundError:
        sys.exit(0)
    if installed.version == VERSION:
        amend(installed)

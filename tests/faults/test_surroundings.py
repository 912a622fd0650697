"""Commands where little is as on a developer's machine.

No input, a locale that is not UTF-8, spaces and letters beyond ASCII in every path, a user who may
write nowhere but in the working folder, a home that is read-only.
"""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from instdisc.cli import PACKAGES
from instdisc.images.locations import locate_data
from instdisc.images.sets import load_images
from instdisc.runs.checkpoint import load_checkpoint
from instdisc.runs.results import read_results

ASCII = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
NOBODY = "65534"
# A view of the files in which every part of the path to the interpreter can be entered: an empty
# file system lies over the first folder that cannot, and what the command needs is bound into it.
# Arguments: that folder, how many needed ones follow, those, the command.
OPENED = """
set -e
closed=$1 count=$2; shift 2
stage=$(mktemp -d)
mount -t tmpfs -o mode=755 tmpfs "$stage"
while [ "$count" -gt 0 ]; do
    mkdir -p "$stage${1#"$closed"}"
    mount --rbind "$1" "$stage${1#"$closed"}"
    count=$((count - 1)); shift
done
mount --rbind "$stage" "$closed"
umount --lazy "$stage"
rmdir "$stage"
exec "$@"
"""


def closed_ancestor(path: Path) -> Path | None:
    """The first folder on the way to `path` that another user cannot enter."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None


def as_nobody(repo: Path) -> list[str]:
    """What to put before a command so that an unprivileged user runs it; skips where it cannot be.

    Root is asked to: anybody else is unprivileged already.
    """
    if os.geteuid():
        return []
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
    needed = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), repo}
    behind = {path: closed for path in needed if (closed := closed_ancestor(path))}
    if behind:
        closed = min(behind.values())
        inside = [str(path) for path in behind]
        opened = ["sh", "-c", OPENED, "sh", str(closed), str(len(inside)), *inside]
        prefix = ["unshare", "--mount", *opened, *prefix]
    try:
        probe = subprocess.run(
            [*prefix, sys.executable, "-c", "import torch, os; assert os.geteuid()"],
            capture_output=True,
            text=True,
            cwd="/",
            check=False,
        )
    except FileNotFoundError as error:
        pytest.skip(f"no {error.filename} on this machine")
    if probe.returncode:
        pytest.skip(f"no unprivileged user can run {sys.executable}: {probe.stderr.strip()[-200:]}")
    return prefix


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with an odd name that everybody can reach; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(prefix="ein Ordner für ‘x’ $HOME ") as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.mark.parametrize(
    ("given", "shown"),
    [(ASCII, "mean ± std"), ({"PYTHONIOENCODING": "ascii"}, r"mean \xb1 std")],
)
def test_letters_that_the_locale_does_not_have_are_no_error(
    repo: Path, given: dict[str, str], shown: str
) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, str(repo / "transfer/report.py"), "-h"],
        capture_output=True,
        env={**os.environ, **given},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert shown in done.stdout.decode()


@pytest.mark.slow
def test_a_stranger_with_an_odd_locale_a_closed_input_and_no_home(
    repo: Path, place: Path, image_tree: Path
) -> None:
    prefix = as_nobody(repo)
    checkout, home, images = place / "Prüfstand 1", place / "heim", place / "bilder ä"
    for package in PACKAGES:
        shutil.copytree(repo / package, checkout / package)
    shutil.copytree(image_tree, images)
    images.chmod(0o755)
    for split in ("train", "val"):
        (images / split / "class0").rename(images / split / "großer Bär")
    work = place / "arbeit ß"
    work.mkdir()
    work.chmod(0o777)
    home.mkdir(mode=0o555)
    kept = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS") if name in os.environ}
    places = {"HOME": home, "PYTHONPATH": checkout, "INSTDISC_DATA": images}
    env = {**kept, **ASCII, **{name: str(path) for name, path in places.items()}}

    def run(*command: str) -> str:
        script, *argv = command
        done = subprocess.run(
            ["sh", "-c", 'exec "$@" <&-', "sh", *prefix, sys.executable, checkout / script, *argv],
            cwd=work,
            env=env,
            capture_output=True,
            check=False,
            timeout=600,
        )
        said = (done.stdout + done.stderr).decode()
        assert done.returncode == 0, said
        assert "Traceback" not in said
        assert "Error" not in said
        return said

    run(
        "pretrain/run.py", "--arch=resnet18", "--image-size=16", "--batch-size=8", "--epochs=1",
        "--num-negatives=5", "--workers=1", "--monitor-every=0", "--no-tensorboard",
    )  # fmt: skip
    folder = work / "runs" / "pretrain" / "resnet18"
    assert folder.stat().st_mode & 0o777 == 0o700
    if prefix:
        assert folder.stat().st_uid == int(NOBODY)
    state = load_checkpoint(folder / "last.pt", "train")
    assert state["data_fingerprint"] == load_images(locate_data(str(images)), "train").fingerprint
    run("transfer/knn.py", "--num-neighbors", "3", "--workers=0")
    rows = read_results(work / "runs" / "results.jsonl")
    assert any("großer Bär" in row.details["per_class"] for row in rows)
    run("transfer/report.py", "--no-figures")
    page = (work / "runs" / "report" / "report.html").read_text("utf-8")
    assert "bilder ä" in page
    assert not list(home.iterdir())

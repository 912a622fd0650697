"""MATLAB files: what is read, and files that ask for far more than they hold."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from instdisc.errors import UserError
from instdisc.untrusted.matlab import read_mat


def test_variables_come_as_scipy_reads_them(tmp_path: Path) -> None:
    boxes = np.random.default_rng(0).random((1000, 4))
    scipy.io.savemat(tmp_path / "x.mat", {"boxes": boxes, "one": 3.0}, do_compression=True)
    found = read_mat(tmp_path / "x.mat")
    assert (found["boxes"] == boxes).all()
    assert found["one"].shape == (1, 1)
    assert read_mat(tmp_path / "x.mat", squeeze=True)["one"] == 3.0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is bounded on Linux only")
def test_a_small_file_gets_no_gigabytes(tmp_path: Path) -> None:
    rows = np.zeros((3, 1), dtype=[("a", object), ("b", object)])
    rows[:] = [[(1.0, "x")]] * 3
    scipy.io.savemat(tmp_path / "x.mat", {"rows": rows})
    content = (tmp_path / "x.mat").read_bytes()
    true, false = (np.array([rows, 1], "<i4").tobytes() for rows in (3, 1 << 26))
    assert content.count(true) == 1
    (tmp_path / "x.mat").write_bytes(content.replace(true, false))
    # A process of its own: one that has trained keeps gigabytes, which it need not ask for again.
    call = "import sys; from instdisc.untrusted.matlab import *; read_mat(Path(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", call, str(tmp_path / "x.mat")], capture_output=True, text=True
    )
    assert "UserError" in done.stderr
    assert "not a MATLAB file: Unable to allocate 1.00 GiB" in done.stderr


@pytest.mark.parametrize("content", [None, b"", b"junk" * 100])
def test_no_matlab_file(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.mat").write_bytes(content)
    with pytest.raises(UserError, match=r"x\.mat"):
        read_mat(tmp_path / "x.mat")

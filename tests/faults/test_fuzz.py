"""A short pass of tests/faults/fuzz.py; `make fuzz` is the long one."""

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).with_name("fuzz.py")
KINDS = ("images", "checkpoints", "configs", "yaml", "xml", "mat", "proposals", "results")


@pytest.mark.slow
def test_damaged_files_end_in_success_or_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, str(FUZZ), "--count", "100", "--seed", "1"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(KINDS)
    assert all("100 mutations" in line and " 0 other ends" in line for line in lines)
    with capsys.disabled():
        sys.stdout.write("\n" + done.stdout)

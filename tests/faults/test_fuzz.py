"""A tenth of `make fuzz`, with another seed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).with_name("fuzz.py")


@pytest.mark.slow
def test_damaged_files_end_in_success_or_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, str(FUZZ), "--count", "2000", "--seed", "1"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    all_kinds = json.loads(done.stdout.splitlines()[-1])
    assert all_kinds["accepted"] + all_kinds["refused"] == all_kinds["mutations"] >= 2000
    with capsys.disabled():
        sys.stdout.write("\n" + done.stdout)

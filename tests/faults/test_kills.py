"""SIGKILL at random moments of every command; tests/faults/killer.py does it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KILLER = Path(__file__).with_name("killer.py")
# At least a hundred in all.
KILLS = {
    "pretrain": 22, "semisup": 18, "linear": 18, "features": 16, "proposals": 12, "detect": 6,
    "report": 14,
}  # fmt: skip


def test_there_are_a_hundred() -> None:
    assert sum(KILLS.values()) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("task", KILLS)
def test_killed_at_random_moments_it_comes_to_the_result_of_an_undisturbed_run(
    task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, str(KILLER), task, "--kills", str(KILLS[task])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == KILLS[task]
    assert found["whole_runs"] >= 1
    with capsys.disabled():
        sys.stdout.write(f"\n{found}\n")

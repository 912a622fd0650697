"""SIGKILL at random moments of every command; tests/faults/killer.py does it.

A tenth of `make kills`.
"""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

KILLER = Path(__file__).with_name("killer.py")
WORKLOADS = runpy.run_path(str(KILLER.with_name("workloads.py")))["TASKS"]


def test_there_are_a_hundred() -> None:
    assert sum(each.kills for each in WORKLOADS.values()) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("task", WORKLOADS)
def test_killed_at_random_moments_it_comes_to_the_result_of_an_undisturbed_run(
    task: str, capsys: pytest.CaptureFixture[str]
) -> None:
    kills = WORKLOADS[task].kills
    command = [sys.executable, str(KILLER), task, "--kills", str(kills)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-2])
    assert found["kills"] == kills
    assert found["whole_runs"] >= 1
    with capsys.disabled():
        sys.stdout.write(f"\n{found}\n")

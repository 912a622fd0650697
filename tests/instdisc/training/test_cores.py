"""Cores: those that the process may run on, shared with the processes of its node."""

import os
import subprocess
import sys

import pytest

from instdisc.training.cores import num_cores

SLURM = {"SLURM_CPUS_PER_TASK": "8", "SLURM_NTASKS": "16", "WORLD_SIZE": "16"}


@pytest.mark.parametrize(
    ("allowed", "environ", "count"),
    [
        (64, {}, 64),
        (64, {"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "8"}, 8),
        (2, {"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "8"}, 1),
        # Slurm's task: bound to its cores, or free to use those of all tasks.
        (8, {**SLURM, "LOCAL_WORLD_SIZE": "8"}, 8),
        (64, {**SLURM, "LOCAL_WORLD_SIZE": "8"}, 8),
        (64, {"SLURM_CPUS_PER_TASK": "16"}, 16),
        # torchrun with 8 processes inside one task of Slurm.
        (64, {"SLURM_CPUS_PER_TASK": "64", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}, 8),
    ],
)
def test_share_of_a_process(
    monkeypatch: pytest.MonkeyPatch, allowed: int, environ: dict[str, str], count: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(allowed)), raising=False)
    assert num_cores(environ) == count


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_a_process_bound_to_one_core_has_one() -> None:
    code = (
        "import os\nos.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "from instdisc.training.cores import num_cores\nprint(num_cores({}))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "1\n"

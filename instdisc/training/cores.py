"""How many cores this process may use. Imports no torch."""

import os
from collections.abc import Mapping


def num_cores(environ: Mapping[str, str] = os.environ) -> int:
    """The cores that this process is allowed to run on, shared with the others of its node.

    Slurm may bind each of its tasks to cores of its own. Where it says how many a task has, that is
    the share; otherwise the allowed cores are divided by the processes on the node.
    """
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:  # macOS
        allowed = os.cpu_count() or 1
    of_task = environ.get("SLURM_CPUS_PER_TASK")
    if of_task and environ.get("SLURM_NTASKS", "1") == environ.get("WORLD_SIZE", "1"):
        return min(allowed, int(of_task))
    return max(1, allowed // int(environ.get("LOCAL_WORLD_SIZE", "1")))

"""python slurm/status.py: what runs, waits, failed and finished, with each run's own progress."""

import sys

from instdisc.cli import command
from slurm.progress import StatusConfig

main = command(StatusConfig, "slurm.progress:run_status")

if __name__ == "__main__":
    sys.exit(main())

"""python slurm/submit.py TASK ARGS...: any command of the project as a job, or a whole study."""

import sys

from instdisc.cli import command
from slurm.submission import SubmitConfig

main = command(SubmitConfig, "slurm.submission:run_submit")

if __name__ == "__main__":
    sys.exit(main())

"""Every command as a Slurm job; the only place that imports submitit."""

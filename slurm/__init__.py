"""Every command as a Slurm job."""

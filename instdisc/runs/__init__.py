"""Run folders: what a run writes, locks, checkpoints, logs and results."""

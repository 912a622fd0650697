"""Learning-rate schedules: pure functions of the epoch."""

from collections.abc import Sequence


def step_decay(
    base: float, epoch: float, milestones: Sequence[float], factor: float = 0.1
) -> float:
    """`base`, multiplied by `factor` at every milestone that has been reached."""
    return base * factor ** sum(epoch >= milestone for milestone in milestones)

"""Learning-rate schedules: pure functions of the epoch."""

from collections.abc import Sequence


def step_decay(
    base: float,
    epoch: float,
    milestones: Sequence[float],
    *,
    factor: float = 0.1,
    warmup_epochs: float = 0.0,
) -> float:
    """`base`, multiplied by `factor` at every milestone reached; linear from zero in the warm-up.

    Args:
        base: the rate after the warm-up.
        epoch: passes over the data so far, with fraction.
        milestones: epochs at which the rate falls.
        factor: by how much.
        warmup_epochs: length of the warm-up.
    """
    rate = base * factor ** sum(epoch >= milestone for milestone in milestones)
    return rate * min(1.0, epoch / warmup_epochs) if warmup_epochs else rate

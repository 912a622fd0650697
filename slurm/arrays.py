"""How a graph of jobs becomes job arrays: few submissions, and no element waits for a stranger."""

import dataclasses
from collections.abc import Mapping, Sequence

from slurm.jobs import Job
from slurm.resources import Resources

Place = tuple[int, int]  # number of the array in the plan, number of the element in it


@dataclasses.dataclass(frozen=True)
class Array:
    """Jobs that are submitted at once.

    Attributes:
        jobs: its elements.
        resources: what each of them asks for.
        corresponding: numbers of earlier arrays; element i waits for their element i.
        complete: numbers of earlier arrays, or places in them, that every element waits for.
        queued: job ids of earlier submissions that every element waits for.
    """

    jobs: tuple[Job, ...]
    resources: Resources
    corresponding: tuple[int, ...] = ()
    complete: tuple[Place, ...] = ()
    queued: tuple[str, ...] = ()

    def dependency(self, ids: Sequence[str], sizes: Sequence[int]) -> str | None:
        """As sbatch wants it, where `ids` are the numbers that earlier arrays were given."""
        words = [f"aftercorr:{ids[number]}" for number in self.corresponding]
        for number in sorted({number for number, _ in self.complete}):
            elements = [element for place, element in self.complete if place == number]
            whole = len(elements) == sizes[number]
            names = [ids[number]] if whole else [f"{ids[number]}_{each}" for each in elements]
            words += [f"afterok:{name}" for name in names]
        words += [f"afterok:{job_id}" for job_id in self.queued]
        return ",".join(words) or None


def plan_arrays(
    jobs: Sequence[Job],
    resources: Mapping[str, Resources],
    *,
    max_size: int,
    queued: Mapping[str, str] | None = None,
) -> list[Array]:
    """Groups jobs into arrays of at most `max_size`, in an order in which they can be submitted.

    Args:
        jobs: what is left to do, parents before children.
        resources: by task.
        max_size: the site's limit.
        queued: job ids, by name, of jobs that are in the queue already.
    """
    queued = queued or {}
    places: dict[str, Place] = {}
    plan: list[Array] = []
    level: dict[str, int] = {}
    names = {job.name for job in jobs}
    for job in jobs:
        assert all(name in level for name in job.after if name in names), "parents come first"
        level[job.name] = 1 + max((level[name] for name in job.after if name in level), default=-1)
    kinds = sorted({(level[job.name], job.task) for job in jobs})
    for kind in kinds:
        members = [job for job in jobs if (level[job.name], job.task) == kind]
        groups: dict[tuple[tuple[str, ...], tuple[int, ...]], list[Job]] = {}
        for job in members:
            ids = tuple(queued[name] for name in job.after if name in queued)
            arrays = tuple(sorted({places[name][0] for name in job.after if name in places}))
            groups.setdefault((ids, arrays), []).append(job)
        for (ids, arrays), group in groups.items():
            for part in _split(group, arrays, places, plan, max_size):
                array = _depend(part, arrays, places, plan, resources[kind[1]], ids)
                places |= {job.name: (len(plan), number) for number, job in enumerate(part)}
                plan.append(array)
    return plan


def _parents(job: Job, places: Mapping[str, Place]) -> tuple[Place, ...]:
    return tuple(places[name] for name in job.after if name in places)


def _corresponds(
    group: Sequence[Job],
    arrays: Sequence[int],
    places: Mapping[str, Place],
    plan: Sequence[Array],
) -> bool:
    """Whether element i of the group has element i of each array as its only parent there."""
    same_size = all(len(plan[number].jobs) == len(group) > 1 for number in arrays)
    return (
        bool(arrays)
        and same_size
        and all(
            _parents(job, places) and set(_parents(job, places)) == {(n, i) for n in arrays}
            for i, job in enumerate(group)
        )
    )


def _split(
    group: list[Job],
    arrays: Sequence[int],
    places: Mapping[str, Place],
    plan: Sequence[Array],
    max_size: int,
) -> list[list[Job]]:
    """Parts of a group that can be one array each."""
    if not arrays:
        parts = [group]
    elif _corresponds(group, arrays, places, plan):
        return [group]  # as large as its parents, which fit
    else:
        by_parents: dict[frozenset[Place], list[Job]] = {}
        for job in group:
            by_parents.setdefault(frozenset(_parents(job, places)), []).append(job)
        parts = list(by_parents.values())
    return [p[first : first + max_size] for p in parts for first in range(0, len(p), max_size)]


def _depend(
    part: list[Job],
    arrays: Sequence[int],
    places: Mapping[str, Place],
    plan: Sequence[Array],
    resources: Resources,
    ids: tuple[str, ...],
) -> Array:
    if _corresponds(part, arrays, places, plan):
        return Array(tuple(part), resources, corresponding=tuple(arrays), queued=ids)
    parents = tuple(sorted(set(_parents(part[0], places))))
    return Array(tuple(part), resources, complete=parents, queued=ids)

"""Every wait of the graph is in the arrays' dependencies, and nothing waits without a reason."""

import dataclasses
import random
from collections.abc import Sequence

import pytest

from slurm.cluster import Array, plan_arrays
from slurm.jobs import Job
from slurm.resources import Resources

RESOURCES = {task: Resources() for task in ("pretrain", "export", "knn", "detect", "report")}


def job(name: str, task: str, *after: str) -> Job:
    return Job(name=name, task=task, argv=(), run="", after=after)


def waits(plan: Sequence[Array]) -> dict[str, set[str]]:
    """By job, the names of those that Slurm would hold it for."""
    found = {}
    for array in plan:
        for number, each in enumerate(array.jobs):
            parents = {plan[other].jobs[number].name for other in array.corresponding}
            parents |= {plan[other].jobs[element].name for other, element in array.complete}
            found[each.name] = parents
    return found


def random_graph(seed: int) -> list[Job]:
    """Runs, readouts of some of them, and a report, in an order that respects the waits."""
    rng = random.Random(seed)
    runs = [job(f"run{i}", "pretrain") for i in range(rng.randint(1, 9))]
    jobs = list(runs)
    for each in runs:
        if rng.random() < 0.8:
            jobs += [job(f"{each.name}-knn{k}", "knn", each.name) for k in range(rng.randint(0, 2))]
        if rng.random() < 0.7:
            jobs.append(job(f"{each.name}-export", "export", each.name))
            jobs.append(job(f"{each.name}-detect", "detect", each.name, f"{each.name}-export"))
    jobs.append(job("report", "report", *(each.name for each in jobs)))
    order = {"pretrain": 0, "knn": 1, "export": 1, "detect": 2, "report": 3}
    return sorted(jobs, key=lambda each: order[each.task])


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("max_size", [1, 2, 3, 1000])
def test_the_plan_is_the_graph(seed: int, max_size: int) -> None:
    jobs = random_graph(seed)
    plan = plan_arrays(jobs, RESOURCES, max_size=max_size)
    assert sorted(each.name for array in plan for each in array.jobs) == sorted(
        each.name for each in jobs
    )
    assert max(len(array.jobs) for array in plan) <= max_size
    assert waits(plan) == {each.name: set(each.after) for each in jobs}
    for number, array in enumerate(plan):
        earlier = {*array.corresponding, *(place for place, _ in array.complete)}
        assert all(other < number for other in earlier)
        assert len({each.task for each in array.jobs}) == 1


def test_readouts_wait_for_their_own_run_only() -> None:
    runs = [job(f"run{i}", "pretrain") for i in range(3)]
    reads = [job(f"knn{i}", "knn", f"run{i}") for i in range(3)]
    plan = plan_arrays([*runs, *reads], RESOURCES, max_size=10)
    assert [len(array.jobs) for array in plan] == [3, 3]
    assert plan[1].dependency(["70"], [3, 3]) == "aftercorr:70"


def test_what_waits_for_all_names_whole_arrays() -> None:
    runs = [job(f"run{i}", "pretrain") for i in range(3)]
    plan = plan_arrays(
        [*runs, job("report", "report", "run0", "run1", "run2")], RESOURCES, max_size=10
    )
    assert plan[1].dependency(["70"], [3, 1]) == "afterok:70"


def test_jobs_of_an_earlier_submission_are_waited_for_by_number() -> None:
    reads = [job("new", "pretrain"), job("a", "knn", "old"), job("b", "knn", "new")]
    plan = plan_arrays(reads, RESOURCES, max_size=10, queued={"old": "12_3"})
    found = {array.jobs[0].name: array.queued for array in plan}
    assert found == {"a": ("12_3",), "b": (), "new": ()}


def test_a_job_that_names_what_failed_starts_however_the_others_ended() -> None:
    runs = [job(f"run{i}", "pretrain") for i in range(3)]
    last = dataclasses.replace(job("report", "report", "run0", "run2", "old"), failed_flag="--x")
    plan = plan_arrays([*runs, last], RESOURCES, max_size=10, queued={"old": "12"})
    assert plan[1].dependency(["70"], [3, 1]) == "afterany:70_0,afterany:70_2,afterany:12"

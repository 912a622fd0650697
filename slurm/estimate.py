"""What would run, as a tree with counts, and roughly what it costs."""

from collections.abc import Mapping, Sequence

from slurm.jobs import Job
from slurm.resources import Resources

# Training images a second of one process, assumed: a GPU of the V100's class at 224 pixels without
# mixed precision; a CPU core at 32 pixels (about what resnet18 was seen to do, the others by their
# operations). No GPU has been measured.
GPU_RATES = {"alexnet": 2500.0, "vgg16": 230.0, "resnet18": 1100.0, "resnet50": 360.0}
CPU_RATES = {"alexnet": 250.0, "vgg16": 25.0, "resnet18": 175.0, "resnet50": 60.0}
FORWARD_ONLY = 3.0  # how much faster it is
# Two-stage detectors see images three times as wide.
COST_OF_TASK = {"knn": 1 / FORWARD_ONLY, "linear": 1 / FORWARD_ONLY, "detect": 12.0}
MINUTE = 1 / 60
LONGEST_LIST = 60


def estimate_hours(job: Job, resources: Resources) -> float:
    """Hours of one job on what it asks for."""
    rate = (GPU_RATES if resources.gpus else CPU_RATES)[job.arch]
    images = job.images * COST_OF_TASK.get(job.task, 1.0)
    return max(MINUTE, images / (rate * resources.num_processes) / 3600)


def describe_cost(jobs: Sequence[Job], resources: Mapping[str, Resources]) -> str:
    """The sum over jobs, in hours of a GPU or of a core."""
    total = longest = 0.0
    ends: dict[str, float] = {}
    for job in jobs:
        wanted = resources[job.task]
        hours = estimate_hours(job, wanted)
        total += hours * wanted.num_processes
        ends[job.name] = hours + max((ends.get(name, 0.0) for name in job.after), default=0.0)
        longest = max(longest, ends[job.name])
    unit = "GPU" if any(each.gpus for each in resources.values()) else "core"
    return (
        f"about {_hours(total)} of a {unit}, {_hours(longest)} from end to end if nothing waits "
        "(rough: see docs/slurm.md)"
    )


def _hours(hours: float) -> str:
    return f"{hours:,.0f} hours" if hours >= 10 else f"{60 * hours:,.0f} minutes"


def draw_tree(jobs: Sequence[Job], states: Mapping[str, str]) -> list[str]:
    """Jobs below those that they wait for; counts by task where the list would be long."""
    if len(jobs) > LONGEST_LIST:
        return _draw_counts(jobs, states)
    by_name = {job.name: job for job in jobs}
    children: dict[str | None, list[Job]] = {}
    for job in jobs:
        # Below the last of its parents; a report that waits for all stands at the end.
        parents = [name for name in job.after if name in by_name]
        children.setdefault(parents[-1] if 0 < len(parents) < 3 else None, []).append(job)

    def lines(parent: str | None, depth: int) -> list[str]:
        found = []
        for job in children.get(parent, []):
            many = f", after {len(job.after)} jobs" if len(job.after) > 2 else ""
            found.append(f"{'  ' * depth}{job.task:<10}{job.name}  [{states[job.name]}{many}]")
            found += lines(job.name, depth + 1)
        return found

    return lines(None, 1)


def _draw_counts(jobs: Sequence[Job], states: Mapping[str, str]) -> list[str]:
    depths: dict[str, int] = {}
    groups: dict[tuple[int, str], list[Job]] = {}
    for job in jobs:
        depths[job.name] = 1 + max((depths.get(name, 0) for name in job.after), default=0)
        groups.setdefault((depths[job.name], job.task), []).append(job)
    found = []
    for (depth, task), group in sorted(groups.items()):
        done = sum(states[job.name] == "done" for job in group)
        example = f"{group[0].name} ... {group[-1].name}" if len(group) > 1 else group[0].name
        found.append(f"{'  ' * depth}{task:<10}{len(group)} jobs, {done} done: {example}")
    return found


def count_states(states: Mapping[str, str]) -> str:
    """`12 jobs: 3 done, 1 queued, 8 to run`."""
    values = list(states.values())
    parts = [f"{values.count(state)} {state}" for state in dict.fromkeys(sorted(values))]
    return f"{len(values)} job{'s' * (len(values) != 1)}: {', '.join(parts)}"

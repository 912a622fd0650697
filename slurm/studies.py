"""The paper's tables and figures as graphs of jobs: pretrain, export, read out, report."""

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from instdisc.cli import CommandConfig, option
from instdisc.errors import UserError
from instdisc.names import ARCH_NAMES, PAPER_DETECTORS, ArchName
from instdisc.runs.folders import runs_root
from slurm.jobs import Job
from slurm.resources import Resources
from slurm.tasks import TASKS

# The rows of the paper's tables as flags, and what makes them small: for two cores, for a look.

IMAGENET, CIFAR, PLACES, VOC07 = 1_281_167, 50_000, 2_448_873, 5_011
EMBEDDINGS = (32, 64, 128, 256)
FRACTIONS = (0.001, 0.01, 0.1, 0.3, 1.0)
LABELED = (0.01, 0.02, 0.04, 0.1, 0.2)
# Table 1, from the worst row to the best.
OBJECTIVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("parametric", ("--objective", "parametric")),
    *((f"nce-{m}", ("--objective", "nce", "--num-negatives", str(m))) for m in (1, 10, 512, 4096)),
    ("softmax", ("--objective", "softmax")),
)
# What the last row but one changes by: the proximal term, and noise that a batch shares.
ABLATIONS: tuple[tuple[str, tuple[str, ...]], ...] = tuple(
    (f"nce-4096-{name}", ("--objective", "nce", "--num-negatives", "4096", *flags))
    for name, flags in (
        ("proximal", ("--proximal-weight", "1")),
        ("shared", ("--negatives", "shared")),
    )
)

SMALL_EPOCHS, SMALL_FRACTION = 18, 0.1
# CIFAR-10 on two cores: 5,000 images and the stem that halves an image twice; minutes for each row.
# Many small steps, flips and a bank that keeps half of the old row: what the exact softmax learnt
# with in so few visits to an image. Z of NCE follows the features: while they are still all alike,
# Z of the first batch is too small by far, and NCE did not train (docs/results/table1-small.md).
SMALL = shlex.split(
    f"--train-fraction {SMALL_FRACTION} --stem imagenet --epochs {SMALL_EPOCHS} "
    "--flip --batch-size 64 --lr 0.03 --warmup-epochs 2 --lr-milestones 15 "
    "--bank-momentum 0.5 --normalizer exact --monitor-every 0 --workers 0"
)
# The least that does something on the embedded images.
DEMO_QUICK = shlex.split(
    "--train-fraction 0.05 --epochs 2 --batch-size 16 --warmup-epochs 0 --monitor-every 2 "
    "--no-tensorboard"
)
SEMISUP_QUICK = shlex.split("--epochs 2 --batch-size 16")
DETECT_QUICK = shlex.split(
    "--pictures 1 SOLVER.MAX_ITER 4 SOLVER.IMS_PER_BATCH 2 MODEL.RPN.BATCH_SIZE_PER_IMAGE 16 "
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 16 INPUT.MIN_SIZE_TRAIN (64,) INPUT.MIN_SIZE_TEST 64 "
    "TEST.DETECTIONS_PER_IMAGE 5 MODEL.RPN.POST_NMS_TOPK_TEST 20"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyConfig(CommandConfig):
    """What a study is run on."""

    PROG = "slurm/submit.py study NAME"
    DESCRIPTION = "Runs a table or figure."

    data: str | None = option(None, "ImageNet; else $INSTDISC_DATA", metavar="DIR")
    cifar: str | None = option(
        None, "CIFAR-10, for table1 and ablations; --data if not given", metavar="DIR"
    )
    places: str | None = option(None, "Places205, for places", metavar="DIR")
    voc_root: str | None = option(
        None, "VOCdevkit, for detection; else $DETECTRON2_DATASETS", metavar="DIR"
    )
    supervised: tuple[str, ...] = option(
        (), "checkpoints trained with labels, the upper bound of detection", metavar="ARCH=FILE"
    )
    archs: tuple[ArchName, ...] = option(ARCH_NAMES, "networks of table2, places and detection")
    scale: Literal["paper", "small", "quick"] = option(
        "paper",
        "the paper's runs; small: table1 and ablations on a tenth of CIFAR-10, two hours on two "
        "cores; quick: demo with as few steps as there can be",
    )
    seeds: int | None = option(None, "repetitions of everything; 1, with --scale small 2")
    skip: tuple[str, ...] = option((), "tasks to leave out, such as report", metavar="TASK")

    def __post_init__(self) -> None:
        """Checks what the types cannot say."""
        if self.seeds is not None and self.seeds < 1:
            raise UserError("--seeds must be at least 1")
        for task in self.skip:
            if task not in TASKS or task == "pretrain":
                raise UserError(f"--skip {task}: name a task that a study can do without")
        for text in self.supervised:
            arch, equals, file = text.partition("=")
            if arch not in ARCH_NAMES or not equals or not file:
                raise UserError(f"--supervised {text}: write ARCH=FILE, such as resnet50=r50.pth")


class Study:
    """The jobs of one or several studies; what two of them share is there once."""

    def __init__(self, config: StudyConfig) -> None:
        self.config = config
        self.jobs: dict[str, Job] = {}
        self.root = (runs_root() / "studies").absolute()

    def add(self, job: Job) -> Job:
        """Adds a job, unless it is there."""
        known = self.jobs.setdefault(job.name, job)
        assert known.argv == job.argv, f"two jobs are called {job.name}"
        return known

    def pretrain(
        self, name: str, seed: int, *flags: str, arch: str, data: str | None, images: float
    ) -> Job:
        """A pretraining; its folder has no seed in its last part, by which results are grouped."""
        run = self.root / f"seed{seed}" / name
        where = ("--data", data) if data else ()
        argv = ("--arch", arch, *where, *flags, "--seed", str(seed), "--output", str(run))
        return self.add(
            Job(
                name=f"{name}-seed{seed}",
                task="pretrain",
                argv=argv,
                run=str(run),
                produces=str(run / "backbone.pt"),
                images=images,
                arch=arch,
            )
        )

    def readout(
        self,
        task: str,
        parent: Job | str,
        seed: int,
        *flags: str,
        label: str = "",
        arch: str = "resnet50",
        images: float = 0.0,
        after: tuple[str, ...] = (),
    ) -> Job:
        """A job that starts from a run, or from a network by name."""
        if isinstance(parent, Job):
            weights, home, base, arch = parent.run, Path(parent.run), parent.name, parent.arch
            after = (parent.name, *after)
        else:
            base = f"{parent.replace(':', '-')}-seed{seed}"
            weights, home = parent, self.root / f"seed{seed}" / parent.replace(":", "-")
        kind = f"{task}-{label}" if label else task
        run = home / kind
        argv: tuple[str, ...] = ("--weights", weights, "--output", str(run))
        if task != "export":
            argv += ("--seed", str(seed))
        job = Job(
            name=f"{base}-{kind}",
            task=task,
            argv=(*argv, *flags),
            run=str(run),
            produces=str(run),
            after=after,
            images=images,
            arch=arch,
        )
        return self.add(job)

    def imagenet(self, arch: str, seed: int, suffix: str = "", *flags: str, part: float = 1) -> Job:
        """A run of the paper on ImageNet."""
        return self.pretrain(
            f"imagenet-{arch}{suffix}",
            seed,
            *flags,
            arch=arch,
            data=self.config.data,
            images=200 * IMAGENET * part,
        )

    def table1(self, seed: int) -> None:
        """CIFAR-10: parametric and non-parametric softmax, exact and by NCE."""
        self.cifar(OBJECTIVES, seed)

    def ablations(self, seed: int) -> None:
        """CIFAR-10: the proximal term, and shared noise, beside their row of table1."""
        self.cifar((OBJECTIVES[-2], *ABLATIONS), seed)

    def cifar(self, rows: tuple[tuple[str, tuple[str, ...]], ...], seed: int) -> None:
        """Runs on CIFAR-10, each read out by kNN and by a linear SVM on the embedding."""
        small = self.config.scale == "small"
        data = self.config.cifar or self.config.data
        images = SMALL_EPOCHS * SMALL_FRACTION * CIFAR if small else 200 * CIFAR
        for row, objective in rows:
            name = f"cifar10{'-small' * small}-{row}"
            extra = SMALL if small else ()
            job = self.pretrain(
                name, seed, *objective, *extra, arch="resnet18", data=data, images=images
            )
            workers = ("--workers", "0") if small else ()
            knn = self.readout("knn", job, seed, *workers, images=CIFAR)
            flags = ("--stage", "embedding", *workers)
            # It finds the features that kNN has stored.
            self.readout("linear", job, seed, *flags, images=CIFAR, after=(knn.name,))

    def table2(self, seed: int) -> None:
        """ImageNet: conv1..conv5 and nearest neighbours."""
        for arch in self.config.archs:
            job = self.imagenet(arch, seed)
            self.readout("knn", job, seed, images=IMAGENET)
            self.readout("linear", job, seed, images=IMAGENET)
        if "alexnet" in self.config.archs:
            where = ("--data", self.config.data) if self.config.data else ()
            for task in ("knn", "linear"):
                name = f"random:alexnet:{seed}"
                self.readout(task, name, seed, *where, arch="alexnet", images=IMAGENET)

    def places(self, seed: int) -> None:
        """The same networks on Places205, without fine-tuning."""
        if not self.config.places:
            raise UserError("study places needs Places205: --places DIR")
        where = ("--data", self.config.places)
        for arch in self.config.archs:
            job = self.imagenet(arch, seed)
            for task in ("knn", "linear"):
                self.readout(task, job, seed, *where, label="places", images=PLACES)

    def embedding(self, seed: int) -> None:
        """Size of the embedding; 128 is the run of table2."""
        for dim in EMBEDDINGS:
            special = (f"-dim{dim}", "--embedding-dim", str(dim)) if dim != 128 else ("",)
            self.readout("knn", self.imagenet("resnet18", seed, *special), seed, images=IMAGENET)

    def data_size(self, seed: int) -> None:
        """Part of the training images; all of them is the run of table2."""
        for part in FRACTIONS:
            special = (f"-part{part:g}", "--train-fraction", f"{part:g}") if part < 1 else ("",)
            job = self.imagenet("resnet18", seed, *special, part=part)
            self.readout("knn", job, seed, images=IMAGENET)

    def semisup(self, seed: int) -> None:
        """Fine-tuning with few labels, and the same from scratch."""
        job = self.imagenet("resnet50", seed)
        for part in LABELED:
            for init in ("pretrained", "scratch"):
                flags = ("--labeled", f"{part:g}", "--init", init, "--recipe", "paper")
                label, images = f"{init}-{part:g}", 70 * part * IMAGENET
                self.readout("semisup", job, seed, *flags, label=label, images=images)

    def detection(self, seed: int) -> None:
        """VOC07: from scratch, from labels, from our features."""
        supervised = dict(text.split("=", 1) for text in self.config.supervised)
        where = ("--voc-root", self.config.voc_root) if self.config.voc_root else ()
        for arch in [arch for arch in self.config.archs if arch in PAPER_DETECTORS]:
            job = self.imagenet(arch, seed)
            export = self.readout("export", job, seed, "--to", "detectron2", "--overwrite")
            flags = ("--cfg", PAPER_DETECTORS[arch], *where)
            flags += ("--make-proposals",) if arch != "resnet50" else ()
            images = 24 * VOC07
            self.readout(
                "detect", job, seed, *flags, label="ours", images=images, after=(export.name,)
            )
            others = ["scratch"]
            others += [f"supervised:{supervised[arch]}"] if arch in supervised else []
            for init in others:
                self.alone(arch, seed, init, *flags, images=images)

    def alone(self, arch: str, seed: int, init: str, *flags: str, images: float) -> None:
        """A detector that needs none of our runs."""
        kind = init.partition(":")[0]
        run = self.root / f"seed{seed}" / f"{kind}-{arch}" / "detect"
        argv = (*flags, "--init", init, "--output", str(run), "--seed", str(seed))
        self.add(
            Job(
                name=f"{kind}-{arch}-seed{seed}-detect",
                task="detect",
                argv=argv,
                run=str(run),
                produces=str(run),
                images=images,
                arch=arch,
            )
        )

    def demo(self, seed: int) -> None:
        """Everything once, on the embedded images."""
        quick = self.config.scale == "quick"
        job = self.pretrain(
            "demo-resnet18", seed, *(DEMO_QUICK if quick else ()),
            arch="resnet18", data="demo", images=20_000,
        )  # fmt: skip
        export = self.readout("export", job, seed, "--to", "detectron2", "--overwrite")
        self.readout("knn", job, seed, "--workers", "0")
        few = SEMISUP_QUICK if quick else ()
        self.readout("semisup", job, seed, "--labeled", "0.05", *few)
        short = DETECT_QUICK if quick else ()
        where = ("--cfg", "faster_r18")
        self.readout("detect", job, seed, *where, *short, after=(export.name,))

    def end(self) -> None:
        """The report, after everything."""
        if TASKS["report"].exists:
            run = str((runs_root() / "report").absolute())
            done = tuple(self.jobs)
            self.add(Job(name="report", task="report", argv=(), run=run, after=done))


BUILDERS: dict[str, Callable[[Study, int], None]] = {
    "table1": Study.table1,
    "ablations": Study.ablations,
    "table2": Study.table2,
    "places": Study.places,
    "embedding": Study.embedding,
    "data-size": Study.data_size,
    "semisup": Study.semisup,
    "detection": Study.detection,
    "demo": Study.demo,
}


def build_study(name: str, config: StudyConfig) -> list[Job]:
    """All jobs of a study, parents before children."""
    if name not in (*BUILDERS, "all"):
        raise UserError(f"no study {name!r}: choose one of {', '.join(BUILDERS)}, all")
    study = Study(config)
    for seed in range(config.seeds or (2 if config.scale == "small" else 1)):
        for each, build in BUILDERS.items():
            if each == name or (name == "all" and each != "demo"):
                build(study, seed)
    study.end()
    kept = {job.name: job for job in study.jobs.values() if job.task not in config.skip}
    for job in kept.values():
        after = tuple(name for name in job.after if name in kept)
        kept[job.name] = dataclasses.replace(job, after=after)
    return sorted(kept.values(), key=lambda job: _depth(job, kept))


def _depth(job: Job, jobs: dict[str, Job]) -> int:
    return 1 + max((_depth(jobs[name], jobs) for name in job.after), default=-1)


# What would run, as a tree with counts, and roughly what it costs.

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

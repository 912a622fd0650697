"""The paper's tables and figures as graphs of jobs: pretrain, export, read out, report."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from instdisc.cli import option
from instdisc.errors import UserError
from instdisc.names import ARCH_NAMES, PAPER_DETECTORS, ArchName
from instdisc.runs.folders import runs_root
from slurm import scales
from slurm.jobs import Job
from slurm.tasks import TASKS


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """What a study is run on."""

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
            images=200 * scales.IMAGENET * part,
        )

    def table1(self, seed: int) -> None:
        """CIFAR-10: parametric and non-parametric softmax, exact and by NCE."""
        self.cifar(scales.OBJECTIVES, seed)

    def ablations(self, seed: int) -> None:
        """CIFAR-10: the proximal term, and shared noise, beside their row of table1."""
        self.cifar((scales.OBJECTIVES[-2], *scales.ABLATIONS), seed)

    def cifar(self, rows: tuple[tuple[str, tuple[str, ...]], ...], seed: int) -> None:
        """Runs on CIFAR-10, each read out by kNN and by a linear SVM on the embedding."""
        small = self.config.scale == "small"
        data = self.config.cifar or self.config.data
        images = (
            scales.SMALL_EPOCHS * scales.SMALL_FRACTION * scales.CIFAR
            if small
            else 200 * scales.CIFAR
        )
        for row, objective in rows:
            name = f"cifar10{'-small' * small}-{row}"
            extra = scales.SMALL if small else ()
            job = self.pretrain(
                name, seed, *objective, *extra, arch="resnet18", data=data, images=images
            )
            workers = ("--workers", "0") if small else ()
            knn = self.readout("knn", job, seed, *workers, images=scales.CIFAR)
            flags = ("--stage", "embedding", *workers)
            # It finds the features that kNN has stored.
            self.readout("linear", job, seed, *flags, images=scales.CIFAR, after=(knn.name,))

    def table2(self, seed: int) -> None:
        """ImageNet: conv1..conv5 and nearest neighbours."""
        for arch in self.config.archs:
            job = self.imagenet(arch, seed)
            self.readout("knn", job, seed, images=scales.IMAGENET)
            self.readout("linear", job, seed, images=scales.IMAGENET)
        if "alexnet" in self.config.archs:
            where = ("--data", self.config.data) if self.config.data else ()
            for task in ("knn", "linear"):
                name = f"random:alexnet:{seed}"
                self.readout(task, name, seed, *where, arch="alexnet", images=scales.IMAGENET)

    def places(self, seed: int) -> None:
        """The same networks on Places205, without fine-tuning."""
        if not self.config.places:
            raise UserError("study places needs Places205: --places DIR")
        where = ("--data", self.config.places)
        for arch in self.config.archs:
            job = self.imagenet(arch, seed)
            for task in ("knn", "linear"):
                self.readout(task, job, seed, *where, label="places", images=scales.PLACES)

    def embedding(self, seed: int) -> None:
        """Size of the embedding; 128 is the run of table2."""
        for dim in scales.EMBEDDINGS:
            special = (f"-dim{dim}", "--embedding-dim", str(dim)) if dim != 128 else ("",)
            self.readout(
                "knn", self.imagenet("resnet18", seed, *special), seed, images=scales.IMAGENET
            )

    def data_size(self, seed: int) -> None:
        """Part of the training images; all of them is the run of table2."""
        for part in scales.FRACTIONS:
            special = (f"-part{part:g}", "--train-fraction", f"{part:g}") if part < 1 else ("",)
            job = self.imagenet("resnet18", seed, *special, part=part)
            self.readout("knn", job, seed, images=scales.IMAGENET)

    def semisup(self, seed: int) -> None:
        """Fine-tuning with few labels, and the same from scratch."""
        job = self.imagenet("resnet50", seed)
        for part in scales.LABELED:
            for init in ("pretrained", "scratch"):
                flags = ("--labeled", f"{part:g}", "--init", init, "--recipe", "paper")
                label, images = f"{init}-{part:g}", 70 * part * scales.IMAGENET
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
            images = 24 * scales.VOC07
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
            "demo-resnet18", seed, *(scales.DEMO_QUICK if quick else ()),
            arch="resnet18", data="demo", images=20_000,
        )  # fmt: skip
        export = self.readout("export", job, seed, "--to", "detectron2", "--overwrite")
        self.readout("knn", job, seed, "--workers", "0")
        few = scales.SEMISUP_QUICK if quick else ()
        self.readout("semisup", job, seed, "--labeled", "0.05", *few)
        short = scales.DETECT_QUICK if quick else ()
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

"""The paper's tables and figures as graphs of jobs: pretrain, export, read out, report."""

import dataclasses
import json
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from instdisc.cli import CommandConfig, option
from instdisc.errors import UserError
from instdisc.names import (
    ARCH_NAMES,
    COCO_DETECTORS,
    DETECTORS,
    NAMED_NETWORKS,
    PAPER_DETECTORS,
    VOC_VARIABLE,
    ArchName,
)
from instdisc.runs.folders import runs_root
from slurm.jobs import Job
from slurm.tasks import TASKS

# The rows of the paper's tables as flags, and the flags of the small and the quick scale.

IMAGENET, CIFAR, PLACES, VOC07, COCO = 1_281_167, 50_000, 2_448_873, 5_011, 118_287
EMBEDDINGS = (32, 64, 128, 256)
FRACTIONS = (0.001, 0.01, 0.1, 0.3, 1.0)
LABELED = (0.01, 0.02, 0.04, 0.1, 0.2)
LINEAR_EPOCHS = 28  # passes of linear.py over images whose pooled features are too large to store
# Table 1, from the worst row to the best.
OBJECTIVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("parametric", ("--objective", "parametric")),
    # A few samples shared by a whole batch would be another method: these rows never share them.
    *(
        (f"nce-{m}", ("--objective", "nce", "--num-negatives", str(m), "--negatives", "per-image"))
        for m in (1, 10)
    ),
    *((f"nce-{m}", ("--objective", "nce", "--num-negatives", str(m))) for m in (512, 4096)),
    ("softmax", ("--objective", "softmax")),
)
# Changes to the last row but one: the proximal term, and noise that a batch shares.
ABLATIONS: tuple[tuple[str, tuple[str, ...]], ...] = tuple(
    (f"nce-4096-{name}", ("--objective", "nce", "--num-negatives", "4096", *flags))
    for name, flags in (
        ("proximal", ("--proximal-weight", "1")),
        ("shared", ("--negatives", "shared")),
    )
)


class Protocol(NamedTuple):
    """A job that study transfer has for every network.

    Attributes:
        task: one of slurm.tasks.
        label: what tells it from other jobs of the task.
        flags: of the command; its defaults are the paper's.
        images: that pass through the network.
        on: the data that it needs.
    """

    task: str
    label: str = ""
    flags: tuple[str, ...] = ()
    images: float = IMAGENET
    on: Literal["data", "voc", "coco"] = "data"


# A protocol that the paper's studies have too has the same label and flags, and is run once.
PROTOCOLS = (
    Protocol("knn"),
    Protocol("retrieve"),
    Protocol("linear", images=LINEAR_EPOCHS * IMAGENET),
    Protocol("linear", "moco", ("--recipe", "moco"), 100 * IMAGENET),
    Protocol("linear", "vissl", ("--recipe", "vissl"), 28 * IMAGENET),
    *(
        Protocol(
            "semisup",
            f"pretrained-{part:g}",
            ("--labeled", f"{part:g}", "--init", "pretrained", "--recipe", "paper"),
            70 * part * IMAGENET,
        )
        for part in (0.01, 0.1)
    ),
    Protocol("semisup", "all", ("--recipe", "vissl-full"), 105 * IMAGENET),
    Protocol("fewshot"),
    Protocol("voc_svm", images=2 * VOC07, on="voc"),
    Protocol("detect", "ours", images=24 * VOC07, on="voc"),
    Protocol("detect", "coco", images=24 * COCO, on="coco"),
)

SMALL_EPOCHS, SMALL_FRACTION = 18, 0.1
# CIFAR-10 on two cores: 5,000 images and the stem that halves an image twice; minutes for each row.
# Many small steps, flips and bank momentum 0.5: with these the exact softmax learnt in so few
# epochs. NCE recomputes Z: Z of the first batch, when all features are still alike, is far too
# small, and NCE did not train with it (docs/results/table1-small.md).
SMALL = shlex.split(
    f"--train-fraction {SMALL_FRACTION} --stem imagenet --epochs {SMALL_EPOCHS} "
    "--flip --batch-size 64 --lr 0.03 --warmup-epochs 2 --lr-milestones 15 "
    "--bank-momentum 0.5 --normalizer exact --monitor-every 0 --workers 0"
)
CPU_EPOCHS, CPU_SHORT_EPOCHS = 20, 10
# All of CIFAR-10 on one core: an hour for each row. Much noise is shared by a batch, which is
# several times cheaper on a CPU and was not seen to change a result: one of ABLATIONS looks at it.
CPU = shlex.split("--stem imagenet --negatives shared --monitor-every 4 --workers 0")
CPU_SCHEDULE = shlex.split(f"--epochs {CPU_EPOCHS} --lr-milestones 15 18")
CPU_SHORT = shlex.split(f"--epochs {CPU_SHORT_EPOCHS} --lr-milestones 8")
REPEATED = ("parametric", "nce-4096", "softmax")  # rows that --scale cpu runs with a second seed
# What else is changed about m = 4096 at that scale: the noise, Z, the proximal weight.
CPU_ABLATIONS: tuple[tuple[str, tuple[str, ...]], ...] = tuple(
    (f"nce-4096-{name}", ("--objective", "nce", "--num-negatives", "4096", *flags))
    for name, flags in (
        ("base", ()),
        ("per-image", ("--negatives", "per-image")),
        ("ema", ("--normalizer", "ema")),
        ("exact-z", ("--normalizer", "exact")),
        ("proximal-10", ("--proximal-weight", "10")),
    )
)
# Some 10,000 photographs at 64 pixels on one core: two hours of pretraining, then every task.
# With so few images Z is not constant for an epoch, so the objective is the one without Z.
PHOTOGRAPHS = 9_469
PHOTOGRAPHS_EPOCHS = 60
PHOTOGRAPHS_PRETRAIN = shlex.split(
    "--image-size 64 --objective softmax --temperature 0.1 --batch-size 64 --lr 0.03 "
    f"--warmup-epochs 3 --epochs {PHOTOGRAPHS_EPOCHS} --lr-milestones 48 56 --monitor-every 10 "
    "--workers 0"
)
PHOTOGRAPHS_SEMISUP = shlex.split(
    "--labeled 0.01 0.02 0.05 0.1 0.2 --init pretrained scratch --trials 3 --epochs 40 "
    "--lr-milestones 24 34 --batch-size 64 --workers 0"
)
PHOTOGRAPHS_DETECT = shlex.split(
    "SOLVER.MAX_ITER 600 SOLVER.STEPS (480,) SOLVER.WARMUP_ITERS 20 INPUT.MIN_SIZE_TRAIN (300,) "
    "INPUT.MAX_SIZE_TRAIN 500 INPUT.MIN_SIZE_TEST 300 INPUT.MAX_SIZE_TEST 500 "
    "DATALOADER.NUM_WORKERS 0"
)
# The fewest steps that work on the embedded images.
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
    EPILOG = """
    examples:
      python slurm/submit.py --gpus 8 study table2 --data /data/imagenet
      ... study transfer --weights runs/pretrain/resnet50 timm:resnet50.a1_in1k
      ... study all --flags "pretrain=--amp bf16 --workers 12" "semisup=--amp bf16"
    """

    data: str | None = option(None, "ImageNet; else $INSTDISC_DATA", metavar="DIR")
    cifar: str | None = option(
        None, "CIFAR-10, for table1 and ablations; --data if not given", metavar="DIR"
    )
    places: str | None = option(None, "Places205, for places", metavar="DIR")
    voc_root: str | None = option(
        None, "VOCdevkit, for detection; else $DETECTRON2_DATASETS", metavar="DIR"
    )
    coco_root: str | None = option(None, "COCO, for transfer on it too", metavar="DIR")
    supervised: tuple[str, ...] = option(
        (), "checkpoints trained with labels, the upper bound of detection", metavar="ARCH=FILE"
    )
    archs: tuple[ArchName, ...] = option(
        ARCH_NAMES, "networks of table2, places, detection, and transfer without --weights"
    )
    weights: tuple[str, ...] = option(
        (),
        "networks of transfer: run folders, or what --weights of a command takes; ARCH=NAME for "
        "a file",
        metavar="[ARCH=]NAME",
    )
    scale: Literal["paper", "cpu", "small", "quick"] = option(
        "paper",
        "the paper's runs; cpu: table1, ablations, embedding and data-size on all of CIFAR-10, an "
        "hour of one core for a row of table1; small: table1 and ablations on a tenth of it, two "
        "hours on two cores; quick: demo with the fewest steps that work",
    )
    seeds: int | None = option(
        None, "repetitions of everything; 1, with --scale small or cpu 2 (of table1 half the rows)"
    )
    skip: tuple[str, ...] = option((), "tasks to leave out, such as report", metavar="TASK")
    flags: tuple[str, ...] = option(
        (), "more flags for every job of a task, in one word", metavar="TASK=FLAGS"
    )

    def __post_init__(self) -> None:
        """Checks what the types cannot say."""
        if self.seeds is not None and self.seeds < 1:
            raise UserError("--seeds must be at least 1")
        for task in self.skip:
            if task not in TASKS or task == "pretrain":
                raise UserError(f"--skip {task}: name a task that a study can do without")
        self.flags_by_task()
        for text in self.supervised:
            arch, equals, file = text.partition("=")
            if arch not in ARCH_NAMES or not equals or not file:
                raise UserError(f"--supervised {text}: write ARCH=FILE, such as resnet50=r50.pth")

    def flags_by_task(self) -> dict[str, list[str]]:
        """The words of --flags, by task."""
        found: dict[str, list[str]] = {}
        for text in self.flags:
            task, _, line = text.partition("=")
            try:
                words = shlex.split(line)
            except ValueError:  # a quote that is not closed
                words = []
            if task not in TASKS or not words:
                raise UserError(
                    f"--flags {text}: write a task and its flags in quotes, such as "
                    '"pretrain=--amp bf16 --workers 12"'
                )
            found.setdefault(task, []).extend(words)
        return found


def find_arch(text: str) -> tuple[str, str]:
    """Architecture and name of a network, as far as can be told without reading its weights."""
    arch, equals, name = text.partition("=")
    if equals and name and arch in ARCH_NAMES:
        return arch, name
    kind, _, rest = text.partition(":")
    if kind == "timm":
        return text, text
    if kind in NAMED_NETWORKS and kind != "untrained":
        return rest if rest.startswith("timm:") else rest.partition(":")[0], text
    folder = Path(rest if kind == "untrained" else text)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return str(config["arch"]), text
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"--weights {text}: no run folder, so say which network it is, such as resnet50={text}"
        ) from None


class Study:
    """The jobs of one or several studies; a job that two studies share is added once."""

    def __init__(self, config: StudyConfig) -> None:
        self.config = config
        self.jobs: dict[str, Job] = {}
        self.root = (runs_root() / "studies").absolute()
        self.flags = config.flags_by_task()

    def add(self, job: Job) -> Job:
        """Adds a job with the flags of its task, unless it was added before."""
        job = dataclasses.replace(job, argv=(*job.argv, *self.flags.get(job.task, ())))
        known = self.jobs.setdefault(job.name, job)
        assert known.argv == job.argv, f"two jobs are called {job.name}"
        return known

    def pretrain(
        self, name: str, seed: int, *flags: str, arch: str, data: str | None, images: float
    ) -> Job:
        """A pretraining; results are grouped by the folder's last part, so it has no seed in it."""
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
        untrained: bool = False,
    ) -> Job:
        """A job that starts from a run, from the network that it began with, or from a name."""
        if isinstance(parent, Job):
            weights, home, base, arch = parent.run, Path(parent.run), parent.name, parent.arch
            after = (parent.name, *after)
            if untrained:
                weights, label = f"untrained:{weights}", "untrained"
        else:
            path = Path(parent)
            leaf = path.parent.name if path.name == "backbone.pt" else path.name
            label_of = leaf if path.exists() else parent.replace("/", "-")
            base = f"{label_of.replace(':', '-')}-seed{seed}"
            weights = str(path.absolute()) if path.exists() else parent
            home = self.root / f"seed{seed}" / label_of.replace(":", "-")
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
        again = seed > 0 and self.config.scale == "cpu"
        self.cifar(
            tuple(row for row in OBJECTIVES if not again or row[0] in REPEATED),
            seed,
            untrained=True,
        )

    def ablations(self, seed: int) -> None:
        """CIFAR-10: the proximal term, Z and shared noise beside their row of table1."""
        if self.config.scale == "cpu":
            self.cifar(CPU_ABLATIONS, seed, short=True)
        else:
            self.cifar((OBJECTIVES[-2], *ABLATIONS), seed)

    def cifar(
        self,
        rows: tuple[tuple[str, tuple[str, ...]], ...],
        seed: int,
        *,
        short: bool = False,
        untrained: bool = False,
    ) -> None:
        """Runs on CIFAR-10, each read out by kNN and by a linear SVM on the embedding.

        With `untrained` the network that the last run began with is read out as well.
        """
        scale = self.config.scale
        data = self.config.cifar or self.config.data
        extra: Sequence[str] = ()
        epochs, images = 200, float(CIFAR)
        if scale == "small":
            extra, epochs, images = SMALL, SMALL_EPOCHS, SMALL_FRACTION * CIFAR
        elif scale == "cpu":
            extra = (*CPU, *(CPU_SHORT if short else CPU_SCHEDULE))
            epochs = CPU_SHORT_EPOCHS if short else CPU_EPOCHS
        where = f"cifar10-{scale}" if scale in ("small", "cpu") else "cifar10"
        workers = ("--workers", "0") if scale in ("small", "cpu") else ()
        for row, flags in rows:
            # What a row says has precedence over the scale.
            job = self.pretrain(
                f"{where}-{row}", seed, *extra, *flags,
                arch="resnet18", data=data, images=epochs * images,
            )  # fmt: skip
            for before in (False, True) if untrained and row == rows[-1][0] else (False,):
                knn = self.readout("knn", job, seed, *workers, images=CIFAR, untrained=before)
                # It reads the features that kNN has stored.
                self.readout(
                    "linear", job, seed, "--stage", "embedding", *workers,
                    images=CIFAR, after=(knn.name,), untrained=before,
                )  # fmt: skip

    def table2(self, seed: int) -> None:
        """ImageNet: conv1..conv5 and nearest neighbours."""
        for arch in self.config.archs:
            job = self.imagenet(arch, seed)
            self.readout("knn", job, seed, images=IMAGENET)
            self.readout("linear", job, seed, images=LINEAR_EPOCHS * IMAGENET)
        if "alexnet" in self.config.archs:
            where = ("--data", self.config.data) if self.config.data else ()
            for task, passes in (("knn", 1), ("linear", LINEAR_EPOCHS)):
                name = f"random:alexnet:{seed}"
                self.readout(task, name, seed, *where, arch="alexnet", images=passes * IMAGENET)

    def places(self, seed: int) -> None:
        """The same networks on Places205, without fine-tuning."""
        if not self.config.places:
            raise UserError("study places needs Places205: --places DIR")
        where = ("--data", self.config.places)
        for arch in self.config.archs:
            job = self.imagenet(arch, seed)
            for task, passes in (("knn", 1), ("linear", LINEAR_EPOCHS)):
                self.readout(task, job, seed, *where, label="places", images=passes * PLACES)

    def embedding(self, seed: int) -> None:
        """Size of the embedding; 128 is the run of table2."""
        if self.config.scale == "cpu":
            rows = ((f"dim{dim}", ("--embedding-dim", str(dim))) for dim in EMBEDDINGS)
            return self.cifar(tuple(rows), seed, short=True)
        for dim in EMBEDDINGS:
            special = (f"-dim{dim}", "--embedding-dim", str(dim)) if dim != 128 else ("",)
            self.readout("knn", self.imagenet("resnet18", seed, *special), seed, images=IMAGENET)

    def data_size(self, seed: int) -> None:
        """Part of the training images; all of them is the run of table2."""
        if self.config.scale == "cpu":
            # Z of the first batch is left soon where there are few images.
            exact = ("--normalizer", "exact")
            rows = (
                (f"part{part:g}", ("--train-fraction", f"{part:g}", *exact)) for part in FRACTIONS
            )
            return self.cifar(tuple(rows), seed, short=True)
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
            images = 24 * VOC07
            needs = self.proposals() if PAPER_DETECTORS[arch].startswith("fast_") else ()
            after = (*needs, export.name)
            self.readout("detect", job, seed, *flags, label="ours", images=images, after=after)
            others = ["scratch"]
            others += [f"supervised:{supervised[arch]}"] if arch in supervised else []
            for init in others:
                self.alone(arch, seed, init, *flags, images=images, after=needs)

    def transfer(self, seed: int) -> None:
        """Every transfer task for the networks that were named, else for the paper's."""
        for text in self.config.weights:
            arch, name = find_arch(text)
            self.protocols(arch, name, seed)
        if not self.config.weights:
            for arch in self.config.archs:
                self.protocols(arch, self.imagenet(arch, seed), seed)

    def protocols(self, arch: str, parent: Job | str, seed: int) -> None:
        """The jobs of one network."""
        data, voc = self.config.data, self.config.voc_root
        where = {
            # A run of ours knows its data.
            "data": ("--data", data) if data and isinstance(parent, str) else (),
            "voc": ("--voc-root", voc) if voc else (),
            "coco": ("--coco-root", self.config.coco_root or ""),
        }
        for each in PROTOCOLS:
            flags: tuple[str, ...] = (*each.flags, *where[each.on])
            after: tuple[str, ...] = ()
            if each.on == "coco" and self.config.coco_root is None:
                continue
            if each.task == "detect":
                detectors = COCO_DETECTORS if each.on == "coco" else DETECTORS
                if arch not in detectors:
                    continue  # none has been written for it
                flags = ("--cfg", detectors[arch], *flags)
                after = self.proposals() if detectors[arch].startswith("fast_") else ()
                if isinstance(parent, Job):
                    export = ("--to", "detectron2", "--overwrite")
                    after = (*after, self.readout("export", parent, seed, *export).name)
            self.readout(
                each.task, parent, seed, *flags,
                label=each.label, arch=arch, images=each.images, after=after,
            )  # fmt: skip

    def proposals(self) -> tuple[str, ...]:
        """The job that makes the proposals of VOC07; detection makes those of embedded images."""
        if (self.config.voc_root or os.environ.get(VOC_VARIABLE) or "demo") == "demo":
            return ()
        where = ("--voc-root", self.config.voc_root) if self.config.voc_root else ()
        argv = ("make", *where, "--split", "trainval", "test")
        run = str((runs_root() / "proposals").absolute())
        return (self.add(Job(name="proposals", task="proposals", argv=argv, run=run)).name,)

    def alone(
        self, arch: str, seed: int, init: str, *flags: str, images: float, after: tuple[str, ...]
    ) -> None:
        """A detector that needs none of our runs."""
        kind = init.partition(":")[0]
        run = self.root / f"seed{seed}" / f"{kind}-{arch}" / "detect"
        argv = ("--init", init, "--output", str(run), "--seed", str(seed), *flags)
        self.add(
            Job(
                name=f"{kind}-{arch}-seed{seed}-detect",
                task="detect",
                argv=argv,
                run=str(run),
                produces=str(run),
                after=after,
                images=images,
                arch=arch,
            )
        )

    def photographs(self, seed: int) -> None:
        """Some thousand photographs, on a CPU: pretraining without labels, then every task."""
        if not self.config.data:
            raise UserError("study photographs needs images in class folders: --data DIR")
        job = self.pretrain(
            "photographs", seed, *PHOTOGRAPHS_PRETRAIN,
            arch="resnet18", data=self.config.data, images=PHOTOGRAPHS_EPOCHS * PHOTOGRAPHS,
        )  # fmt: skip
        for task in ("knn", "retrieve", "linear"):
            for untrained in (False, True):
                self.readout(
                    task, job, seed, "--workers", "0", images=PHOTOGRAPHS, untrained=untrained
                )
        tuned = 40 * 6 * 0.38 * PHOTOGRAPHS
        self.readout("semisup", job, seed, *PHOTOGRAPHS_SEMISUP, images=tuned)
        if self.config.voc_root is None:
            return
        where = ("--voc-root", self.config.voc_root)
        for untrained in (False, True):
            self.readout(
                "voc_svm", job, seed, *where, "--workers", "0", images=VOC07, untrained=untrained
            )
        flags = ("--cfg", "faster_r18", *where, *PHOTOGRAPHS_DETECT)
        self.readout("detect", job, seed, *flags, label="ours", images=1_200)
        supervised = dict(text.split("=", 1) for text in self.config.supervised)
        inits = ["scratch", *(f"supervised:{file}" for file in supervised.values())]
        for init in inits:
            self.alone("resnet18", seed, init, *flags, images=1_200, after=())

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
        """The report of what there is, after everything has ended."""
        run = str((runs_root() / "report").absolute())
        after = tuple(self.jobs)
        self.add(
            Job(
                name="report", task="report", argv=(), run=run, after=after, failed_flag="--missing"
            )
        )


BUILDERS: dict[str, Callable[[Study, int], None]] = {
    "table1": Study.table1,
    "ablations": Study.ablations,
    "table2": Study.table2,
    "places": Study.places,
    "embedding": Study.embedding,
    "data-size": Study.data_size,
    "semisup": Study.semisup,
    "detection": Study.detection,
    "photographs": Study.photographs,
    "transfer": Study.transfer,
    "demo": Study.demo,
}
NOT_IN_ALL = ("photographs", "transfer", "demo")  # the others are the paper's


def build_study(name: str, config: StudyConfig) -> list[Job]:
    """All jobs of a study, parents before children."""
    if name not in (*BUILDERS, "all"):
        raise UserError(f"no study {name!r}: choose one of {', '.join(BUILDERS)}, all")
    study = Study(config)
    repeated = config.scale in ("small", "cpu") and name not in NOT_IN_ALL
    for seed in range(config.seeds or (2 if repeated else 1)):
        for each, build in BUILDERS.items():
            if each == name or (name == "all" and each not in NOT_IN_ALL):
                build(study, seed)
    study.end()
    kept = {job.name: job for job in study.jobs.values() if job.task not in config.skip}
    for job in kept.values():
        after = tuple(name for name in job.after if name in kept)
        kept[job.name] = dataclasses.replace(job, after=after)
    return sorted(kept.values(), key=lambda job: _depth(job, kept))


def _depth(job: Job, jobs: dict[str, Job]) -> int:
    return 1 + max((_depth(jobs[name], jobs) for name in job.after), default=-1)

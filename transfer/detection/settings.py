"""Flags of transfer/detect.py and proposals.py. Imports neither torch nor Detectron2."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from instdisc.cli import CommandConfig
from instdisc.errors import UserError
from instdisc.names import VOC_VARIABLE
from transfer.config import check, data_option, network_option, protocol_option, run_option

INIT = re.compile(r"ours|scratch|supervised:.+")
SearchMode = Literal["fast", "quality"]


def find_config(named: Path) -> Path:
    """A YAML file; `NAME` and `detection_configs/NAME.yaml` are found from any folder."""
    if named.is_file():
        return named
    from importlib.resources import files  # here: it takes longer to import than all else

    shipped = Path(str(files("detection_configs")))
    if (
        named.parent in (Path(), Path(shipped.name))
        and (shipped / named.with_suffix(".yaml").name).is_file()
    ):
        return shipped / named.with_suffix(".yaml").name
    known = sorted(p.stem for p in shipped.glob("fast*.yaml"))
    raise UserError(f"--cfg {named}: no such file: give a path, or one of {', '.join(known)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectConfig(CommandConfig):
    """Flags; everything about the detector itself is in the YAML file and the trailing keys."""

    PROG = "transfer/detect.py"
    DESCRIPTION = """
    Fine-tunes Fast or Faster R-CNN on Detectron2 from a pretrained backbone, and
    reports the mAP of VOC07: converts the backbone, proves that every tensor of it
    arrived, trains, evaluates, draws. With no data named the embedded images are
    used, with a recipe of minutes.
    """
    EPILOG = """
    examples:
      python transfer/detect.py --cfg detection_configs/faster_r50.yaml      newest ResNet-50 run
      python transfer/detect.py --cfg fast_alexnet --voc-root VOCdevkit --make-proposals
      python transfer/detect.py --cfg faster_r50 --init scratch --trials 3 SOLVER.IMS_PER_BATCH 1
      python transfer/detect.py --cfg fast_alexnet --init supervised:a.pth --voc-root VOCdevkit
      torchrun --nproc-per-node 8 transfer/detect.py --cfg faster_r50_syncbn --voc-root VOCdevkit
    Another SOLVER.IMS_PER_BATCH scales learning rate, steps and warm-up with it; keys that are
    given beside it stay as they are given. The same command again goes on where a stopped one was.
    """

    cfg: Path = protocol_option(
        Path("faster_r50"),
        "Detectron2 config; a bare name is looked up in detection_configs",
        aliases=("--config-file",),
        metavar="FILE",
    )
    init: str = network_option(
        "ours",
        "ours (the pretrained backbone), scratch (random, norms trained, nothing fixed), or "
        "supervised:FILE (any checkpoint that import_weights.py reads)",
        metavar="INIT",
    )
    weights: str | None = network_option(
        None,
        "for --init ours: a run folder, a backbone.pt, random:ARCH; the newest pretraining run "
        "of the config's architecture if not given",
        metavar="NAME",
    )
    voc_root: str | None = data_option(
        None,
        "VOCdevkit, its parent, or a folder in VOC layout, whose annotations name the classes; "
        "else $DETECTRON2_DATASETS; else the embedded images",
        metavar="DIR",
    )
    make_proposals: bool = data_option(
        False, "run selective search for the images that have no proposals (Fast R-CNN)"
    )
    trials: int = protocol_option(1, "runs with seeds SEED, SEED + 1, ...; mean and std of them")
    seed: int = protocol_option(0, "of the first trial")
    eval_only: bool = run_option(False, "evaluate what the run folder has, train nothing")
    resume: bool = run_option(True, "go on where the run in the folder stopped")
    num_gpus: int = run_option(
        0, "start one process for each of so many GPUs; torchrun does the same for several nodes"
    )
    device: Literal["auto", "cpu", "cuda"] = run_option("auto", "where to compute")
    pictures: int = run_option(8, "how many test images to draw with their detections")
    output: Path | None = run_option(
        None, "run folder; runs/detect/CONFIG-INIT if not given", metavar="DIR"
    )
    opts: tuple[str, ...] = protocol_option(
        (),
        "keys of the config to change, as Detectron2 takes them: SOLVER.MAX_ITER 900",
        metavar="KEY VALUE",
        positional=True,
    )

    def __post_init__(self) -> None:
        """Checks what the types cannot say."""
        check(
            (
                bool(INIT.fullmatch(self.init)),
                f"--init {self.init}: expected ours, scratch or supervised:FILE",
            ),
            (self.trials >= 1, f"--trials {self.trials}: at least one"),
            (self.seed >= 0, f"--seed {self.seed}: expected a number from 0"),
            (self.num_gpus >= 0, f"--num-gpus {self.num_gpus}: expected a number from 0"),
            (self.pictures >= 0, f"--pictures {self.pictures}: expected a number from 0"),
            (
                len(self.opts) % 2 == 0,
                f"trailing words come in pairs KEY VALUE, and {' '.join(self.opts)!r} are "
                f"{len(self.opts)}",
            ),
            (
                self.init == "ours" or self.weights is None,
                f"--weights is for --init ours, and --init {self.init} was given: leave one out",
            ),
        )
        if self.init.startswith("supervised:"):
            file = Path(self.init.partition(":")[2])
            check((file.is_file(), f"--init supervised: no file {file}"))
        find_config(self.cfg)

    @property
    def run_name(self) -> str:
        """What the run folder is called: config, and what the network starts from."""
        kind, _, file = self.init.partition(":")
        return f"{self.cfg.stem}-{kind}" + (f"-{Path(file).stem}" if file else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProposalsConfig(CommandConfig):
    """Proposals of a VOC list: made, imported or checked."""

    PROG = "transfer/proposals.py"
    DESCRIPTION = """
    Proposals for Fast R-CNN (section 4.4):
      make               run selective search
      import FILE...     read selective-search .mat or Detectron .pkl files
      check FILE         check a file, print its recall
    """
    EPILOG = """
    examples:
      python transfer/proposals.py make --voc-root VOCdevkit --split trainval
      python transfer/proposals.py import voc_2007_test.mat --voc-root VOCdevkit --split test
      python transfer/proposals.py check proposals.pkl --voc-root VOCdevkit --split test
    The same `make` again goes on where a stopped one was.
    """

    words: tuple[str, ...] = protocol_option(
        (), "make, import FILE... or check FILE", metavar="ACTION FILE", positional=True
    )
    voc_root: Path | None = data_option(
        None,
        f"VOCdevkit, its parent, or a folder in VOC layout; else ${VOC_VARIABLE}, else datasets",
        metavar="DIR",
    )
    year: str = data_option("2007", "2007 or 2012")
    split: str = data_option("trainval", "a list")
    mode: SearchMode = protocol_option("fast", "make: of selective search")
    out: Path | None = run_option(
        None, "make and import: the file to write; in runs/proposals if not given", metavar="FILE"
    )
    workers: int | None = run_option(
        None, "make: processes; one for each core if not given", aliases=["-j"]
    )

    def __post_init__(self) -> None:
        """Checks that an action has the files that it needs."""
        check(
            (self.action in ("make", "import", "check"), "name make, import or check"),
            (self.action != "make" or not self.files, "make takes no files: see --split"),
            (self.action != "import" or bool(self.files), "import: name at least one file"),
            (self.action != "check" or len(self.files) == 1, "check: name one file"),
        )

    @classmethod
    def recipe_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Refuses flags of another action, which would have no effect."""
        action = (given.get("words") or ("",))[0]
        unused = {"import": ("mode", "workers"), "check": ("mode", "workers", "out")}
        for name in unused.get(action, ()):
            check((name not in given, f"{action} has no --{name}"))
        return {}

    @property
    def action(self) -> str:
        """The first word."""
        return self.words[0] if self.words else ""

    @property
    def files(self) -> tuple[Path, ...]:
        """The other words."""
        return tuple(map(Path, self.words[1:]))

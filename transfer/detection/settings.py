"""Flags of transfer/detect.py and proposals.py. Imports neither torch nor Detectron2."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from instdisc.cli import CommandConfig
from instdisc.errors import UserError
from instdisc.names import TIMM, VOC_VARIABLE
from transfer.config import check, data_option, network_option, protocol_option, run_option

INIT = re.compile(r"ours|scratch|supervised:.+")
SearchMode = Literal["fast", "quality"]


def shipped_configs() -> dict[str, Path]:
    """The detectors of detection_configs by name, such as faster_r50 and coco/mask_r50_fpn."""
    from importlib.resources import files  # here: it takes longer to import than all else

    root = Path(str(files("detection_configs")))
    found = [*root.glob("fast*.yaml"), *root.glob("frozen/*.yaml"), *root.glob("coco/*.yaml")]
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(found)}


def find_config(named: Path) -> Path:
    """A YAML file; `NAME` and `detection_configs/NAME.yaml` are found from any folder."""
    if named.is_file():
        return named
    known = shipped_configs()
    bare = named.with_suffix("").as_posix().removeprefix("detection_configs/")
    if bare in known:
        return known[bare]
    raise UserError(f"--cfg {named}: no such file: give a path, or one of {', '.join(known)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectConfig(CommandConfig):
    """Flags; everything about the detector itself is in the YAML file and the trailing keys."""

    PROG = "transfer/detect.py"
    DESCRIPTION = """
    Fine-tunes Fast, Faster or Mask R-CNN on Detectron2 from a pretrained backbone,
    and reports the mAP of VOC07, or box and mask AP of COCO: converts the backbone,
    proves that every tensor of it arrived, trains, evaluates, draws. With no data
    named the embedded images are used, with a recipe of minutes.
    """
    EPILOG = """
    examples:
      python transfer/detect.py --cfg detection_configs/faster_r50.yaml      newest ResNet-50 run
      python transfer/detect.py --cfg fast_alexnet --voc-root VOCdevkit --make-proposals
      python transfer/detect.py --cfg faster_r50 --init scratch --trials 3 SOLVER.IMS_PER_BATCH 1
      python transfer/detect.py --cfg fast_alexnet --init supervised:a.pth --voc-root VOCdevkit
      torchrun --nproc-per-node 8 transfer/detect.py --cfg faster_r50_syncbn --voc-root VOCdevkit
      python transfer/detect.py --cfg coco/mask_r50_fpn --coco-root coco
      python transfer/detect.py --cfg coco/mask_r18_fpn --coco-train a.json --coco-test b.json
      python transfer/detect.py --weights timm:convnext_tiny --voc-root VOCdevkit
    torchrun starts one process for each GPU. Another SOLVER.IMS_PER_BATCH, or more processes than
    it has images, scales learning rate, steps and warm-up with it; keys that are given beside it
    stay as they are given. The same command again goes on where a stopped one was.
    """

    cfg: Path = protocol_option(
        Path("faster_r50"),
        "Detectron2 config; a name such as coco/mask_r50_fpn is looked up in detection_configs; "
        "faster_r50 if not given, for timm's networks faster_r50_fpn",
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
        "for --init ours: a run folder, a backbone.pt, random:ARCH, timm:NAME (configs with FPN); "
        "the newest pretraining run of the config's architecture if not given",
        metavar="NAME",
    )
    voc_root: str | None = data_option(
        None,
        "VOCdevkit, its parent, or a folder in VOC layout, whose annotations name the classes; "
        "else $DETECTRON2_DATASETS; else the embedded images",
        metavar="DIR",
    )
    coco_root: str | None = data_option(
        None,
        "for configs of coco/: the folder of train2017, val2017 and annotations/instances_*.json; "
        "else coco in $DETECTRON2_DATASETS; else the embedded images",
        metavar="DIR",
    )
    coco_train: Path | None = data_option(
        None, "any file in COCO's format to learn from; it names the classes", metavar="FILE"
    )
    coco_test: Path | None = data_option(
        None, "the file to evaluate on, with the same classes", metavar="FILE"
    )
    coco_images: Path | None = data_option(
        None, "the images of both files; each file's own folder if not given", metavar="DIR"
    )
    clip_boxes: int = data_option(
        0,
        "VOC: clip boxes that leave their image by so many pixels at most; others are refused",
        metavar="PIXELS",
        volatile=False,
    )
    make_proposals: bool = data_option(
        False, "run selective search for the images that have no proposals (Fast R-CNN)"
    )
    trials: int = protocol_option(1, "runs with seeds SEED, SEED + 1, ...; mean and std of them")
    seed: int = protocol_option(0, "of the first trial")
    eval_only: bool = run_option(False, "evaluate what the run folder has, train nothing")
    resume: bool = run_option(True, "go on where the run in the folder stopped")
    device: Literal["auto", "cpu", "cuda"] = run_option("auto", "where to compute")
    threads: int | None = run_option(
        None, "threads of this process on a CPU; one for each core if not given"
    )
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
            (self.threads is None or self.threads >= 1, "--threads must be at least 1"),
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
            (self.clip_boxes >= 0, f"--clip-boxes {self.clip_boxes}: expected a number from 0"),
            (
                (self.coco_train is None) == (self.coco_test is None),
                "--coco-train and --coco-test go together: give both",
            ),
            (
                self.coco_images is None or self.coco_train is not None,
                "--coco-images is for --coco-train and --coco-test",
            ),
            (
                self.coco_train is None or not (self.voc_root or self.coco_root or self.clip_boxes),
                "--coco-train names the images: leave out --voc-root, --coco-root and --clip-boxes",
            ),
            (
                self.voc_root is None or self.coco_root is None,
                "--voc-root and --coco-root: leave one out",
            ),
        )
        if self.init.startswith("supervised:"):
            file = Path(self.init.partition(":")[2])
            check((file.is_file(), f"--init supervised: no file {file}"))
        find_config(self.cfg)

    @classmethod
    def recipe_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """A timm network gets a detector with a pyramid."""
        is_timm = TIMM in str(given.get("weights") or "")
        return {"cfg": Path("faster_r50_fpn")} if is_timm else {}

    @property
    def recipe(self) -> str:
        """What results call the config: the name of a shipped one, else that of its file."""
        file = find_config(self.cfg).resolve()
        names = {path.resolve(): name for name, path in shipped_configs().items()}
        return names.get(file, self.cfg.stem)

    @property
    def run_name(self) -> str:
        """What the run folder is called: config, and what the network starts from."""
        kind, _, file = self.init.partition(":")
        if self.weights is not None and TIMM in self.weights:  # one recipe for many networks
            kind = self.weights.replace(":", "-").replace("/", "-")
        name = self.recipe.replace("/", "-")
        return f"{name}-{kind}" + (f"-{Path(file).stem}" if file else "")


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
      python transfer/proposals.py make --voc-root VOCdevkit --split trainval test
      python transfer/proposals.py import voc_2007_test.mat --voc-root VOCdevkit --split test
      python transfer/proposals.py check proposals.pkl --voc-root VOCdevkit --split test
    The same `make` again goes on where a stopped one was, and skips what is complete.
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
    split: tuple[str, ...] = data_option(("trainval",), "a list; make: one or several")
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
            (
                len(self.split) == 1
                or (len(self.split) > 1 and self.action == "make" and self.out is None),
                "--split: name one list, or several for `make` without --out",
            ),
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

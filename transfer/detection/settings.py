"""Flags of transfer/detect.py. Imports neither torch nor Detectron2."""

import dataclasses
import re
from importlib.resources import files
from pathlib import Path
from typing import Literal

from instdisc.errors import UserError
from transfer.config import check, data_option, network_option, protocol_option, run_option

INIT = re.compile(r"ours|scratch|supervised:.+")


def find_config(named: Path) -> Path:
    """A YAML file; `NAME` and `detection_configs/NAME.yaml` are found from any folder."""
    if named.is_file():
        return named
    shipped = Path(str(files("detection_configs")))
    if (
        named.parent in (Path(), Path(shipped.name))
        and (shipped / named.with_suffix(".yaml").name).is_file()
    ):
        return shipped / named.with_suffix(".yaml").name
    known = sorted(p.stem for p in shipped.glob("fast*.yaml"))
    raise UserError(f"--cfg {named}: no such file: give a path, or one of {', '.join(known)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DetectConfig:
    """Flags; everything about the detector itself is in the YAML file and the trailing keys."""

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

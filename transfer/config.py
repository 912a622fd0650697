"""Flags that the transfer commands share; settings.py beside the work of each adds its own.

Defaults are the paper's numbers. Imports no torch.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Literal

from instdisc.cli import CommandConfig, option
from instdisc.errors import UserError
from instdisc.names import DATA_VARIABLE

# One kind of option per heading of --help. What is volatile changes no result.
network_option = functools.partial(option, group="network")
data_option = functools.partial(option, group="data", volatile=True)
protocol_option = functools.partial(option, group="protocol")
run_option = functools.partial(option, group="run", volatile=True)


def check(*conditions: tuple[bool, str]) -> None:
    """Refuses a configuration with the message of the first condition that does not hold."""
    for holds, message in conditions:
        if not holds:
            raise UserError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferConfig(CommandConfig):
    """What every transfer command takes; a command's own dataclass adds its protocol."""

    REAL_DATA = f"--data DIR or {DATA_VARIABLE}"  # how data are named in place of the embedded ones

    weights: str | None = network_option(
        None,
        "a run folder, a backbone.pt, untrained:RUN (what the run started from), "
        "random:ARCH[:SEED], data-init:ARCH[:SEED], timm:NAME or random:timm:NAME; the newest "
        "pretraining run if not given",
        metavar="NAME",
    )
    data: str | None = data_option(
        None,
        "ImageFolder tree (<data>/train/<class>/<image> and val/), the same as lists or tar "
        "archives (docs/data.md), the folder of CIFAR's or Fashion-MNIST's official files, or "
        "`demo`; else $INSTDISC_DATA, else the images that the network was pretrained on",
        metavar="PATH",
    )
    skip_bad_images: bool = data_option(
        False, "leave out files that are no readable images, and say so", volatile=False
    )
    workers: int = data_option(4, "loader processes; results do not depend on it", aliases=["-j"])
    batch_size: int = run_option(256, "images per forward pass", aliases=["-b"])
    device: Literal["auto", "cpu", "cuda"] = run_option("auto", "where to compute")
    threads: int | None = run_option(
        None, "threads of this process on a CPU; one for each core if not given"
    )
    seed: int = run_option(0, "of everything that is drawn at random", volatile=False)
    output: Path | None = run_option(
        None, "folder of this run; runs/<command>/<network> if not given", metavar="DIR"
    )

    def __post_init__(self) -> None:
        """Refuses values that make no sense, with the fix; commands extend it."""
        check(
            (self.workers >= 0, "--workers must not be negative"),
            (self.batch_size >= 1, "--batch-size must be at least 1"),
            (self.seed >= 0, "--seed must not be negative"),
            (self.threads is None or self.threads >= 1, "--threads must be at least 1"),
        )

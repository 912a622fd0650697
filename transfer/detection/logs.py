"""Whose lines go where: ours to the screen and the file, Detectron2's to the file."""

import logging
import warnings
from pathlib import Path

from instdisc.runs.log import LOGGER, setup_logging


def route_logs(file: Path, *, is_main: bool) -> None:
    """Sends our log to screen and file, Detectron2's to the file alone."""
    setup_logging(file, is_main=is_main)
    for name in ("detectron2", "fvcore"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = False
        logger.setLevel(logging.INFO if is_main else logging.ERROR)
        for handler in LOGGER.handlers:
            if isinstance(handler, logging.FileHandler):
                logger.addHandler(handler)
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())


def quiet_libraries() -> None:
    """Keeps back what torch says about Detectron2's code, which no user of ours can change."""
    warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated")
    warnings.filterwarnings("ignore", message="torch.meshgrid")
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)

"""pretrain(config): the whole of a pretraining run, also for use from Python."""

import contextlib
from pathlib import Path

from instdisc.runs.locks import lock_folder
from instdisc.runs.log import LOGGER, setup_logging
from instdisc.training import dist
from pretrain.config import PretrainConfig
from pretrain.session import Session
from pretrain.trainer import Trainer


def pretrain(config: PretrainConfig) -> Path:
    """Trains, or goes on training, and returns the backbone's file."""
    process = dist.init_process(config.device)
    setup_logging(None, is_main=process.is_main)
    session = Session(config, process)
    backbone = session.output / "backbone.pt"
    try:
        with lock_folder(session.output) if process.is_main else contextlib.nullcontext():
            _train(session)
        return backbone
    finally:
        dist.close()


def _train(session: Session) -> None:
    config = session.config
    checkpoint = session.find_checkpoint()
    trainer = Trainer(session)
    if checkpoint is not None:
        trainer.restore(checkpoint)
    if trainer.step >= trainer.num_steps:
        LOGGER.info(f"{session.output} is finished ({config.epochs} epochs): nothing to do")
        return
    session.open_folder()
    LOGGER.info(session.describe(trainer.model))
    if trainer.step:
        LOGGER.info(f"going on after step {trainer.step} of {trainer.num_steps}")
    trainer.train()
    LOGGER.info(f"done: {session.output / 'backbone.pt'}")

"""One process, or one for each GPU: then the task."""

import os
import socket

import torch
from torch.multiprocessing.spawn import spawn

from instdisc.errors import UserError
from instdisc.runs.log import setup_logging
from instdisc.training import dist
from transfer.detection.logs import quiet_libraries
from transfer.detection.settings import DetectConfig


def launch(config: DetectConfig) -> None:
    """Runs the task in this process, or starts --num-gpus of them on this machine."""
    if config.num_gpus > torch.cuda.device_count():
        raise UserError(
            f"--num-gpus {config.num_gpus}, and this machine has {torch.cuda.device_count()}: "
            "leave it out to compute on the CPU"
        )
    if config.num_gpus < 2 or "RANK" in os.environ:
        _run(config)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(_run_rank, (config.num_gpus, port, config), nprocs=config.num_gpus)


def _run_rank(rank: int, world_size: int, port: int, config: DetectConfig) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    _run(config)


def _run(config: DetectConfig) -> None:
    quiet_libraries()  # before Detectron2 is imported, which warns already then
    from detectron2.utils import comm

    from transfer.detection.task import run_detect

    process = dist.init_process(config.device)
    setup_logging(None, is_main=process.is_main)
    if process.world_size > 1:
        comm.create_local_process_group(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    try:
        run_detect(config, process)
    finally:
        dist.close()

"""A small detection set and converted networks, for the tests that run Detectron2."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import start_processes

from instdisc.images.demo import write_detection, write_segmentation
from instdisc.images.transforms import InputSpec
from instdisc.networks.backbones import Embedding, backbone_payload, build_backbone
from instdisc.runs.checkpoint import save_checkpoint
from instdisc.training.seed import seeded
from transfer.detect import main


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six training and four test scenes in VOC layout."""
    return write_detection(tmp_path_factory.mktemp("voc"), num_trainval=6, num_test=4)


@pytest.fixture(scope="session")
def backbone_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A run folder's backbone.pt of an architecture, with norms that have seen something."""
    folder = tmp_path_factory.mktemp("backbones")

    def make(arch: str) -> Path:
        path = folder / arch / "backbone.pt"
        if not path.exists():
            with seeded(0, "test backbone"):
                model = Embedding(build_backbone(arch)).train()
                for _ in range(2):
                    model(torch.randn(4, 3, 64, 64))
            payload = {**backbone_payload(model), "input": InputSpec().to_dict()}
            save_checkpoint(path, "backbone", {**payload, "pretraining": {}})
        return path

    return make


@pytest.fixture(scope="session")
def coco_scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same scenes with masks, in COCO's format."""
    return write_segmentation(tmp_path_factory.mktemp("coco"), num_train=6, num_val=4)


def _run_rank(rank: int, world_size: int, port: int, argv: list[str]) -> None:
    if world_size > 1:
        os.environ.update(
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)},
            **{"LOCAL_WORLD_SIZE": str(world_size)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        )
    torch.set_num_threads(1)
    assert main(argv) == 0


@pytest.fixture
def run_processes() -> Callable[..., None]:
    """The command in so many processes, as torchrun starts them."""

    def run(world_size: int, *argv: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = (world_size, port, list(argv))
        # Forked: a fresh interpreter could not import this file.
        start_processes(_run_rank, arguments, nprocs=world_size, start_method="fork")

    return run

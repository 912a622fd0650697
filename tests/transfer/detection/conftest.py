"""A small detection set and converted networks, for the tests that run Detectron2."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from instdisc.images.demo import write_detection
from instdisc.images.transforms import InputSpec
from instdisc.networks.backbones import Embedding, backbone_payload, build_backbone
from instdisc.runs.checkpoint import save_checkpoint
from instdisc.training.seed import seeded


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

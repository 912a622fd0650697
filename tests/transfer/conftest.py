"""A tiny network, and a run folder that looks as if it had been pretrained."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from instdisc.images.transforms import InputSpec
from instdisc.networks import backbones
from instdisc.networks.backbones import Embedding, backbone_payload, build_backbone
from instdisc.runs.checkpoint import save_checkpoint
from instdisc.training.seed import seeded

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# As source, so that other interpreters can have it too. Free of batch statistics, so that its
# gradient does not depend on how a batch is cut over processes.
TINY = """
from torch import nn
from instdisc.networks import backbones

def tiny(stem, batch_norm):
    def stage(width, stride):
        return nn.Sequential(nn.Conv2d(width, 8, 3, stride), nn.GroupNorm(2, 8), nn.ReLU())
    stages = [stage(3, 2), *(stage(8, 1) for _ in range(4))]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())

backbones.ARCHS["tiny"] = backbones.Arch(tiny, 8, (8,) * 5, ("0", "1", "2", "3", "4"))
"""


@pytest.fixture
def tiny_source(monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes `tiny` an architecture of this interpreter; returns the code that does so in others."""
    monkeypatch.setattr(backbones, "ARCHS", dict(backbones.ARCHS))
    exec(TINY, {})
    return TINY


@pytest.fixture
def tiny_network(tiny_source: str, image_tree: Path, tmp_path: Path) -> Path:
    """The backbone.pt of a run that knows its data, the newest of the runs folder."""
    with seeded(0, "test"):
        model = Embedding(build_backbone("tiny"), 4)
    payload = {
        **backbone_payload(model),
        "input": InputSpec(size=24).to_dict(),
        "pretraining": {"config": {"data": str(image_tree)}, "dataset": image_tree.name},
    }
    file = tmp_path / "runs" / "pretrain" / "tiny" / "backbone.pt"
    save_checkpoint(file, "backbone", payload)
    return file


@pytest.fixture
def dump(tmp_path: Path) -> Callable[[Path], tuple[str, str]]:
    """Opens a page in a browser; its document afterwards, and all that the browser logged."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed: apt-get install chromium")

    def run(file: Path) -> tuple[str, str]:
        command = [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--enable-logging=stderr", "--hide-scrollbars"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000"),
            *("--dump-dom", file.as_uri()),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        return done.stdout, done.stderr

    return run

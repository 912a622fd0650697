"""A tiny network, and a run folder that looks as if it had been pretrained."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instdisc.images.sets import ImageSet
from instdisc.images.transforms import InputSpec
from instdisc.networks import backbones
from instdisc.networks.backbones import Embedding, backbone_payload, build_backbone
from instdisc.runs.checkpoint import save_checkpoint
from instdisc.training.seed import seeded
from transfer.finetuning.supervised import SupervisedTrainer

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def tiny_source(tiny_code: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes `tiny` an architecture of this interpreter; returns the code that does so in others."""
    monkeypatch.setattr(backbones, "ARCHS", dict(backbones.ARCHS))
    exec(tiny_code, {})
    return tiny_code


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
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[[Callable[..., int], list[str]], str]:
    """Runs a command that must end with exit code 2 and one line; the line."""

    def run(main: Callable[..., int], arguments: list[str]) -> str:
        try:
            code: int | str | None = main([*arguments, "--device", "cpu", "--workers", "0"])
        except SystemExit as exit:  # argparse's own refusals
            code = exit.code
        assert code == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        return str(line)

    return run


@pytest.fixture
def guard_validation(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[int], tuple[list[int], list[str]]]:
    """Lets nobody open a validation image before so many trainings have ended.

    Returns the steps of each training, and the split of each image that was opened.
    """

    def guard(num_trainings: int) -> tuple[list[int], list[str]]:
        trained: list[int] = []
        opened: list[str] = []
        inner_open, inner_train = ImageSet.open, SupervisedTrainer.train

        def guarded(self: ImageSet, index: int) -> Any:
            assert self.split == "train" or len(trained) == num_trainings, "opened too early"
            opened.append(self.split)
            return inner_open(self, index)

        def train(self: SupervisedTrainer) -> None:
            inner_train(self)
            trained.append(self.step)

        monkeypatch.setattr(ImageSet, "open", guarded)
        monkeypatch.setattr(SupervisedTrainer, "train", train)
        return trained, opened

    return guard


@pytest.fixture
def dump(tmp_path: Path) -> Callable[..., tuple[str, str]]:
    """Opens a page in a browser; its document afterwards, and all that the browser logged."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed: apt-get install chromium")

    def run(file: Path, *, dark: bool = False) -> tuple[str, str]:
        command = [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--enable-logging=stderr", "--hide-scrollbars", "--window-size=1700,1000"),
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=8000"),
            *("--dump-dom", file.as_uri()),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=True)
        return done.stdout, done.stderr

    return run

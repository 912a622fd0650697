"""What a run says once, and beside the untrained network's numbers."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from instdisc.runs.log import LOGGER
from instdisc.training.timing import StepClock
from pretrain.config import PretrainConfig
from pretrain.criterion import Normalizer
from pretrain.journal import Journal


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages of the run's logger, in order."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    monkeypatch.setattr(LOGGER, "handlers", [Keep()])
    monkeypatch.setattr(LOGGER, "level", logging.INFO)
    return lines


def open_journal(folder: Path, *, step: int = 0, **changes: Any) -> Journal:
    config = PretrainConfig(tensorboard=False, log_every=1, **changes)
    session: Any = SimpleNamespace(config=config, output=folder, is_main=True)
    folder.mkdir(exist_ok=True)
    return Journal(session, StepClock(torch.device("cpu")), step=step, steps_per_epoch=10)


def normalizer_with(drift: float) -> Normalizer:
    normalizer = Normalizer("fixed:100", 50)
    normalizer.estimate = torch.tensor(100.0 * drift)
    return normalizer


@pytest.mark.parametrize(("drift", "warns"), [(9.0, 0), (11.0, 1), (0.05, 1), (0.2, 0)])
def test_a_z_that_has_left_the_one_in_use_is_told_once_with_the_cure(
    tmp_path: Path, said: list[str], drift: float, warns: int
) -> None:
    journal = open_journal(tmp_path)
    for step in (2, 3):
        journal.tell_step(step, lambda: 10.0, 0.03, normalizer_with(drift))
    journal.close()
    found = [line for line in said if line.startswith("WARNING")]
    assert len(found) == warns
    assert all("--normalizer exact" in line and f"{drift:.3g} times" in line for line in found)


def test_collapsed_features_are_told_once(tmp_path: Path, said: list[str]) -> None:
    journal = open_journal(tmp_path)
    for epoch, cosine in ((1, 0.98), (2, 0.995), (3, 0.999)):
        journal.tell_epoch(10 * epoch, 5.0, {"rankme": 2.0, "mean_cosine": cosine})
    journal.close()
    assert [line for line in said if "collapsed" in line] == [
        line for line in said if line.startswith("WARNING epoch 2: ")
    ]


def test_the_untrained_numbers_stand_beside_the_trained_ones_also_after_a_resume(
    tmp_path: Path, said: list[str]
) -> None:
    before = {"knn_bank": 9.0, "knn_recomputed": 24.5, "rankme": 11.0, "mean_cosine": 0.9}
    after = {"knn_bank": 38.0, "knn_recomputed": 43.5, "rankme": 40.0, "mean_cosine": 0.1}
    journal = open_journal(tmp_path)
    journal.tell_untrained(before)
    journal.close()
    resumed = open_journal(tmp_path, step=10)
    resumed.tell_epoch(20, 5.0, after)
    resumed.close()
    assert said[0] == "INFO untrained  recomputed 24.50%  RankMe 11.0"
    assert "recomputed 43.50% (untrained 24.50)" in said[-1]
    assert "kNN bank 38.00%  " in said[-1]  # the bank of an untrained network is random


def test_without_a_monitor_nothing_is_said_of_the_untrained_network(
    tmp_path: Path, said: list[str]
) -> None:
    journal = open_journal(tmp_path)
    journal.tell_untrained({})
    journal.close()
    assert said == []

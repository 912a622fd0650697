"""A default that the paper states, or that its authors' code uses, has a line here."""

import dataclasses
import math

import pytest

from pretrain.config import RECIPES, PretrainConfig
from transfer.finetuning.settings import SemisupConfig
from transfer.nearest.settings import PAPER_NUM_NEIGHBORS, KnnConfig, RetrieveConfig
from transfer.probing.settings import LinearConfig

PAPER = {
    "temperature": 0.07,  # section 4.2: "tau = 0.07"
    "num_negatives": 4096,  # section 4.2
    "embedding_dim": 128,  # section 4.2
    "epochs": 200,  # section 4.2
    "batch_size": 256,  # section 4.2
    "lr": 0.03,  # section 4.2
    "lr_milestones": (120, 160),  # section 4.2: x0.1 every 40 epochs after the first 120
    "momentum": 0.9,  # section 4.2
    "objective": "nce",  # section 3.2
    "bank_momentum": 0.0,  # section 3.1: a row is replaced
    "num_neighbors": 200,  # section 3.4
    "train_fraction": 1.0,
    "weight_decay": 1e-4,  # authors' code
    "image_size": 224,  # authors' code, and the four below
    "min_crop_scale": 0.2,
    "flip": True,
    "stem": "imagenet",
    "negatives": "per-image",
}
AUTHORS_CIFAR = {
    "stem": "small",
    "batch_size": 128,
    "temperature": 0.1,
    "weight_decay": 5e-4,
    "image_size": 32,
    "flip": False,
}


@pytest.mark.parametrize("name", PAPER)
def test_default_is_the_papers(name: str) -> None:
    assert getattr(PretrainConfig(), name) == PAPER[name]


def test_cifar_recipe_is_the_authors() -> None:
    for name, value in AUTHORS_CIFAR.items():
        assert RECIPES["cifar"][name] == value, name


def test_the_learning_rate_falls_where_the_paper_says() -> None:
    from instdisc.training.schedules import step_decay

    config = PretrainConfig()
    rates = {
        e: step_decay(config.lr, e, config.lr_milestones) for e in (0, 119, 120, 159, 160, 199)
    }
    for epoch, rate in {0: 0.03, 119: 0.03, 120: 0.003, 159: 0.003, 160: 3e-4, 199: 3e-4}.items():
        assert math.isclose(rates[epoch], rate), epoch


TRANSFER = {
    KnnConfig: {"temperature": 0.07, "precision": "float32"},  # section 3.4; 600 MB for ImageNet
    SemisupConfig: {
        "epochs": 70,  # section 4.3, and the three below
        "lr": 0.01,
        "lr_milestones": (30, 60),
        "lr_factor": 0.1,
        "head_lr_scale": 1.0,  # everything is trained alike
        "subset": "random",
        "init": ("pretrained",),
    },
    LinearConfig: {"loss": "hinge"},  # section 4.2: a linear SVM
    RetrieveConfig: {"num_neighbors": 10},  # figure 5
}


@pytest.mark.parametrize("command", TRANSFER)
def test_a_readouts_default_is_the_papers(command: type) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(command)}
    assert {name: defaults[name] for name in TRANSFER[command]} == TRANSFER[command]
    assert PAPER_NUM_NEIGHBORS == 200

"""A default that the paper states, or that its authors' code uses, has a line here."""

import dataclasses
import math

import pytest

from instdisc.networks.backbones import build_backbone
from instdisc.training.seed import seeded
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
    "optimizer": "sgd",  # section 4.2
    "momentum": 0.9,  # section 4.2
    "objective": "nce",  # section 3.2
    "num_neighbors": 200,  # section 3.4
    "train_fraction": 1.0,
    "normalizer": "first-batches:1",  # section 3.2, Monte Carlo at the start; one batch: the code
}
# What the paper's text leaves open, or what does not train as the text has it.
AUTHORS = {
    "bank_momentum": 0.5,  # section 3.1 replaces the row, which runs away: docs/protocols.md
    "proximal_weight": 0.0,  # section 3.3 has the term, and gives no lambda; the code has no term
    "weight_decay": 1e-4,
    "image_size": 224,
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


@pytest.mark.parametrize("name", AUTHORS)
def test_default_is_the_authors_codes(name: str) -> None:
    assert getattr(PretrainConfig(), name) == AUTHORS[name]


def test_cifar_recipe_is_the_authors() -> None:
    for name, value in AUTHORS_CIFAR.items():
        assert RECIPES["cifar"][name] == value, name
    assert "bank_momentum" not in RECIPES["cifar"]  # 0.5, as everywhere


def test_the_cifar_stem_starts_as_torch_initialises_it() -> None:
    with seeded(0, "stem"):
        weight = build_backbone("resnet18", stem="small").trunk.conv1.weight
    bound = 1 / math.sqrt(3 * 3 * 3)  # of the uniform distribution; Kaiming's normal has none
    assert 0.95 * bound < weight.abs().max() <= bound


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

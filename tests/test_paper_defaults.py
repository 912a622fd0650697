"""A default that the paper states, or that its authors' code uses, has a line here."""

import dataclasses
import math

import pytest
from torchvision.transforms import v2

from instdisc.cli import parse
from instdisc.images.augmentation import RATIO
from instdisc.images.transforms import InputSpec, finetune_transform
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
    "standardize_projection": False,  # section 3.1: a linear layer, then L2
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
    LinearConfig: {
        "loss": "hinge",  # section 4.2: a linear SVM
        "epochs": 28,  # the paper does not say; as the benchmark that VISSL continues
    },
    RetrieveConfig: {"num_neighbors": 10},  # figure 5
}


@pytest.mark.parametrize("command", TRANSFER)
def test_a_readouts_default_is_the_papers(command: type) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(command)}
    assert {name: defaults[name] for name in TRANSFER[command]} == TRANSFER[command]
    assert PAPER_NUM_NEIGHBORS == 200


# Recipe -> lr of the backbone, lr of the classifier, epochs, milestones, factor, weight decay,
# momentum, Nesterov's, batch: the files that transfer/finetuning/settings.py names.
SEMISUP_RECIPES = {
    "openselfsup": (0.01, 1.0, 20, (12, 16), 0.2, 5e-4, 0.9, False, 4 * 64, "normal"),
    "mmselfsup": (0.01, 1.0, 20, (12, 16), 0.2, 5e-4, 0.9, False, 4 * 64, "normal"),
    "vissl": (0.05, 0.05, 70, (30,), 0.1, 0.0, 0.9, True, 8 * 32, "uniform"),
    "vissl-full": (0.1, 0.1, 105, (30, 60, 90, 100), 0.1, 0.0, 0.9, True, 8 * 32, "uniform"),
}


@pytest.mark.parametrize("recipe", SEMISUP_RECIPES)
def test_a_fine_tuning_recipe_is_its_sources(recipe: str) -> None:
    config = parse(SemisupConfig, ["--recipe", recipe])
    found = (
        *(config.lr, config.lr * config.head_lr_scale, config.epochs, config.lr_milestones),
        *(config.lr_factor, config.weight_decay, config.momentum, config.nesterov),
        *(config.batch_size, config.head_init),
    )
    assert found == SEMISUP_RECIPES[recipe]
    assert config.labeled == ((1.0,) if recipe == "vissl-full" else (0.01,))


# What the sources' own files state: moco main_lincls.py; VISSL eval_resnet_8gpu_transfer_in1k_
# linear.yaml with its heads eval_mlp and mlp; OpenSelfSup r50_multihead.py with MultiClsHead.
# A table of settings: recipe -> moco, VISSL, OpenSelfSup.
LINEAR_RECIPES = {
    "stage": (("backbone",), None, None),  # pooled conv5; conv1..conv5
    "pooling": ("grid", "vissl", "vissl"),  # windows: probing/test_pooled.py; moco pools no map
    "solver": ("sgd", "sgd", "sgd"),
    "loss": ("softmax", "softmax", "softmax"),
    "cost": ((), (), ()),
    "weight_decay": (0.0, 0.0005, 0.0001),
    "batch_norm": ("off", "affine", "plain"),
    "head_init": ("normal", "uniform", "normal"),
    "epochs": (100, 28, 90),
    "batch_size": (256, 8 * 32, 8 * 32),
    "lr": ((30.0,), (0.01,), (0.01,)),
    "milestones": ((60, 80), (8, 16, 24), (30, 60)),  # OpenSelfSup's third is its end
    "momentum": (0.9, 0.9, 0.9),
    "nesterov": (False, True, True),
    "augment": ("crops", "crops", "colors"),
}
# Fields that no protocol is made of, and what a recipe with one candidate does not hold out.
OTHER_FIELDS = {"recipe", "lr_milestones", "held_out", "skip_bad_images", "seed"}


@pytest.mark.parametrize(("column", "recipe"), [(0, "moco"), (1, "vissl"), (2, "openselfsup")])
def test_a_linear_recipe_is_its_sources(column: int, recipe: str) -> None:
    config = parse(LinearConfig, ["--recipe", recipe])
    published = {name: values[column] for name, values in LINEAR_RECIPES.items()}
    assert {name: getattr(config, name) for name in published} == published
    assert len(config.candidates) == 1
    protocol = {
        f.name for f in dataclasses.fields(LinearConfig) if f.metadata["group"] == "protocol"
    }
    assert protocol <= LINEAR_RECIPES.keys() | OTHER_FIELDS


def test_the_crops_of_linear_recipes_are_torchvisions_defaults() -> None:
    """RandomResizedCrop(224) and a flip; 256 and the centre 224 for evaluation."""
    spec = InputSpec()
    view = finetune_transform(spec)
    default = v2.RandomResizedCrop(224)
    assert (view.size, view.min_scale, 1.0) == (*default.size[:1], *default.scale)
    assert default.ratio == pytest.approx(RATIO)
    assert (view.flip, view.gray, view.strength, view.lighting) == (True, 0, 0, 0)
    colors = finetune_transform(spec, colors=True)
    assert (colors.strength, colors.hue, colors.lighting) == (0.4, False, 0.1)
    assert round(spec.size / spec.crop_ratio) == 256

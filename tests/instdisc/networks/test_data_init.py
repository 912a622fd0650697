"""Data-dependent initialisation: unit variance where it is promised, equal rates, no surprises."""

import math

import pytest
import torch
from torch import Tensor, nn

from instdisc.networks.backbones import Embedding, build_backbone
from instdisc.networks.data_init import (
    Unit,
    balance_layers,
    initialize,
    learning_rates,
    normalize_layers,
)
from instdisc.networks.weights import open_weights

PIXELS = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def build(arch: str, *, batch_norm: bool = True) -> Embedding:
    torch.manual_seed(0)
    return Embedding(build_backbone(arch, batch_norm=batch_norm), 16).eval()


def outputs(model: nn.Module, modules: list[nn.Module]) -> list[Tensor]:
    """What each module gives for the images, channels first."""
    found: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        found[module] = output.clone()  # a ReLU may overwrite it

    handles = [m.register_forward_hook(keep) for m in modules]
    with torch.no_grad():
        model(PIXELS)
    for handle in handles:
        handle.remove()
    return [found[m].transpose(0, 1).flatten(1) for m in modules]


@pytest.mark.parametrize(
    ("arch", "batch_norm"), [("resnet18", True), ("alexnet", True), ("alexnet", False)]
)
def test_every_layer_has_unit_variance_and_the_mean_is_taken_up(
    arch: str, batch_norm: bool
) -> None:
    model = build(arch, batch_norm=batch_norm)
    chain = nn.Sequential(model.backbone, model.projection)
    units = normalize_layers(chain, PIXELS)
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert {unit.layer for unit in units} == set(layers)
    for values in outputs(chain, [unit.layer for unit in units]):
        assert values.std(dim=1, correction=0).sub(1).abs().max() < 1e-3
    # The mean is gone behind the bias, or behind the norm that stands in for one.
    ends = [unit.layer if unit.layer.bias is not None else unit.norm for unit in units]
    assert None not in ends
    for values in outputs(chain, ends):  # type: ignore[arg-type]
        assert values.mean(dim=1).abs().max() < 1e-3


@pytest.mark.parametrize("arch", ["resnet18", "alexnet"])
def test_balancing_makes_rates_equal_and_leaves_the_function_alone(arch: str) -> None:
    model = build(arch)
    chain = nn.Sequential(model.backbone, model.projection)
    units = normalize_layers(chain, PIXELS)
    before = learning_rates(chain, units, PIXELS)
    with torch.no_grad():
        embedded = model(PIXELS)
    balance_layers(units, before)
    after = learning_rates(chain, units, PIXELS)
    assert max(before) / min(before) > 2  # else there was nothing to do
    assert max(after) / min(after) < 1.05
    with torch.no_grad():
        assert (model(PIXELS) * embedded).sum(dim=1).min() > 0.999
    norms = [unit.norm for unit in units if unit.norm is not None]
    assert norms
    for values in outputs(chain, norms):  # type: ignore[arg-type]
        assert values.std(dim=1, correction=0).sub(1).abs().max() < 0.05


def test_a_chain_without_norms_is_balanced_by_hand() -> None:
    """Two layers, rates 4 and 1: the target is 2, the first is scaled by sqrt(2)."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    old = [layer.weight.detach().clone() for layer in (first, second)]
    balance_layers([Unit(first), Unit(second)], [4.0, 1.0])
    assert torch.allclose(first.weight, old[0] * math.sqrt(2))
    # The second undoes sqrt(2), then becomes sqrt(2) * sqrt(1/2) = 1 of it.
    assert torch.allclose(second.weight, old[1] / math.sqrt(2))


def test_it_is_deterministic_and_seeded() -> None:
    one, same, other = (
        initialize(build("resnet18"), PIXELS, seed).state_dict() for seed in (0, 0, 1)
    )
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["projection.weight"], other["projection.weight"])
    assert all(bool(torch.isfinite(value).all()) for value in one.values())


def test_the_images_matter() -> None:
    one = initialize(build("resnet18"), PIXELS)
    other = initialize(build("resnet18"), PIXELS.flip(0) * 2 + 1)
    assert not torch.equal(one.projection.weight, other.projection.weight)


@pytest.mark.slow
def test_it_is_a_name_of_weights(image_tree: object) -> None:
    weights = open_weights("data-init:resnet18:1", data=str(image_tree))
    assert weights.name == "data-init:resnet18:1"
    assert weights.hash != open_weights("random:resnet18:1").hash
    assert not weights.backbone.training

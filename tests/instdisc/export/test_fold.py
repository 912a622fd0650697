import pytest
import torch
import torchvision
from torch import nn

from instdisc.export.fold import fold_batch_norm, fold_pair, fold_trunk


def make_pair(bias: bool) -> nn.Sequential:
    torch.manual_seed(0)
    pair = nn.Sequential(nn.Conv2d(3, 8, 3, bias=bias), nn.BatchNorm2d(8)).eval()
    norm = pair[1]
    nn.init.uniform_(norm.weight, -2, 2)
    nn.init.normal_(norm.bias)
    norm.running_mean.normal_()
    norm.running_var.uniform_(1e-6, 4)
    return pair


@pytest.mark.parametrize("bias", [True, False])
def test_one_convolution_equals_convolution_and_norm(bias):
    pair = make_pair(bias)
    weight, bias_folded = fold_pair(pair[0], pair[1])
    images = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    exact = pair.double()(images)
    folded = nn.functional.conv2d(images, weight.double(), bias_folded.double())
    # Only the storage in float32 may show: half a unit in the last place of every weight.
    scale = nn.functional.conv2d(images.abs(), weight.double().abs(), bias_folded.double().abs())
    assert ((folded - exact).abs() <= scale * 2**-24).all()


def test_every_number_is_rounded_once():
    pair = make_pair(True)
    weight, bias = fold_pair(pair[0], pair[1])
    conv, norm = pair[0].double(), pair[1].double()
    scale = norm.weight / (norm.running_var + norm.eps).sqrt()
    assert torch.equal(weight, (conv.weight * scale.view(-1, 1, 1, 1)).float())
    shifted = conv.bias * scale + (norm.bias - norm.running_mean * scale)
    assert torch.equal(bias, shifted.float())


def test_layers_are_numbered_as_without_norms():
    layers = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 1)
    )
    layers.append(nn.ReLU())
    assert list(fold_batch_norm(layers)) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert torch.equal(fold_batch_norm(layers)["3.weight"], layers[4].weight)


@pytest.mark.parametrize("arch", ["alexnet", "vgg16"])
def test_names_and_shapes_are_those_of_torchvision(arch, source):
    with torch.device("meta"):
        plain = getattr(torchvision.models, arch)().state_dict()
    expected = {k: v.shape for k, v in plain.items() if not k.startswith("classifier.6")}
    folded = fold_trunk(source(arch).backbone.trunk)
    assert {k: v.shape for k, v in folded.items()} == expected


def test_a_network_without_norms_stays_as_it_is(source):
    network = source("alexnet", batch_norm=False)
    folded = fold_trunk(network.backbone.trunk)
    assert folded.keys() == network.tensors.keys()
    assert all(torch.equal(folded[name], network.tensors[name]) for name in folded)

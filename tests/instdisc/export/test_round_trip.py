"""Ours -> a library's file -> imported: bit for bit, or the folded network where norms were folded.

The importers were written apart from the converters: agreement is evidence for both.
"""

import pytest
import torch

from instdisc.export.fold import fold_trunk
from instdisc.export.verify import CONVERTERS
from instdisc.importers.api import import_checkpoint

FILES = {
    "timm": "timm/model.safetensors",
    "detectron2": "detectron2.pkl",
    "torchvision": "torchvision.pth",
}
# VGG16 is half a gigabyte each way.
ARCHS = ("alexnet", pytest.param("vgg16", marks=pytest.mark.slow), "resnet18", "resnet50")


def assert_equal(trunk, expected, *, counters):
    assert trunk.keys() == expected.keys()
    for name, tensor in expected.items():
        if counters or not name.endswith("num_batches_tracked"):
            assert trunk[name].dtype == tensor.dtype, name
            assert torch.equal(trunk[name], tensor), name


def assert_same_pixels(spec, network, target):
    assert tuple(spec["mean"]) == pytest.approx(network.spec.mean, abs=1e-8)
    assert tuple(spec["std"]) == pytest.approx(network.spec.std, abs=1e-8)
    if target == "timm":
        assert spec["size"] == network.spec.size
        resized = round(network.spec.size / network.spec.crop_ratio)
        assert round(spec["size"] / spec["crop_ratio"]) == resized


@pytest.mark.parametrize("target", FILES)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_network_comes_back_from_every_library(arch, target, source, exported):
    network = source(arch)
    report = import_checkpoint(exported(arch, target) / FILES[target])
    payload = report.payload
    assert report.format in (target, "torchvision")  # timm's ResNets bear torchvision's names
    assert payload["arch"] == arch
    assert payload["stem"] == "imagenet"
    folded = arch == "alexnet" or (arch == "vgg16" and target == "detectron2")
    assert payload["batch_norm"] is not folded
    if folded:
        assert_equal(payload["trunk"], fold_trunk(network.backbone.trunk), counters=True)
    else:
        # Detectron2 has no place for the counters of batch norm.
        assert_equal(payload["trunk"], network.tensors, counters=target != "detectron2")
    if target != "torchvision":  # whose file is the bare tensors
        assert_same_pixels(payload["input"], network, target)


@pytest.mark.parametrize("target", ["torchvision", "detectron2"])  # timm's file is torchvision's
def test_a_network_without_norms_comes_back_as_it_was(target, source, tmp_path):
    network = source("alexnet", batch_norm=False)
    CONVERTERS[target].save(tmp_path, network)
    payload = import_checkpoint(tmp_path / FILES[target]).payload
    assert payload["batch_norm"] is False
    assert_equal(payload["trunk"], network.tensors, counters=True)


@pytest.mark.parametrize("arch", ["resnet18", pytest.param("alexnet", marks=pytest.mark.slow)])
def test_the_stem_for_32_pixels_comes_back_from_timm(arch, source, tmp_path):
    network = source(arch, stem="small")
    CONVERTERS["timm"].save(tmp_path, network)
    payload = import_checkpoint(tmp_path / FILES["timm"]).payload
    assert payload["stem"] == "small"
    trunk = network.tensors if arch == "resnet18" else fold_trunk(network.backbone.trunk)
    assert_equal(payload["trunk"], trunk, counters=True)
    assert_same_pixels(payload["input"], network, "timm")

"""Backbones: shapes of every tap, torchvision's names, the round trip through a checkpoint."""

from pathlib import Path

import pytest
import torch
import torchvision

from instdisc.errors import UserError
from instdisc.images.transforms import InputSpec
from instdisc.names import STAGES
from instdisc.networks.backbones import (
    ARCHS,
    Backbone,
    Embedding,
    StandardizedLinear,
    backbone_payload,
    build_backbone,
    restore_backbone,
)
from instdisc.networks.weights import load_backbone
from instdisc.runs.checkpoint import save_checkpoint

# Strides of conv1..conv5 relative to the image.
STRIDES = {
    "alexnet": (4, 8, 16, 16, 16),
    "vgg16": (1, 2, 4, 8, 16),
    "resnet18": (4, 4, 8, 16, 32),
    "resnet50": (4, 4, 8, 16, 32),
}


@pytest.mark.parametrize("arch", ARCHS)
def test_taps_have_the_declared_width_and_stride(arch: str) -> None:
    model = build_backbone(arch).eval()
    images = torch.randn(2, 3, 128, 128)
    with torch.inference_mode():
        maps = model.stages(images)
        assert model(images).shape == (2, model.feature_dim)
    assert tuple(maps) == STAGES
    for stage, channels, stride in zip(STAGES, model.channels, STRIDES[arch], strict=True):
        batch, width, height, _ = maps[stage].shape
        assert (batch, width) == (2, channels), stage
        assert abs(height - 128 / stride) <= 1, stage
        assert maps[stage].min() >= 0, f"{stage} is read before its ReLU"


def test_stages_leave_no_hooks_and_agree_with_the_forward_pass() -> None:
    model = build_backbone("resnet18").eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        pooled = model.stages(images)["conv5"].mean(dim=(2, 3))
        torch.testing.assert_close(pooled, model(images))
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("arch", ["resnet18", "resnet50", "vgg16"])
def test_weights_have_torchvisions_names(arch: str) -> None:
    builder = {"vgg16": "vgg16_bn"}.get(arch, arch)
    theirs = getattr(torchvision.models, builder)(weights=None).state_dict()
    ours = build_backbone(arch).trunk.state_dict()
    missing = {name for name in theirs if name not in ours}
    assert set(ours) <= set(theirs)
    assert missing <= {"fc.weight", "fc.bias", "classifier.6.weight", "classifier.6.bias"}


def test_alexnet_without_batch_norm_is_torchvisions() -> None:
    theirs = torchvision.models.alexnet(weights=None).eval()
    ours = build_backbone("alexnet", batch_norm=False).eval()
    ours.trunk.load_state_dict(
        {k: v for k, v in theirs.state_dict().items() if not k.startswith("classifier.6")}
    )
    images = torch.randn(1, 3, 96, 96)
    with torch.inference_mode():
        expected = theirs.classifier[:-1](theirs.avgpool(theirs.features(images)).flatten(1))
        assert torch.equal(ours(images), expected)


@pytest.mark.parametrize("arch", ["alexnet", "vgg16", "resnet18"])
def test_the_small_stem_keeps_32_pixels_alive(arch: str) -> None:
    model = build_backbone(arch, stem="small").eval()
    with torch.inference_mode():
        maps = model.stages(torch.randn(1, 3, 32, 32))
    assert maps["conv1"].shape[-1] == 32


def test_embeddings_are_unit_vectors_in_float32_under_autocast() -> None:
    model = Embedding(build_backbone("resnet18"), 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        features = model(torch.randn(3, 3, 32, 32))
    assert features.dtype == torch.float32
    torch.testing.assert_close(features.norm(dim=1), torch.ones(3))


def test_a_backbone_comes_back_from_its_checkpoint(tmp_path: Path) -> None:
    model = Embedding(build_backbone("resnet18"), 16)
    payload = {
        **backbone_payload(model),
        "input": InputSpec(size=64).to_dict(),
        "pretraining": {},
    }
    save_checkpoint(tmp_path / "backbone.pt", "backbone", payload)
    loaded = load_backbone(tmp_path)
    assert isinstance(loaded, Backbone)
    assert not loaded.training
    for name, value in model.backbone.trunk.state_dict().items():
        assert torch.equal(loaded.trunk.state_dict()[name], value), name


def test_unknown_arch_lists_the_known() -> None:
    with pytest.raises(UserError, match="alexnet, vgg16, resnet18, resnet50"):
        build_backbone("resnet51")


def test_a_standardised_projection_is_a_linear_layer_and_batch_norm() -> None:
    layer = StandardizedLinear(5, 3)
    norm = torch.nn.BatchNorm1d(3, affine=False)
    plain = torch.nn.Linear(5, 3)
    plain.load_state_dict({"weight": layer.weight, "bias": layer.bias})
    expected = torch.nn.Sequential(plain, norm)
    for _ in range(3):
        rows = torch.randn(8, 5)
        torch.testing.assert_close(layer(rows), expected(rows))
    rows = torch.randn(1, 5)
    torch.testing.assert_close(layer.eval()(rows), expected.eval()(rows))


def test_a_standardised_projection_comes_back_from_a_checkpoint() -> None:
    model = Embedding(build_backbone("resnet18"), 16, standardized=True)
    model(torch.randn(4, 3, 32, 32))  # moves the running statistics
    payload = {**backbone_payload(model), "input": InputSpec(32).to_dict()}
    restored = restore_backbone(payload).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(restored(images), model.eval()(images))

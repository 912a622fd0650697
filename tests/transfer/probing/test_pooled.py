"""Pooled stages of a frozen network: the 10K rule, one pass, and the proof that it is frozen."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from instdisc.errors import UserError
from instdisc.features.extract import build_extractor
from instdisc.names import STAGES
from instdisc.networks.backbones import ARCHS, build_backbone
from instdisc.networks.weights import open_weights
from transfer.probing.pooled import (
    NotFrozenError,
    PooledExtractor,
    StageFeatures,
    grid_side,
    pool_map,
    pooled_extractor,
)

# Channels -> side: AlexNet's published 9600/9216/9600/9600/9216 and ResNet-50's 12, 6, 4, 3, 2.
PUBLISHED = {96: 10, 256: 6, 384: 5, 64: 12, 512: 4, 1024: 3, 2048: 2}


@pytest.mark.parametrize(("channels", "side"), PUBLISHED.items())
def test_the_rule_gives_the_published_grids(channels: int, side: int) -> None:
    assert grid_side(channels) == side
    assert channels * side * side <= 10_000 < channels * (side + 1) ** 2


def test_every_arch_is_pooled_to_about_ten_thousand() -> None:
    for arch in ("alexnet", "vgg16", "resnet18", "resnet50"):
        for channels in ARCHS[arch].channels:
            assert 7_500 <= channels * grid_side(channels) ** 2 <= 10_000
    assert grid_side(20_000) == 1


def test_pooling_averages_and_never_invents_cells() -> None:
    maps = torch.randn(2, 2048, 6, 6)
    expected = maps.reshape(2, 2048, 2, 3, 2, 3).mean((3, 5)).flatten(1)
    torch.testing.assert_close(pool_map(maps), expected)
    assert pool_map(torch.randn(2, 64, 3, 5)).shape == (2, 64 * 3 * 5)


def test_the_published_windows_of_resnet50_are_the_sources() -> None:
    """VISSL's LINEAR_EVAL_FEAT_POOL_OPS_MAP and the widths of its heads."""
    published = {
        (64, 112): (nn.AvgPool2d(10, 10, 4), 9216),
        (256, 56): (nn.AvgPool2d(16, 8, 0), 9216),
        (512, 28): (nn.AvgPool2d(13, 5, 0), 8192),
        (1024, 14): (nn.AvgPool2d(8, 3, 0), 9216),
        (2048, 7): (nn.AvgPool2d(6, 1, 0), 8192),
    }
    for (channels, height), (pool, width) in published.items():
        maps = torch.randn(1, channels, height, height)
        rows = pool_map(maps, "vissl")
        assert torch.equal(rows, pool(maps).flatten(1))
        assert rows.shape[1] == width
    maps = torch.randn(1, 512, 7, 7)  # of ResNet-18, of which none are published
    assert torch.equal(pool_map(maps, "vissl"), pool_map(maps))


def test_vissl_reads_conv1_before_its_max_pooling() -> None:
    weights = open_weights("random:resnet50")
    stages = StageFeatures(weights, STAGES, "vissl")
    assert stages.widths == dict(zip(STAGES, (9216, 9216, 8192, 9216, 8192), strict=True))
    assert stages.channels == dict(zip(STAGES, (64, 256, 512, 1024, 2048), strict=True))
    images = torch.randn(1, 3, 224, 224)
    trunk: Any = weights.backbone.trunk
    with torch.no_grad():
        expected = trunk.relu(trunk.bn1(trunk.conv1(images)))
    assert expected.shape[2] == 112
    torch.testing.assert_close(stages(images)["conv1"], pool_map(expected, "vissl"))


@pytest.fixture
def features() -> StageFeatures:
    weights = open_weights("random:resnet18")
    small = dataclasses.replace(weights, spec=dataclasses.replace(weights.spec, size=64))
    return StageFeatures(small, (*STAGES, "backbone", "embedding"))


def test_all_stages_come_from_one_pass(features: StageFeatures) -> None:
    images = torch.randn(3, 3, 64, 64)
    passes = []
    backbone: Any = features.weights.backbone
    backbone.trunk.conv1.register_forward_hook(lambda *args: passes.append(1))
    rows = features(images)
    assert len(passes) == 1
    assert list(rows) == [*STAGES, "backbone", "embedding"]
    assert {stage: part.shape[1] for stage, part in rows.items()} == features.widths
    with torch.no_grad():
        maps = backbone.stages(images)
        for stage in STAGES:
            torch.testing.assert_close(rows[stage], pool_map(maps[stage]))
        torch.testing.assert_close(rows["backbone"], backbone(images))
        assert features.weights.embedding is not None
        torch.testing.assert_close(rows["embedding"], features.weights.embedding(images))
    joined = pooled_extractor(features, "half")(images)
    parts = features.split(joined)
    for stage in rows:
        torch.testing.assert_close(parts[stage], rows[stage])


def test_probes_of_the_embedding_use_the_features_that_knn_has_stored(
    features: StageFeatures,
) -> None:
    weights = features.weights
    alone = pooled_extractor(StageFeatures(weights, ["embedding"]), "half")
    assert alone == build_extractor(weights, "embedding")
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(alone(images), features(images)["embedding"])


@pytest.mark.slow
def test_networks_of_other_names_have_other_features() -> None:
    """The store's key: VGG16 has the same tensors with either stem."""
    weights = dataclasses.replace(open_weights("random:vgg16"), embedding=None)
    twin = dataclasses.replace(weights, backbone=build_backbone("vgg16", stem="small"))
    what = [pooled_extractor(StageFeatures(w, STAGES), "half").what for w in (weights, twin)]
    assert what[0] != what[1]


def test_nothing_of_the_network_can_be_trained(features: StageFeatures) -> None:
    holder = nn.Module()
    holder.features = features  # type: ignore[assignment] # not a module, and that is the point
    assert list(holder.parameters()) == []
    assert holder.state_dict() == {}
    holder.train()
    backbone = features.weights.backbone
    assert not any(module.training for module in backbone.modules())
    assert not any(p.requires_grad for p in backbone.parameters())


def test_a_batch_norm_that_moves_is_noticed(features: StageFeatures) -> None:
    before = features.weights.hash
    features(torch.randn(4, 3, 64, 64))
    features.prove_unchanged(before)
    backbone: Any = features.weights.backbone
    backbone.trunk.bn1.train()
    features(torch.randn(4, 3, 64, 64))
    with pytest.raises(NotFrozenError, match="changed while probes were trained"):
        features.prove_unchanged(before)


def test_a_moved_weight_is_noticed(features: StageFeatures) -> None:
    before = features.weights.hash
    backbone: Any = features.weights.backbone
    with torch.no_grad():
        backbone.trunk.layer4[1].conv2.weight[0, 0, 0, 0] += 1e-6
    with pytest.raises(NotFrozenError):
        features.prove_unchanged(before)


def test_features_too_large_for_half_precision_are_refused() -> None:
    def extractor(largest: Any) -> PooledExtractor:
        return PooledExtractor("conv1", "conv1", lambda images: 1e5 * images, largest=largest)

    assert extractor(float("inf"))(torch.ones(1, 2)).max() == 1e5
    with pytest.raises(UserError, match="--precision float32"):
        extractor(65504.0)(torch.ones(1, 2))


def test_a_network_without_projection_has_no_embedding() -> None:
    bare = dataclasses.replace(open_weights("random:resnet18"), embedding=None)
    with pytest.raises(UserError, match="no projection: use --stage backbone"):
        StageFeatures(bare, ["embedding"])

"""timm's networks behind the suite's interface: widths, stages, pixels, and refusals."""

import time
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file
from timm.data.config import resolve_model_data_config
from timm.data.transforms_factory import create_transform

from instdisc.errors import UserError
from instdisc.images.transforms import InputSpec, eval_transform
from instdisc.networks.backbones import Embedding, backbone_payload, build_any, restore_backbone
from instdisc.networks.timm_backbones import TimmBackbone, build_timm, find_spec
from instdisc.networks.weights import open_weights
from instdisc.runs.checkpoint import weights_hash
from instdisc.training.seed import seeded

PYRAMID = ("stage1", "stage2", "stage3", "stage4")
# Width of the features, stages and their widths.
NETWORKS = {
    "resnet18": (512, (*PYRAMID, "stage5"), (64, 64, 128, 256, 512)),
    "resnet50d": (2048, (*PYRAMID, "stage5"), (64, 256, 512, 1024, 2048)),
    "convnext_tiny": (768, PYRAMID, (96, 192, 384, 768)),
    "swin_tiny_patch4_window7_224": (768, PYRAMID, (96, 192, 384, 768)),
    "mobilenetv3_large_100": (1280, (*PYRAMID, "stage5"), (16, 24, 40, 112, 960)),
    "vit_small_patch16_224": (384, ("block3", "block6", "block9", "block12"), (384,) * 4),
    "efficientnet_b0": (1280, (*PYRAMID, "stage5"), (16, 24, 40, 112, 320)),
    # Without `forward_intermediates`; tuples and lists as maps; no maps; no stated width.
    "vgg11": (4096, (*PYRAMID, "stage5", "stage6"), (64, 128, 256, 512, 512, 512)),
    "dpn68b": (832, (*PYRAMID, "stage5"), (10, 144, 320, 704, 832)),
    "selecsls42": (1280, (*PYRAMID, "stage5", "stage6"), (32, 128, 288, 480, 1024, 1280)),
    "convit_tiny": (192, (), ()),
    "caformer_s18": (512, PYRAMID, (64, 128, 320, 512)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_widths_and_stages_are_what_a_forward_pass_gives(name: str) -> None:
    width, stages, channels = NETWORKS[name]
    with torch.device("meta"), torch.no_grad():  # shapes alone: nothing is initialised
        backbone = build_timm(name, size=64).eval()
        images = torch.zeros(2, 3, 64, 64)
        features, maps = backbone(images), backbone.stages(images)
    assert (backbone.feature_dim, backbone.stage_names, backbone.channels) == NETWORKS[name]
    assert features.shape == (2, width)
    assert tuple(maps) == stages
    assert tuple(m.shape[1] for m in maps.values()) == channels
    sides = [m.shape[2] for m in maps.values()]
    assert all(m.dim() == 4 for m in maps.values())
    assert sides == sorted(sides, reverse=True)


@pytest.mark.parametrize("name", ["test_efficientnet", "test_vit2"])
@torch.no_grad()
def test_features_are_what_the_classifier_sees_and_stages_timms_own(name: str) -> None:
    backbone = build_timm(name, size=32).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    trunk = backbone.trunk
    expected = trunk.forward_head(trunk.forward_features(images), pre_logits=True)
    assert torch.equal(backbone(images), expected)
    all_maps = trunk.forward_intermediates(images, intermediates_only=True)
    numbers = [1, 3, 5, 7] if name == "test_vit2" else range(5)
    for found, number in zip(backbone.stages(images).values(), numbers, strict=True):
        assert torch.equal(found, all_maps[number])


# Centre crops with sides that rounding decides, a squashed one, a bilinear one.
@pytest.mark.parametrize(
    "name",
    ["convnext_tiny", "vit_small_patch16_224", "vit_base_patch16_siglip_224", "vgg11", "resnet10t"],
)
@pytest.mark.parametrize("shape", [(131, 97), (300, 500)])
def test_images_are_prepared_as_timm_prepares_them(name: str, shape: tuple[int, int]) -> None:
    with torch.device("meta"):
        trunk = timm.create_model(name, num_classes=0)
    theirs = create_transform(**resolve_model_data_config(trunk), is_training=False)
    pixels = np.random.default_rng(0).integers(0, 256, (*shape, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    found = eval_transform(find_spec(trunk))(image)
    torch.testing.assert_close(found, theirs(image), rtol=0, atol=1e-6)


def test_random_weights_by_name_and_seed() -> None:
    one, same, other = (
        open_weights(f"random:timm:test_convnext{seed}") for seed in ("", ":0", ":1")
    )
    assert one.hash == same.hash != other.hash
    assert (one.backbone.arch, other.name) == ("timm:test_convnext", "random:timm:test_convnext:1")
    assert one.embedding is not None
    assert one.spec == InputSpec(160, (0.5,) * 3, (0.5,) * 3, 160 / 168, "bicubic")


@pytest.mark.parametrize("name", ["test_convnext", "test_vit"])
def test_a_checkpoint_gives_the_network_back_at_its_size(name: str) -> None:
    with seeded(0, "test"):
        model = Embedding(build_any(f"timm:{name}", size=48), 8)
    payload = {**backbone_payload(model), "input": InputSpec(size=48).to_dict()}
    restored = restore_backbone(payload)
    assert isinstance(restored, Embedding)
    assert isinstance(restored.backbone, TimmBackbone)
    assert weights_hash(restored.state_dict()) == weights_hash(model.state_dict())
    images = torch.randn(1, 3, 48, 48)
    assert torch.equal(restored.eval()(images), model.eval()(images))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("random:timm:no_such_model", "timm cannot make no_such_model"),
        ("random:timm:test_vit:x", "random:ARCH:SEED"),
        ("data-init:timm:test_vit", "use random:timm:test_vit"),
        ("timm:no_such_model", "timm cannot make no_such_model"),
        ("timm:local-dir:nowhere", "timm cannot make local-dir:nowhere"),
    ],
)
def test_names_that_mean_nothing(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=words):
        open_weights(name)


def test_a_checkpoint_leads_to_no_other_file_and_no_download() -> None:
    payload = {**backbone_payload(build_any("timm:test_convnext")), "input": {"size": 32}}
    for name in ("hf-hub:someone/something", "local-dir:somewhere"):
        with pytest.raises(UserError, match="unknown arch"):
            restore_backbone({**payload, "arch": f"timm:{name}"})


def test_a_hub_out_of_reach_is_one_line_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    before = constants.HF_HUB_OFFLINE
    started = time.monotonic()
    with pytest.raises(UserError, match=r"does not answer: take timm:local-dir:DIR"):
        open_weights("timm:test_convnext")
    assert time.monotonic() - started < 5
    assert before == constants.HF_HUB_OFFLINE


@pytest.mark.parametrize("name", ["test_vit", "mixer_s32_224", "vgg11"])
def test_an_image_size_that_a_network_cannot_take(name: str) -> None:
    with pytest.raises(UserError, match="timm"), torch.device("meta"):
        build_timm(name, size=24)


def test_weights_in_the_cache_need_no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    model = timm.create_model("test_convnext", num_classes=1000)
    entry = tmp_path / f"models--{model.pretrained_cfg['hf_hub_id'].replace('/', '--')}"
    (entry / "refs").mkdir(parents=True)
    (entry / "refs" / "main").write_text("0" * 40)
    (entry / "snapshots" / ("0" * 40)).mkdir(parents=True)
    save_file(model.state_dict(), entry / "snapshots" / ("0" * 40) / "model.safetensors")
    opened = open_weights("timm:test_convnext")
    images = torch.randn(1, 3, 64, 64)
    features = model.eval().forward_head(model.forward_features(images), pre_logits=True)
    assert torch.equal(opened.backbone(images), features)

"""The exported file in whole detectors, whose names differ, and our two backbones in Detectron2."""

import pickle

import numpy as np
import pytest
import torch
import yaml
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import get_cfg
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_backbone, build_model

from instdisc.errors import UserError
from instdisc.export.detectron2_backbones import PlainBackbone
from instdisc.export.to_detectron2 import (
    detectron2_config,
    resnet_name,
    save_detectron2,
    to_detectron2,
)


def merged_config(folder, *overrides):
    cfg = get_cfg()
    cfg.merge_from_file(str(folder / "detectron2.yaml"))
    cfg.merge_from_list(["MODEL.DEVICE", "cpu", *overrides])
    return cfg


def loaded_names(model, folder, tensors):
    """Names of the file's tensors that some tensor of the model equals, by its name's end."""
    DetectionCheckpointer(model).load(str(folder / "detectron2.pkl"))
    state = model.state_dict()
    found = set()
    for name, tensor in tensors.items():
        places = [key for key in state if key == name or key.endswith("." + name)]
        assert len(places) == 1, f"{name} has the places {places}"
        assert torch.equal(state[places[0]], tensor), name
        found.add(name)
    return found, state


def test_resnet50_fills_a_c4_detector_with_res5_in_its_head(source, exported):
    folder, tensors = exported("resnet50", "detectron2"), to_detectron2(source("resnet50"))
    model = build_model(merged_config(folder))
    found, state = loaded_names(model, folder, tensors)
    assert found == tensors.keys()
    assert "roi_heads.res5.0.conv1.weight" in state
    assert "backbone.res5.0.conv1.weight" not in state


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_resnets_fill_an_fpn_detector(arch, source, exported):
    folder, tensors = exported(arch, "detectron2"), to_detectron2(source(arch))
    stages = ["res2", "res3", "res4", "res5"]
    levels = ["p2", "p3", "p4", "p5"]
    cfg = merged_config(
        folder,
        *("MODEL.BACKBONE.NAME", "build_resnet_fpn_backbone"),
        *("MODEL.RESNETS.OUT_FEATURES", stages, "MODEL.FPN.IN_FEATURES", stages),
    )
    assert build_backbone(cfg).output_shape().keys() == {*levels, "p6"}
    found, state = loaded_names(build_backbone(cfg), folder, tensors)
    assert found == tensors.keys()
    assert "bottom_up.stem.conv1.weight" in state


def test_alexnet_fills_a_detector_down_to_its_box_head(source, exported):
    folder, tensors = exported("alexnet", "detectron2"), to_detectron2(source("alexnet"))
    model = build_model(merged_config(folder))
    found, state = loaded_names(model, folder, tensors)
    assert found == tensors.keys()
    assert found <= state.keys()  # full names: nothing was left to matching
    images = [{"image": torch.zeros(3, 96, 96, dtype=torch.uint8)}]
    with torch.no_grad():
        assert "instances" in model.eval()(images)[0]


@pytest.mark.parametrize("arch", ["alexnet", "resnet18"])
def test_the_file_is_a_pickle_of_arrays(arch, exported):
    content = pickle.loads((exported(arch, "detectron2") / "detectron2.pkl").read_bytes())
    assert content.keys() == {"model", "__author__", "matching_heuristics"}
    assert content["__author__"] == "instdisc"
    assert content["matching_heuristics"] is (arch == "resnet18")
    assert {type(array) for array in content["model"].values()} == {np.ndarray}
    assert {array.dtype for array in content["model"].values()} == {np.dtype("float32")}
    assert not [name for name in content["model"] if "num_batches_tracked" in name]


@pytest.mark.parametrize(
    ("name", "renamed"),
    [
        ("conv1.weight", "stem.conv1.weight"),
        ("bn1.running_mean", "stem.conv1.norm.running_mean"),
        ("layer1.0.conv1.weight", "res2.0.conv1.weight"),
        ("layer4.2.bn3.bias", "res5.2.conv3.norm.bias"),
        ("layer2.0.downsample.0.weight", "res3.0.shortcut.weight"),
        ("layer2.0.downsample.1.running_var", "res3.0.shortcut.norm.running_var"),
    ],
)
def test_resnet_names(name, renamed):
    assert resnet_name(name) == renamed


def test_the_sidecar_holds_what_detectron2_gets_wrong_by_itself(source, exported):
    folder = exported("resnet18", "detectron2")
    assert yaml.safe_load((folder / "detectron2.yaml").read_text()) == detectron2_config(
        source("resnet18")
    )
    cfg = merged_config(folder)
    assert cfg.INPUT.FORMAT == "RGB"
    assert pytest.approx([127.5, 114.75, 102.0]) == cfg.MODEL.PIXEL_MEAN
    assert pytest.approx([63.75, 51.0, 76.5]) == cfg.MODEL.PIXEL_STD
    assert cfg.MODEL.RESNETS.DEPTH == 18
    assert cfg.MODEL.RESNETS.RES2_OUT_CHANNELS == 64
    assert cfg.MODEL.RESNETS.STRIDE_IN_1X1 is False


@pytest.mark.parametrize(
    ("arch", "channels", "frozen"),
    [
        # Convolutions of the first two stages: AlexNet one each, VGG16 two each.
        ("alexnet", 256, {0: 0, 1: 1, 2: 2}),
        ("vgg16", 512, {0: 0, 1: 2, 2: 4}),
    ],
)
def test_plain_backbones_end_at_stride_16_and_freeze_from_below(arch, channels, frozen):
    cfg = get_cfg()
    cfg.MODEL.BACKBONE.NAME = f"build_{arch}_backbone"
    for freeze_at, expected in frozen.items():
        cfg.MODEL.BACKBONE.FREEZE_AT = freeze_at
        backbone = build_backbone(cfg)
        trainable = [p.requires_grad for p in backbone.parameters() if p.dim() == 4]
        assert trainable == [False] * expected + [True] * (len(trainable) - expected)
    assert backbone.output_shape() == {"conv5": ShapeSpec(channels=channels, stride=16)}
    with torch.no_grad():
        maps = backbone(torch.rand(1, 3, 160, 224))
    assert list(maps) == ["conv5"]
    height, width = maps["conv5"].shape[2:]
    assert abs(height - 160 / 16) <= 1
    assert abs(width - 224 / 16) <= 1
    assert maps["conv5"].std() > 0


def test_a_plain_backbone_starts_random_and_finite():
    first, second = PlainBackbone("alexnet"), PlainBackbone("alexnet")
    assert all(p.isfinite().all() for p in first.parameters())
    assert not torch.equal(first.features[0].weight, second.features[0].weight)


def test_the_stem_for_32_pixels_is_refused_with_the_way_out(source, tmp_path):
    with pytest.raises(UserError, match="--to timm"):
        save_detectron2(tmp_path, source("resnet18", stem="small"))
    assert not list(tmp_path.iterdir())

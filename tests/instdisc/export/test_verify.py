"""Every arch through every library, and files with one fault each, which must be named."""

import dataclasses
import json
import logging
import pickle
import shutil

import pytest
import safetensors.torch
import torch

from instdisc.errors import UserError
from instdisc.export.contract import build_source
from instdisc.export.verify import CONVERTERS, difference, verify_target
from instdisc.importers.api import import_checkpoint
from instdisc.names import STAGES
from instdisc.networks.backbones import build_backbone

ARCHS = ("alexnet", "vgg16", "resnet18", "resnet50")
TARGETS = ("timm", "detectron2", "torchvision")
# Tensors of the libraries' own models, without the class scores: weight and bias of 7 or 15 layers
# of AlexNet or VGG16; a ResNet's weights; five (Detectron2: four) more for each norm.
NUM_TENSORS = {
    "alexnet": {"timm": 14, "torchvision": 14, "detectron2": 14},
    "vgg16": {"timm": 95, "torchvision": 95, "detectron2": 30},
    "resnet18": {"timm": 120, "torchvision": 120, "detectron2": 100},
    "resnet50": {"timm": 318, "torchvision": 318, "detectron2": 265},
}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("arch", ARCHS)
def test_all_stages_agree_on_fixed_images(arch, target, source, exported):
    check = verify_target(exported(arch, target), target, source(arch))
    assert check.num_tensors == NUM_TENSORS[arch][target]
    assert set(STAGES) <= check.differences.keys()
    assert check.largest_difference <= 1e-4
    if arch in ("alexnet", "vgg16"):
        assert {"fc6", "fc7"} <= check.differences.keys()
    assert f"{check.num_tensors} of {check.num_tensors} tensors" in str(check)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "arch", ["alexnet", pytest.param("vgg16", marks=pytest.mark.slow), "resnet18", "resnet50"]
)
def test_all_stages_agree_on_photographs(arch, target, source, exported, photos):
    check = verify_target(exported(arch, target), target, source(arch), photos)
    assert check.num_tensors == NUM_TENSORS[arch][target]
    assert check.largest_difference <= 1e-4


def test_weights_of_a_trained_network_agree(shared_data, photos, tmp_path):
    path = shared_data / "weights" / "resnet18_trunk_imagenet_fp16.pth"
    trained = build_source(import_checkpoint(path).payload)
    for target in TARGETS:
        CONVERTERS[target].save(tmp_path, trained)
        check = verify_target(tmp_path, target, trained, photos)
        assert check.num_tensors == NUM_TENSORS["resnet18"][target]


def test_differences_are_relative_and_see_small_activations():
    reference = torch.tensor([0.01, -0.02])
    assert difference(reference + 1e-4, reference) == pytest.approx(5e-3, rel=1e-4)
    assert difference(1e6 * reference + 1, 1e6 * reference) == pytest.approx(5e-5, rel=1e-2)
    assert difference(reference[:1], reference) == float("inf")
    assert not difference(reference * float("nan"), reference) <= 1e-4
    assert difference(torch.full((2,), 1e-9), torch.zeros(2)) < 1e-4


def edit_torchvision(folder, change):
    state = torch.load(folder / "torchvision.pth", weights_only=True)
    change(state)
    torch.save(state, folder / "torchvision.pth")


def edit_timm(folder, change):
    state = safetensors.torch.load_file(folder / "timm" / "model.safetensors")
    change(state)
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    safetensors.torch.save_file(state, folder / "timm" / "model.safetensors")


def edit_detectron2(folder, change):
    content = pickle.loads((folder / "detectron2.pkl").read_bytes())
    state = {name: torch.from_numpy(array) for name, array in content["model"].items()}
    change(state)
    content["model"] = {name: tensor.numpy() for name, tensor in state.items()}
    (folder / "detectron2.pkl").write_bytes(pickle.dumps(content))


EDIT = {"torchvision": edit_torchvision, "timm": edit_timm, "detectron2": edit_detectron2}
BLOCK = {"torchvision": "layer2.1.", "timm": "layer2.1.", "detectron2": "res3.1."}
FIRST = {"torchvision": "conv1.weight", "timm": "conv1.weight", "detectron2": "stem.conv1.weight"}


@pytest.fixture
def tampered(exported, tmp_path):
    """Makes a copy of a converted folder and changes its tensors."""

    def make(arch, target, change=None):
        folder = tmp_path / "tampered"
        shutil.copytree(exported(arch, target), folder)
        if change is not None:
            EDIT[target](folder, change)
        return folder

    yield make
    shutil.rmtree(tmp_path / "tampered")


def refusal(folder, target, source):
    with pytest.raises(UserError) as caught:
        verify_target(folder, target, source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("target", TARGETS)
def test_an_unchanged_copy_passes(target, source, tampered):
    folder = tampered("resnet18", target, lambda state: None)
    verify_target(folder, target, source("resnet18"))


@pytest.mark.parametrize("target", TARGETS)
def test_a_removed_tensor_is_named(target, source, tampered):
    name = BLOCK[target] + "conv2.weight"
    folder = tampered("resnet18", target, lambda state: state.pop(name))
    assert name in refusal(folder, target, source("resnet18"))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dims", [(0, 1), (2, 3)])
def test_a_transposed_tensor_is_named_with_its_stage_and_those_behind(
    target, dims, source, tampered
):
    name = BLOCK[target] + "conv2.weight"

    def transpose(state):
        state[name] = state[name].transpose(*dims)

    message = refusal(tampered("resnet18", target, transpose), target, source("resnet18"))
    assert name in message
    named = message.partition("above")[2]
    assert [stage for stage in STAGES if stage in named] == ["conv3", "conv4", "conv5"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_tensor_transposed_into_another_shape_is_named(target, source, tampered):
    name = "layer2.0.conv1.weight" if target != "detectron2" else "res3.0.conv1.weight"

    def transpose(state):
        state[name] = state[name].transpose(0, 1)

    assert name in refusal(tampered("resnet18", target, transpose), target, source("resnet18"))


@pytest.mark.parametrize("target", TARGETS)
def test_weights_turned_to_bgr_are_named(target, source, tampered):
    def to_bgr(state):
        state[FIRST[target]] = state[FIRST[target]].flip(1)

    message = refusal(tampered("resnet18", target, to_bgr), target, source("resnet18"))
    assert FIRST[target] in message
    assert "conv1" in message.partition("above")[2]


def test_batch_norm_statistics_are_compared(source, tampered):
    name = "res5.0.conv2.norm.running_var"

    def nudge(state):
        state[name] = state[name] * 1.001

    message = refusal(tampered("resnet18", "detectron2", nudge), "detectron2", source("resnet18"))
    assert name in message
    assert "99 of 100 tensors" in message


@pytest.mark.parametrize("target", ["timm", "torchvision"])
def test_an_additional_tensor_is_named(target, source, tampered):
    def add(state):
        state["layer5.weight"] = torch.zeros(1)

    folder = tampered("resnet18", target, add)
    assert "layer5.weight" in refusal(folder, target, source("resnet18"))


@pytest.mark.parametrize("target", TARGETS)
def test_a_mistake_of_the_converter_itself_shows_in_the_stages(
    target, source, tampered, monkeypatch
):
    one, other = BLOCK[target] + "conv1.weight", BLOCK[target] + "conv2.weight"

    def swap(state):
        state[one], state[other] = state[other], state[one]

    def convert(network):
        state = dict(right.convert(network))
        swap(state)
        return state

    right = CONVERTERS[target]
    monkeypatch.setitem(CONVERTERS, target, dataclasses.replace(right, convert=convert))
    message = refusal(tampered("resnet18", target, swap), target, source("resnet18"))
    total = NUM_TENSORS["resnet18"][target]
    assert f"{total} of {total} tensors" in message
    assert "conv3" in message
    assert "missing" not in message


def test_detectron2_names_that_match_nothing_fail_although_detectron2_only_warns(
    source, tampered, caplog
):
    def rename(state):
        for name in list(state):
            state[f"elsewhere.{name}.x"] = state.pop(name)

    message = refusal(tampered("resnet18", "detectron2", rename), "detectron2", source("resnet18"))
    assert "0 of 100 tensors" in message
    assert not caplog.records


def test_a_missing_tensor_that_equals_its_initial_value_is_still_missing(payload, tmp_path):
    untrained = build_source({**payload("resnet18"), **fresh_weights("resnet18")})
    CONVERTERS["detectron2"].save(tmp_path, untrained)
    verify_target(tmp_path, "detectron2", untrained)
    edit_detectron2(tmp_path, lambda state: state.pop("stem.conv1.norm.bias"))
    assert "stem.conv1.norm.bias" in refusal(tmp_path, "detectron2", untrained)


def fresh_weights(arch):
    return {"trunk": build_backbone(arch).trunk.state_dict()}


@pytest.mark.parametrize("name", ["roi_heads.box_head.fc2.weight", "backbone.features.10.weight"])
def test_faults_of_a_folded_network_are_named(name, source, tampered):
    def transpose(state):
        state[name] = state[name].transpose(0, 1)

    message = refusal(tampered("alexnet", "detectron2", transpose), "detectron2", source("alexnet"))
    assert name in message
    assert "fc7" in message


@pytest.mark.parametrize(
    ("old", "new"),
    [("FORMAT: RGB", "FORMAT: BGR"), ("- 127.5", "- 102.0"), ("- 63.75", "- 1.0")],
)
def test_a_sidecar_with_wrong_pixels_fails(old, new, source, tampered):
    folder = tampered("resnet18", "detectron2")
    text = (folder / "detectron2.yaml").read_text()
    assert old in text
    (folder / "detectron2.yaml").write_text(text.replace(old, new))
    message = refusal(folder, "detectron2", source("resnet18"))
    assert "100 of 100 tensors" in message
    assert "conv1" in message


def test_a_sidecar_with_the_wrong_stride_fails(source, tmp_path):
    CONVERTERS["detectron2"].save(tmp_path, source("resnet50"))
    sidecar = tmp_path / "detectron2.yaml"
    sidecar.write_text(sidecar.read_text().replace("1X1: false", "1X1: true"))
    message = refusal(tmp_path, "detectron2", source("resnet50"))
    assert "conv3" in message
    assert "conv2" not in message


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("mean", [0.4, 0.45, 0.5], "conv1"),
        ("std", [0.229, 0.224, 0.225], "conv1"),
        ("input_size", [3, 224, 224], "transform"),
        ("crop_pct", 1.0, "transform"),
        ("interpolation", "bicubic", "transform"),
    ],
)
def test_a_timm_config_with_wrong_pixels_fails(key, value, named, source, tampered):
    folder = tampered("resnet18", "timm")
    path = folder / "timm" / "config.json"
    config = json.loads(path.read_text())
    assert config["pretrained_cfg"][key] != value
    config["pretrained_cfg"][key] = value
    path.write_text(json.dumps(config))
    assert named in refusal(folder, "timm", source("resnet18"))


def test_detectron2_keeps_its_log_level(source, exported):
    logger = logging.getLogger("detectron2")
    logger.setLevel(logging.INFO)
    verify_target(exported("resnet18", "detectron2"), "detectron2", source("resnet18"))
    assert logger.level == logging.INFO
    logger.setLevel(logging.NOTSET)

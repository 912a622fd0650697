"""What a timm user does with an exported folder, beyond opening it."""

import json

import pytest
import safetensors.torch
import timm
import torch
from timm.data import create_transform, resolve_model_data_config

from instdisc.export.contract import Source, normalize
from instdisc.export.to_timm import crop_pct, save_timm, timm_config, timm_name, to_timm
from instdisc.export.verify import fixed_images, verify_target
from instdisc.images.transforms import InputSpec
from instdisc.networks.backbones import build_backbone


def open_folder(folder, **kwargs):
    return timm.create_model(f"local-dir:{folder / 'timm'}", pretrained=True, **kwargs).eval()


@pytest.mark.parametrize(
    ("arch", "batch_norm", "name"),
    [
        ("alexnet", True, "alexnet"),
        ("alexnet", False, "alexnet"),
        ("vgg16", True, "vgg16_bn"),
        ("vgg16", False, "vgg16"),
        ("resnet18", True, "resnet18"),
        ("resnet50", True, "resnet50"),
    ],
)
def test_names_and_shapes_are_those_of_timm(arch, batch_norm, name):
    with torch.device("meta"):  # no values are looked at
        network = Source(build_backbone(arch, batch_norm=batch_norm), InputSpec(), "")
        model = timm.create_model(name, num_classes=0)
        assert timm_name(network) == name
        converted = {key: tensor.shape for key, tensor in to_timm(network).items()}
    assert converted == {key: tensor.shape for key, tensor in model.state_dict().items()}


def test_without_a_head_the_features_come_out(source, exported):
    network = source("resnet18")
    model = open_folder(exported("resnet18", "timm"))
    pixels = normalize(fixed_images(), network.spec.mean, network.spec.std)
    with torch.no_grad():
        assert torch.equal(model(pixels), network.backbone(pixels))
    assert model.num_classes == 0


@pytest.mark.parametrize("arch", ["alexnet", "resnet18"])
def test_a_new_head_keeps_the_backbone(arch, source, exported):
    model = open_folder(exported(arch, "timm"), num_classes=10)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in to_timm(source(arch)).items())
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 10)
    assert model.get_classifier().out_features == 10


@pytest.mark.parametrize("arch", ["alexnet", "resnet18"])
def test_features_only_gives_the_stages(arch, source, exported):
    network = source(arch)
    model = open_folder(exported(arch, "timm"), features_only=True)
    pixels = normalize(fixed_images(), network.spec.mean, network.spec.std)
    with torch.no_grad():
        maps, own = model(pixels), network.backbone.stages(pixels)
    # timm reads a ResNet's stem before its pooling; the rest is the same.
    stages = list(own)[0 if arch == "alexnet" else 1 :]
    for stage, found in zip(stages, maps[-len(stages) :], strict=True):
        torch.testing.assert_close(found, own[stage], rtol=1e-4, atol=1e-4)
    assert model.feature_info.channels()[-4:] == list(network.backbone.channels)[-4:]
    for reduction, found in zip(model.feature_info.reduction(), maps, strict=True):
        assert abs(found.shape[-1] - 112 / reduction) < 1.5


def test_alexnet_has_the_interface_of_a_timm_model(source, exported):
    model = open_folder(exported("alexnet", "timm"))
    images = torch.rand(1, 3, 96, 96)
    with torch.no_grad():
        maps = model.forward_features(images)
        assert maps.shape[1] == model.num_features == 256
        hidden = model.forward_head(maps, pre_logits=True)
        assert hidden.shape == (1, model.head_hidden_size)
        assert torch.equal(hidden, model(images))
        model.reset_classifier(5)
        assert model(images).shape == (1, 5)
    assert timm.is_model("alexnet")


def test_random_weights_are_what_timm_gives_without_pretrained(source, exported):
    model = timm.create_model(f"local-dir:{exported('resnet18', 'timm') / 'timm'}")
    assert not torch.equal(model.conv1.weight, source("resnet18").tensors["conv1.weight"])


@pytest.mark.parametrize(
    "arch", ["resnet18", "alexnet", pytest.param("resnet50", marks=pytest.mark.slow)]
)
def test_the_stem_for_32_pixels_survives(arch, source, tmp_path):
    network = source(arch, stem="small")
    save_timm(tmp_path, network)
    images = fixed_images()[:, :, :64, :64]
    assert verify_target(tmp_path, "timm", network, images).largest_difference <= 1e-4
    model = open_folder(tmp_path)
    first = model.features[0] if arch == "alexnet" else model.conv1
    assert first.kernel_size == (3, 3)
    assert model.feature_info[0]["reduction"] == 1


@pytest.mark.parametrize(
    ("size", "ratio"), [(224, 0.875), (32, 1.0), (96, 0.875), (160, 0.875), (299, 0.9), (110, 0.7)]
)
def test_timm_resizes_to_as_many_pixels(size, ratio):
    spec = InputSpec(size=size, crop_ratio=ratio)
    transform = create_transform((3, size, size), crop_pct=crop_pct(spec))
    assert transform.transforms[0].size == round(size / ratio)


def test_the_usual_numbers_stay_readable():
    assert crop_pct(InputSpec()) == 0.875
    assert crop_pct(InputSpec(size=32, crop_ratio=1.0)) == 1.0


def test_the_config_tells_timm_the_pixels(source, exported):
    network = source("resnet18")
    config = json.loads((exported("resnet18", "timm") / "timm" / "config.json").read_text())
    assert config == timm_config(network)
    data = resolve_model_data_config(open_folder(exported("resnet18", "timm")))
    assert tuple(data["input_size"]) == (3, 96, 96)
    assert tuple(data["mean"]) == network.spec.mean
    assert tuple(data["std"]) == network.spec.std


def test_the_file_says_it_is_pytorch(exported):
    path = exported("resnet18", "timm") / "timm" / "model.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}

import pytest
import torch
import torchvision

from instdisc.errors import UserError
from instdisc.export.contract import Source
from instdisc.export.to_torchvision import save_torchvision, to_torchvision, torchvision_name
from instdisc.images.transforms import InputSpec
from instdisc.networks.backbones import build_backbone


@pytest.mark.parametrize(
    ("arch", "batch_norm", "name", "head"),
    [
        ("alexnet", True, "alexnet", "classifier.6."),
        ("alexnet", False, "alexnet", "classifier.6."),
        ("vgg16", True, "vgg16_bn", "classifier.6."),
        ("vgg16", False, "vgg16", "classifier.6."),
        ("resnet18", True, "resnet18", "fc."),
        ("resnet50", True, "resnet50", "fc."),
    ],
)
def test_only_the_head_is_missing(arch, batch_norm, name, head):
    with torch.device("meta"):  # no values are looked at
        network = Source(build_backbone(arch, batch_norm=batch_norm), InputSpec(), "")
        own = getattr(torchvision.models, name)().state_dict()
        converted = to_torchvision(network)
    assert torchvision_name(network) == name
    expected = {key: tensor.shape for key, tensor in own.items() if not key.startswith(head)}
    assert {key: tensor.shape for key, tensor in converted.items()} == expected


def test_the_file_is_a_plain_state_dict(source, exported):
    state = torch.load(exported("resnet18", "torchvision") / "torchvision.pth", weights_only=True)
    model = torchvision.models.resnet18()
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["fc.weight", "fc.bias"]
    assert not result.unexpected_keys
    assert all(torch.equal(state[k], v) for k, v in source("resnet18").tensors.items())


@pytest.mark.parametrize("arch", ["alexnet", "resnet18"])
def test_the_stem_for_32_pixels_is_refused_with_the_way_out(arch, source, tmp_path):
    with pytest.raises(UserError, match="--to timm"):
        save_torchvision(tmp_path, source(arch, stem="small"))
    assert not list(tmp_path.iterdir())


def test_vgg16_has_one_stem_only(tmp_path):
    with torch.device("meta"):
        network = Source(build_backbone("vgg16", stem="small"), InputSpec(), "")
        assert to_torchvision(network)

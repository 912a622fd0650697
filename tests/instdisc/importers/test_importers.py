"""What an import refuses, what it says, and what it does with the files people really have."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from instdisc.errors import UserError
from instdisc.importers.api import describe, import_checkpoint
from instdisc.importers.dialect_table import FORMATS
from instdisc.importers.inputs import Overrides
from instdisc.importers.plan import find_format, list_tensors
from instdisc.importers.recognition import Network, recognise
from instdisc.networks.backbones import ARCHS, build_backbone, restore_backbone
from instdisc.networks.weights import load_backbone
from instdisc.runs.checkpoint import save_checkpoint
from instdisc.untrusted.containers import ForeignFile, read_foreign

State = dict[str, Tensor]


@pytest.fixture(scope="module")
def trunk() -> State:
    torch.manual_seed(0)
    return dict(build_backbone("resnet18").trunk.state_dict())


def put(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def save(content: Any, path: Path) -> Path:
    torch.save(content, path)
    return path


@pytest.mark.parametrize(
    ("lay_out", "message"),
    [
        # Two dialects' evidence in one file.
        (
            lambda s: {"state_dict": put("encoder_q.", s) | put("base_encoder.", s)},
            r"fits moco and moco-v3: say which with --format NAME",
        ),
        # Unknown tensors, in the state dict and beside it.
        (
            lambda s: s | {"layer5.0.conv1.weight": torch.ones(2)},
            r"1 tensors that this format does not have, layer5.0.conv1.weight: --ignore-unknown",
        ),
        (
            lambda s: {"state_dict": s, "epoch": 1, "second_network": {"w": torch.ones(2)}},
            r"second_network: --ignore-unknown",
        ),
        # A dialect's file with a tensor that the dialect does not have.
        (
            lambda s: {"state_dict": put("encoder_q.", s) | {"teacher.w": torch.ones(2)}},
            r"\(moco, resnet18\) has 1 tensors .* teacher.w",
        ),
        (
            lambda s: {k: v for k, v in s.items() if k != "layer3.0.bn1.running_var"},
            r"lacks 1 tensors, layer3.0.bn1.running_var: use another file",
        ),
        (
            lambda s: s | {"layer1.0.conv1.weight": s["layer1.0.conv1.weight"][:, :, :2]},
            r"layer1.0.conv1.weight is \(64, 64, 2, 3\), resnet18 has \(64, 64, 3, 3\)",
        ),
        (
            lambda s: s | {"layer2.0.shortcut.0.weight": s["layer2.0.downsample.0.weight"]},
            r"downsample.0.weight, .*shortcut.0.weight are both layer2.0.downsample.0.weight",
        ),
        (
            lambda s: s | {"bn1.bias": torch.full((64,), float("nan"))},
            r"bn1.bias holds NaN or infinity",
        ),
        (lambda s: {"cls_token": torch.ones(2), "pos_embed": torch.ones(2)}, "in no known format"),
        (lambda s: [1, 2], "in no known format .it is no dict of tensors"),
        (lambda s: {"\n": torch.ones(1), "x" * 900: torch.ones(1)}, r"it has '\\n', x{80}\)"),
    ],
)
def test_refusals(lay_out: Any, message: str, trunk: State, tmp_path: Path) -> None:
    path = save(lay_out(trunk), tmp_path / "peer.pth")
    with pytest.raises(UserError, match=message):
        import_checkpoint(path)
    assert describe(path)


@pytest.mark.parametrize("format", sorted(set(FORMATS) - {"lightly"}))
def test_a_wrong_format_is_an_error(format: str, trunk: State, tmp_path: Path) -> None:
    content = {"backbone.0.weight": trunk["conv1.weight"], "backbone.4.0.x": torch.ones(2)}
    with pytest.raises(UserError, match=f"is not in the {format} format|cannot be imported"):
        import_checkpoint(save(content, tmp_path / "lightly.pth"), format=format)


def test_names_of_formats(tmp_path: Path, trunk: State) -> None:
    path = save({"state_dict": put("encoder_q.", trunk)}, tmp_path / "moco.pth")
    assert find_format(list_tensors(read_foreign(path))) == ["moco"]
    with pytest.raises(UserError, match="choose auto or one of torchvision, timm"):
        import_checkpoint(path, format="mocov2")
    assert find_format(list_tensors(ForeignFile(path, "pickle", None))) == []


def test_unknown_tensors_can_be_left_out(trunk: State, tmp_path: Path) -> None:
    path = save(trunk | {"extra.w": torch.ones(2)}, tmp_path / "peer.pth")
    report = import_checkpoint(path, ignore_unknown=True)
    assert report.unknown == ("extra.w",)
    assert any("left out although unknown: extra.w" in note for note in report.notes)
    assert report.num_used == len(trunk)


def test_report(trunk: State, tmp_path: Path) -> None:
    path = save({k: v.half() if "num" not in k else v for k, v in trunk.items()}, tmp_path / "h.pt")
    report = import_checkpoint(path, overrides=Overrides(image_size=128, crop_ratio=1.0))
    assert "weights were converted from float16 to float32" in report.notes
    assert report.payload["trunk"]["conv1.weight"].dtype == torch.float32
    assert torch.equal(report.payload["trunk"]["bn1.weight"], torch.ones(64))
    assert report.payload["pretraining"] == {
        "imported_from": "h.pt",
        "format": "torchvision",
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    assert report.payload["input"]["size"] == 128
    save_checkpoint(tmp_path / "backbone.pt", "backbone", report.payload)
    assert load_backbone(tmp_path / "backbone.pt").arch == "resnet18"
    with pytest.raises(UserError, match="a checkpoint of this project"):
        import_checkpoint(tmp_path / "backbone.pt")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (Overrides(mean=(0.5,)), "--mean must be three numbers"),
        (Overrides(std=(0.5, 0.0, 0.5)), "std must be positive"),
        (Overrides(crop_ratio=1.5), "crop ratio in"),
        (Overrides(image_size=0), "image size"),
    ],
)
def test_senseless_inputs(overrides: Overrides, message: str, trunk: State, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        import_checkpoint(save(trunk, tmp_path / "peer.pth"), overrides=overrides)


def test_a_whole_pickled_network(trunk: State, tmp_path: Path) -> None:
    model = torchvision.models.resnet18()
    report = import_checkpoint(save(nn.DataParallel(model), tmp_path / "model.pth"))
    assert report.format == "torchvision"
    assert set(report.dropped) == {"fc.weight", "fc.bias"}
    assert torch.equal(report.payload["trunk"]["conv1.weight"], model.conv1.weight)


class Evil:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("new", [True, False])
def test_a_checkpoint_that_would_run_code(new: bool, trunk: State, tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "peer.pth"
    content = {"state_dict": trunk, "epoch": 1, "hook": Evil(f"touch {marker}")}
    torch.save(content, path, _use_new_zipfile_serialization=new)
    report = import_checkpoint(path)
    assert not marker.exists()
    assert any("not built or run: posix.system" in note for note in report.notes)
    assert torch.equal(report.payload["trunk"]["conv1.weight"], trunk["conv1.weight"])


def test_damage_in_a_weight_is_one_line(trunk: State, tmp_path: Path) -> None:
    path = save(trunk, tmp_path / "peer.pth")
    data = bytearray(path.read_bytes())
    place = data.index(trunk["layer4.1.conv2.weight"].numpy().tobytes()[:64])
    data[place + 8] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"layer4.1.conv2.weight cannot be read .*damaged"):
        import_checkpoint(path)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="cannot be read"):
        import_checkpoint(path)


def shapes(build: Any) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(t.shape) for name, t in build().state_dict().items()}


@pytest.mark.parametrize(
    ("name", "looks"),
    [
        ("resnet34", "a ResNet-34, which"),
        ("resnet101", "a ResNet-101, which"),
        ("resnet152", "a ResNet-152, which"),
        ("wide_resnet50_2", "a ResNet-50 2 times as wide"),
        ("resnext50_32x4d", r"grouped convolutions \(ResNeXt, 32 groups\)"),
        ("vgg13_bn", "a VGG-13, which"),
        ("squeezenet1_0", "a plain network"),
        ("vit_b_16", "neither a ResNet nor"),
    ],
)
def test_other_networks_are_named(name: str, looks: str) -> None:
    with pytest.raises(UserError, match=looks):
        recognise(shapes(getattr(torchvision.models, name)))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize("stem", ["imagenet", "small"])
def test_our_networks_are_recognised(arch: str, batch_norm: bool, stem: Any) -> None:
    if arch.startswith("resnet") and not batch_norm:
        return
    found = recognise(shapes(lambda: build_backbone(arch, stem=stem, batch_norm=batch_norm).trunk))
    assert found == Network(arch, "imagenet" if arch == "vgg16" else stem, batch_norm)


def test_real_resnet(shared_data: Path) -> None:
    path = shared_data / "weights" / "resnet18_trunk_imagenet_fp16.pth"
    report = import_checkpoint(path)
    stored = torch.load(path, weights_only=True)
    assert all(torch.equal(report.payload["trunk"][k], v.float()) for k, v in stored.items())
    assert report.num_used == len(stored)


def test_real_alexnet_without_linear_layers(shared_data: Path) -> None:
    path = shared_data / "weights" / "alexnet_features_imagenet.pth"
    with pytest.raises(UserError, match=r"lacks 4 tensors, classifier.*--allow-missing-fc"):
        import_checkpoint(path)
    report, again = (import_checkpoint(path, allow_missing_fc=True) for _ in range(2))
    assert report.payload["batch_norm"] is False
    assert len(report.payload["pretraining"]["missing"]) == 4
    assert any(note.startswith("WARNING: classifier.1, classifier.4") for note in report.notes)
    random = [each.payload["trunk"]["classifier.4.weight"] for each in (report, again)]
    assert torch.equal(*random)
    reference = torchvision.models.alexnet(weights=None).features
    stored = torch.load(path, weights_only=True)
    reference.load_state_dict({k.removeprefix("features."): v for k, v in stored.items()})
    model = restore_backbone(report.payload).eval()
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(model.trunk.features(images), reference(images))  # type: ignore[operator, union-attr] # a Sequential

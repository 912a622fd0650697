import pytest
import torch

from instdisc.errors import UserError
from instdisc.export.describe import describe_checkpoint
from instdisc.runs.checkpoint import save_checkpoint, weights_hash


def test_a_backbone_is_described(payload, tmp_path):
    content = payload("resnet18")
    content["projection"] = {"weight": torch.zeros(128, 512), "bias": torch.zeros(128)}
    save_checkpoint(tmp_path / "backbone.pt", "backbone", content)
    text = describe_checkpoint(tmp_path / "backbone.pt")
    assert text == describe_checkpoint(tmp_path)
    for line in (
        "format: instdisc/backbone/1",
        "arch: resnet18",
        "stem: imagenet",
        "batch norm: yes",
        # torchvision publishes 11,689,512 with the 513,000 of its head.
        "trunk: 120 tensors, 11,176,512 parameters",
        "projection: 128 dimensions",
        "pretraining dataset: noise",
        "pretraining epoch: 3",
        "pretraining demo: True",
        f"weights sha256: {weights_hash(content['trunk'])}",
    ):
        assert line in text.splitlines()
    assert "input: 96 pixels" in text


def test_an_imported_backbone_has_no_projection(payload, tmp_path):
    content = {**payload("resnet18"), "pretraining": {}}
    save_checkpoint(tmp_path / "backbone.pt", "backbone", content)
    assert "projection: none" in describe_checkpoint(tmp_path / "backbone.pt").splitlines()


def test_a_training_state_is_told_from_a_backbone(tmp_path):
    save_checkpoint(tmp_path / "last.pt", "train", {"step": 3, "bank": torch.zeros(2, 2)})
    text = describe_checkpoint(tmp_path / "last.pt")
    assert "instdisc/train/1" in text
    assert "bank, step" in text


@pytest.mark.parametrize("target", ["timm", "detectron2", "torchvision"])
def test_converted_files_are_recognised(target, exported, recwarn):
    names = {"timm": "timm/model.safetensors", "torchvision": "torchvision.pth"}
    path = exported("resnet18", target) / names.get(target, "detectron2.pkl")
    text = describe_checkpoint(path)
    assert f"format: {target} " in text
    assert "arch: resnet18" in text
    assert not recwarn.list


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.pt"):
        describe_checkpoint(tmp_path / "none.pt")


def test_a_truncated_file_is_an_error(payload, tmp_path):
    save_checkpoint(tmp_path / "backbone.pt", "backbone", payload("resnet18"))
    content = (tmp_path / "backbone.pt").read_bytes()
    (tmp_path / "backbone.pt").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError):
        describe_checkpoint(tmp_path / "backbone.pt")

"""Pretraining of timm's networks: exact resume, what a run starts from, export."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from instdisc.networks.weights import load_backbone, open_weights
from instdisc.runs.checkpoint import load_checkpoint, weights_hash
from pretrain.config import PretrainConfig
from pretrain.export import main as export
from pretrain.run import main
from pretrain.trainer import pretrain

NETWORKS = ("test_convnext", "test_vit", pytest.param("convnext_tiny", marks=pytest.mark.slow))


def config(name: str, data: Path, output: Path, **changes: Any) -> PretrainConfig:
    """Two epochs of one step: 24 images, batches of 16."""
    values: dict[str, Any] = {
        **{"arch": f"timm:{name}", "data": str(data), "output": output, "image_size": 32},
        **{"batch_size": 16, "epochs": 2, "objective": "softmax", "embedding_dim": 8},
        **{"optimizer": "adamw", "lr": 0.001, "workers": 0, "monitor_every": 0, "seed": 3},
        **{"tensorboard": False, "device": "cpu", **changes},
    }
    return PretrainConfig(**values)


@pytest.mark.parametrize("name", NETWORKS)
def test_resumes_bit_for_bit_and_exports(
    name: str, image_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pretrain(config(name, image_tree, whole))
    pretrain(config(name, image_tree, parts, epochs=1))
    pretrain(config(name, image_tree, parts))
    one, two = (load_checkpoint(run / "last.pt", "train") for run in (whole, parts))
    assert one["step"] == two["step"] == 2
    assert weights_hash(one["model"]) == weights_hash(two["model"])
    assert torch.equal(one["bank"], two["bank"])
    untrained = open_weights(f"untrained:{whole}")
    assert untrained.hash != open_weights(whole).hash
    assert untrained.spec.size == 32

    assert export(["--weights", str(whole), "--to", "timm"]) == 0
    theirs = timm.create_model(f"local-dir:{whole}/export/timm", pretrained=True).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(theirs(images), load_backbone(whole)(images))
        opened = open_weights(f"timm:local-dir:{whole}/export/timm")
        assert torch.equal(opened.backbone(images), theirs(images))
    spec = open_weights(whole).spec
    assert (opened.spec.size, opened.spec.mean, opened.spec.interpolation) == (
        *(spec.size, spec.mean, spec.interpolation),
    )
    capsys.readouterr()
    for target in ("detectron2", "torchvision"):
        output = str(tmp_path / target)
        assert export(["--weights", str(whole), "--to", target, "--output", output]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert f"does not build timm:{name}" in said
        assert "--to timm" in said
        assert not (tmp_path / target).exists()


def test_recipes_and_refusals(
    image_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults = PretrainConfig.recipe_defaults({"arch": "timm:test_vit", "recipe": "cifar"})
    assert "stem" not in defaults
    demo = PretrainConfig.recipe_defaults({"arch": "timm:test_vit"})
    assert (demo["recipe"], demo["optimizer"], demo["image_size"]) == ("demo", "adamw", 64)
    assert main(["--arch", "timm:test_vit", "--stem", "small"]) == 2
    assert "has its own stem" in capsys.readouterr().err
    few = ["--data", str(image_tree), "-b", "8", "--device", "cpu"]
    assert main(["--arch", "timm:no_such_model", *few]) == 2
    assert "timm cannot make no_such_model" in capsys.readouterr().err
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"arch": "resnet51"}))
    assert main(["--config", str(file)]) == 2
    assert "choose from alexnet, vgg16, resnet18, resnet50, timm:NAME" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--arch", "timm:hf-hub:someone/something"])

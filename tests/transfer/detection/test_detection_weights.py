"""A backbone's way into a detector: all of it arrives, or nothing is trained."""

import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.modeling import build_model

from instdisc.errors import UserError
from instdisc.networks.backbones import restore_backbone
from instdisc.runs.checkpoint import load_checkpoint
from transfer.detection import roi_heads  # noqa: F401 # registers the res5 head
from transfer.detection.recipe import adapt_to_weights, read_config
from transfer.detection.settings import find_config
from transfer.detection.weights import Initial, load_backbone_weights, prepare

ARCHS = {
    "fast_alexnet": "alexnet",
    "faster_r18": "resnet18",
    "faster_r50": "resnet50",
    "faster_r50_fpn": "resnet50",
    "faster_r50_syncbn": "resnet50",
}


def build(name: str, initial: Initial) -> Any:
    cfg = read_config(find_config(Path(name)), demo=True)
    cfg.MODEL.DEVICE = "cpu"
    adapt_to_weights(cfg, initial.sidecar)
    return build_model(cfg)


@pytest.fixture
def initial(backbone_file: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Initial]:
    def make(arch: str) -> Initial:
        return prepare("ours", str(backbone_file(arch)), arch, tmp_path)

    return make


@pytest.mark.parametrize(
    "name",
    ["faster_r18", *(pytest.param(n, marks=pytest.mark.slow) for n in ARCHS if n != "faster_r18")],
)
def test_every_tensor_arrives_in_every_detector(
    name: str, initial: Callable[[str], Initial]
) -> None:
    start = initial(ARCHS[name])
    model = build(name, start)
    assert start.folder is not None
    count = load_backbone_weights(model, start.folder)
    with (start.folder / "detectron2.pkl").open("rb") as file:
        assert count == len(pickle.load(file)["model"]) > 0


def test_resnet18s_res5_is_the_backbones_last_stage(
    initial: Callable[[str], Initial], backbone_file: Callable[[str], Path]
) -> None:
    start = initial("resnet18")
    model = build("faster_r18", start).eval()
    assert start.folder is not None
    load_backbone_weights(model, start.folder)
    original: Any = restore_backbone(load_checkpoint(backbone_file("resnet18"), "backbone"))
    stages = original.backbone.eval().stages(torch.randn(2, 3, 64, 64))
    with torch.no_grad():
        found = model.roi_heads.res5(stages["conv4"])
    torch.testing.assert_close(found, stages["conv5"].detach(), rtol=1e-4, atol=1e-5)


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    file = folder / "detectron2.pkl"
    content = pickle.loads(file.read_bytes())
    change(content["model"])
    file.write_bytes(pickle.dumps(content, protocol=4))


def misspell(tensors: dict[str, Any]) -> None:
    tensors["res4.0.conv1.wieght"] = tensors.pop("res4.0.conv1.weight")


def leave_out(tensors: dict[str, Any]) -> None:
    del tensors["res5.1.conv2.norm.running_var"]


def reshape(tensors: dict[str, Any]) -> None:
    tensors["res3.0.shortcut.weight"] = np.zeros((3, 3), np.float32)


@pytest.mark.parametrize("change", [misspell, leave_out, reshape])
def test_one_wrong_tensor_is_refused(
    change: Callable[[dict[str, Any]], None], initial: Callable[[str], Initial], tmp_path: Path
) -> None:
    start = initial("resnet18")
    assert start.folder is not None
    folder = tmp_path / "changed"
    shutil.copytree(start.folder, folder)
    rewrite(folder, change)
    with pytest.raises(UserError, match=r"\d+ of \d+ tensors"):
        load_backbone_weights(build("faster_r18", start), folder)


def test_the_conversion_beside_the_backbone_is_used_only_while_it_is_its_own(
    backbone_file: Callable[[str], Path], tmp_path: Path
) -> None:
    from instdisc.export.bundle import export_backbone

    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(backbone_file("resnet18"), run / "backbone.pt")
    export_backbone(run / "backbone.pt", run / "export", targets=("detectron2",))
    found = prepare("ours", str(run), "resnet18", tmp_path / "out")
    assert found.folder == run / "export"
    rewrite(run / "export", misspell)
    again = prepare("ours", str(run), "resnet18", tmp_path / "out")
    assert again.folder == tmp_path / "out" / "init"


def test_another_architecture_is_refused(
    backbone_file: Callable[[str], Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="config is for resnet50, and resnet18 is resnet18"):
        prepare("ours", str(backbone_file("resnet18")), "resnet50", tmp_path)


@pytest.mark.slow
def test_supervised_alexnet_features_start_a_detector(shared_data: Path, tmp_path: Path) -> None:
    file = shared_data / "weights" / "alexnet_features_imagenet.pth"
    start = prepare(f"supervised:{file}", None, "alexnet", tmp_path)
    assert any("fc" in note or "classifier" in note for note in start.notes)
    model = build("fast_alexnet", start)
    assert start.folder is not None
    load_backbone_weights(model, start.folder)
    stored = torch.load(file, weights_only=True)
    conv1 = model.backbone.features[0].weight
    torch.testing.assert_close(conv1.detach(), stored["features.0.weight"].float())

"""Files of timm and Detectron2, our own exports among them, and what lies beside them."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from instdisc.errors import UserError
from instdisc.export.contract import Source
from instdisc.export.fold import fold_trunk
from instdisc.export.to_detectron2 import save_detectron2
from instdisc.export.to_timm import save_timm
from instdisc.export.to_torchvision import save_torchvision
from instdisc.images.transforms import InputSpec
from instdisc.importers.api import import_checkpoint
from instdisc.importers.inputs import Overrides
from instdisc.importers.plan import choose, make_plan
from instdisc.networks.backbones import Backbone, build_backbone
from instdisc.untrusted.containers import ForeignFile
from instdisc.untrusted.pickles import Storage, StoredTensor, row_major

SPEC = InputSpec(96, (0.5, 0.4, 0.3), (0.2, 0.25, 0.125), 0.75)


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.manual_seed(0)
    model = build_backbone("resnet18").eval()
    for name, tensor in model.state_dict().items():
        if name.endswith(("running_mean", "running_var")):
            tensor.uniform_(0.5, 1.5)
    return model


def same_trunk(trunk: dict[str, Tensor], source: nn.Module, *, counters: bool = True) -> bool:
    expected = source.state_dict()
    assert trunk.keys() == expected.keys()
    return all(
        torch.equal(tensor, expected[name])
        for name, tensor in trunk.items()
        if counters or not name.endswith("num_batches_tracked")
    )


def on_paper(shapes: dict[str, tuple[int, ...]], container: Any = None) -> ForeignFile:
    """A file whose tensors have shapes and no numbers: VGG16 without its 500 MB."""
    state = {}
    for name, shape in shapes.items():
        storage = Storage("float32", max(1, torch.Size(shape).numel()))
        state[name] = StoredTensor().place(storage, 0, shape, row_major(shape))
    content = {**container, "model": state} if container else state
    return ForeignFile(Path("on/paper.pkl"), "torch file", content)


@pytest.mark.parametrize(
    ("save", "file", "format"),
    [
        (save_timm, "timm/model.safetensors", "timm"),
        (save_detectron2, "detectron2.pkl", "detectron2"),
        (save_torchvision, "torchvision.pth", "torchvision"),
    ],
)
def test_our_exports_come_back(
    save: Any, file: str, format: str, backbone: Backbone, tmp_path: Path
) -> None:
    save(tmp_path, Source(backbone, SPEC, "hash"))
    report = import_checkpoint(tmp_path / file)
    assert report.format == format
    # Detectron2 has no place for the counters, torchvision's file none for the pixels.
    assert same_trunk(report.payload["trunk"], backbone.trunk, counters=format != "detectron2")
    found = InputSpec.from_dict(report.payload["input"])
    expected = {"timm": SPEC, "torchvision": InputSpec()}.get(
        format, InputSpec(mean=SPEC.mean, std=SPEC.std)
    )
    assert found == expected


def test_a_small_stem_comes_back_through_timm(tmp_path: Path) -> None:
    model = build_backbone("resnet18", stem="small").eval()
    save_timm(tmp_path, Source(model, SPEC, "hash"))
    report = import_checkpoint(tmp_path / "timm" / "model.safetensors")
    assert report.payload["stem"] == "small"
    assert same_trunk(report.payload["trunk"], model.trunk)


# huggingface/pytorch-image-models: timm/models/vgg.py (ConvMlp)
@pytest.mark.parametrize("batch_norm", [False, True])
def test_timm_vgg_names_its_linear_layers_otherwise(batch_norm: bool) -> None:
    with torch.device("meta"):
        trunk = build_backbone("vgg16", batch_norm=batch_norm).trunk
    expected = {name: tuple(tensor.shape) for name, tensor in trunk.state_dict().items()}
    shapes = {name: shape for name, shape in expected.items() if name.startswith("features.")}
    shapes |= {"pre_logits.fc1.weight": (4096, 512, 7, 7), "pre_logits.fc1.bias": (4096,)}
    shapes |= {"pre_logits.fc2.weight": (4096, 4096, 1, 1), "pre_logits.fc2.bias": (4096,)}
    shapes |= {"head.fc.weight": (1000, 4096), "head.fc.bias": (1000,)}
    file = on_paper(shapes)
    plan = make_plan(file, choose(file, "auto"))
    assert plan.match.dialect.name == "timm"
    assert plan.network.batch_norm == batch_norm
    assert plan.used["classifier.3.weight"] == "pre_logits.fc2.weight"
    assert plan.used.keys() == expected.keys()
    assert (plan.missing, plan.unknown) == ((), ())


@pytest.mark.parametrize("arch", ["alexnet", "vgg16"])
def test_our_detectron2_files_carry_fc6_and_fc7(arch: str) -> None:
    with torch.device("meta"):
        trunk = build_backbone(arch, batch_norm=False).trunk
    expected = {name: tuple(tensor.shape) for name, tensor in trunk.state_dict().items()}
    layers = sorted({name.rpartition(".")[0] for name in expected if "classifier" in name})
    heads = dict(zip(layers, ("roi_heads.box_head.fc1", "roi_heads.box_head.fc2"), strict=True))
    renamed = {}
    for name, shape in expected.items():
        layer, _, kind = name.rpartition(".")
        renamed[f"{heads.get(layer, 'backbone.' + layer)}.{kind}"] = shape
    file = on_paper(renamed, {"__author__": "instdisc"})
    plan = make_plan(file, choose(file, "auto"))
    assert plan.network.arch == arch
    assert plan.used[f"{layers[1]}.bias"] == "model.roi_heads.box_head.fc2.bias"
    assert plan.used.keys() == expected.keys()


@pytest.mark.slow  # half a gigabyte each
@pytest.mark.parametrize("arch", ["alexnet", "vgg16"])
@pytest.mark.parametrize(
    ("save", "file"),
    [
        (save_timm, "timm/model.safetensors"),
        (save_detectron2, "detectron2.pkl"),
        (save_torchvision, "torchvision.pth"),
    ],
)
def test_plain_networks_come_back(arch: str, save: Any, file: str, tmp_path: Path) -> None:
    model = build_backbone(arch).eval()
    save(tmp_path, Source(model, SPEC, "hash"))
    payload = import_checkpoint(tmp_path / file).payload
    folded = arch == "alexnet" or save is save_detectron2
    assert payload["batch_norm"] != folded
    expected = fold_trunk(model.trunk) if folded else model.trunk.state_dict()
    assert payload["trunk"].keys() == expected.keys()
    assert all(torch.equal(payload["trunk"][name], tensor) for name, tensor in expected.items())


def detectron2_names(trunk: nn.Module, prefix: str = "", res5: str = "") -> dict[str, Any]:
    """As detectron2: tools/convert-torchvision-to-d2.py does it."""
    renamed = {}
    for name, tensor in trunk.state_dict().items():
        key = name if "layer" in name else f"stem.{name}"
        for n in (1, 2, 3, 4):
            key = key.replace(f"layer{n}", f"res{n + 1}")
        for n in (1, 2, 3):
            key = key.replace(f"bn{n}", f"conv{n}.norm")
        key = key.replace("downsample.0", "shortcut").replace("downsample.1", "shortcut.norm")
        before = res5 if res5 and key.startswith("res5") else prefix
        renamed[before + key] = tensor.numpy()
    return renamed


@pytest.mark.parametrize("protocol", [2, 4])
def test_detectron2_converter(protocol: int, backbone: Backbone, tmp_path: Path) -> None:
    model = detectron2_names(backbone.trunk) | {"stem.fc.weight": torch.ones(5, 512).numpy()}
    content = {"model": model, "__author__": "torchvision", "matching_heuristics": True}
    (tmp_path / "r18.pkl").write_bytes(pickle.dumps(content, protocol=protocol))
    report = import_checkpoint(tmp_path / "r18.pkl")
    assert report.format == "detectron2"
    assert report.dropped == ("stem.fc.weight",)
    assert same_trunk(report.payload["trunk"], backbone.trunk)


# detectron2: modeling/roi_heads/roi_heads.py (Res5ROIHeads), modeling/backbone/fpn.py
@pytest.mark.parametrize("kind", ["C4", "FPN"])
def test_detectors_must_say_what_they_saw(kind: str, backbone: Backbone, tmp_path: Path) -> None:
    if kind == "C4":
        model = detectron2_names(backbone.trunk, "backbone.", "roi_heads.")
        heads = ("proposal_generator.rpn_head.conv.weight", "roi_heads.box_predictor.bbox.weight")
    else:
        model = detectron2_names(backbone.trunk, "backbone.bottom_up.")
        heads = ("backbone.fpn_lateral2.weight", "roi_heads.box_head.fc1.weight")
    model |= {name: torch.ones(2, 2).numpy() for name in heads}
    path = tmp_path / "model_final.pth"
    torch.save({"model": {k: torch.from_numpy(v) for k, v in model.items()}, "iteration": 9}, path)
    with pytest.raises(UserError, match=r"BGR .*--assume-rgb"):
        import_checkpoint(path)
    report = import_checkpoint(path, overrides=Overrides(assume_rgb=True))
    assert report.dropped == heads
    config = path.with_suffix(".yaml")
    config.write_text("INPUT: {FORMAT: RGB}")  # STRIDE_IN_1X1 is True by default
    with pytest.raises(UserError, match="--assume-rgb"):
        import_checkpoint(path)
    config.write_text("INPUT: {FORMAT: RGB}\nMODEL: {RESNETS: {STRIDE_IN_1X1: false}}")
    assert import_checkpoint(path).format == "detectron2"
    assert same_trunk(report.payload["trunk"], backbone.trunk)


# detectron2: checkpoint/c2_model_loading.py; MSRA/R-50.pkl is a flat dict of such names
def test_caffe2_is_refused(tmp_path: Path) -> None:
    blobs = {name: torch.ones(4).numpy() for name in ("conv1_w", "res2_0_branch2a_w")}
    (tmp_path / "R-50.pkl").write_bytes(pickle.dumps({"blobs": blobs}, protocol=2))
    with pytest.raises(UserError, match=r"caffe2.* cannot be imported: .*BGR"):
        import_checkpoint(tmp_path / "R-50.pkl")


def test_timm_config_beside_the_file_counts(backbone: Backbone, tmp_path: Path) -> None:
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    path.write_bytes(safetensors.torch.save(dict(backbone.trunk.state_dict())))
    assert import_checkpoint(path).format == "torchvision"  # nothing says timm
    pixels = {"input_size": [3, 160, 160], "crop_pct": 0.95, "mean": [0.5] * 3, "std": [0.2] * 3}
    config.write_text(json.dumps({"architecture": "resnet18.a1_in1k", "pretrained_cfg": pixels}))
    report = import_checkpoint(path, overrides=Overrides(std=(1.0, 1.0, 1.0)))
    assert report.format == "timm"
    spec = InputSpec.from_dict(report.payload["input"])
    assert spec == InputSpec(160, (0.5, 0.5, 0.5), (1.0, 1.0, 1.0), 0.95)
    config.write_text(json.dumps({"architecture": "resnetblur18"}))  # the same tensors
    with pytest.raises(UserError, match="names resnetblur18, which is not our resnet18"):
        import_checkpoint(path)
    config.write_text("[broken")
    assert import_checkpoint(path).format == "torchvision"
    config.write_text(json.dumps({"architecture": "resnet18", "mean": "grey"}))
    with pytest.raises(UserError, match="mean must be three numbers"):
        import_checkpoint(path)

"""backbone.pt -> timm/, a folder that timm opens by itself.

    model = timm.create_model("local-dir:export/timm", pretrained=True)                  # features
    model = timm.create_model("local-dir:export/timm", pretrained=True, num_classes=10)  # new head
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))

Without `pretrained=True` timm gives random weights. AlexNet and the 32-pixel ResNets are not
timm's: `import instdisc.export.to_timm` registers them. VGG16 with batch norm is timm's `vgg16_bn`;
AlexNet's batch norms are folded.
"""

import math
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from timm.data.config import resolve_model_data_config
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torchvision.transforms.v2.functional import to_pil_image

from instdisc.export import timm_models  # noqa: F401 # registers AlexNet and the small stems
from instdisc.export.card import write_card
from instdisc.export.contract import (
    FC_TAPS,
    Loaded,
    Source,
    normalize,
    record_outputs,
    record_timm,
)
from instdisc.export.fold import fold_trunk
from instdisc.images.transforms import InputSpec
from instdisc.networks.backbones import Backbone
from instdisc.networks.timm_backbones import TimmBackbone
from instdisc.runs.folders import atomic_file, write_json, write_text
from instdisc.runs.results import check_results

FOLDER = "timm"
_VGG_RENAMED = {"classifier.0": "pre_logits.fc1", "classifier.3": "pre_logits.fc2"}
_VGG_TAPS = {"fc6": "pre_logits.act1", "fc7": "pre_logits.act2"}


def timm_name(source: Source) -> str:
    """The entry point in timm's registry that takes the weights."""
    if isinstance(source.backbone, TimmBackbone):
        return source.backbone.trunk.pretrained_cfg["architecture"]
    if source.arch == "vgg16":
        return "vgg16_bn" if source.backbone.batch_norm else "vgg16"
    if source.arch.startswith("resnet") and source.small_stem:
        return f"{source.arch}_small_stem"
    return source.arch


def to_timm(source: Source) -> dict[str, Tensor]:
    """Weights under the names of the entry point that `timm_name` gives."""
    if source.arch == "alexnet":
        return fold_trunk(source.backbone.trunk)
    if source.arch != "vgg16":
        return source.tensors
    renamed: dict[str, Tensor] = {}
    for name, tensor in source.tensors.items():
        layer, _, kind = name.rpartition(".")
        if layer in _VGG_RENAMED and kind == "weight":
            # timm convolves where torchvision flattens: the same numbers, (C, H, W) unrolled.
            side = 7 if layer == "classifier.0" else 1
            tensor = tensor.reshape(len(tensor), -1, side, side)
        renamed[f"{_VGG_RENAMED.get(layer, layer)}.{kind}"] = tensor
    return renamed


def crop_pct(spec: InputSpec) -> float:
    """The crop ratio for which timm resizes to as many pixels as our evaluation does.

    timm rounds size / crop_pct down where we round to the nearest.
    """
    resized = round(spec.size / spec.crop_ratio)
    if math.floor(spec.size / spec.crop_ratio) == resized:
        return spec.crop_ratio
    return spec.size / (resized + 0.25)  # a margin, for the quotient is not exact


def timm_config(source: Source) -> dict[str, Any]:
    """The config.json: which network, which pixels, no classes."""
    resnet = source.arch.startswith("resnet")
    classifier = {"alexnet": "classifier.6", "vgg16": "head.fc"}.get(source.arch, "fc")
    config: dict[str, Any] = {
        "architecture": timm_name(source),
        "num_classes": 0,
    }
    if source.arch == "alexnet" and source.small_stem:
        config["model_args"] = {"stem": "small"}
    own: dict[str, Any] = {"first_conv": "conv1" if resnet else "features.0"}
    own |= {"classifier": classifier, "fixed_input_size": False}
    if isinstance(source.backbone, TimmBackbone):
        trunk = source.backbone.trunk
        own = {name: trunk.pretrained_cfg.get(name) for name in own}
        if own["fixed_input_size"]:
            config["model_args"] = {"img_size": source.spec.size}
        if _stand_in(source):
            config["num_classes"] = 1
            config["model_args"]["num_classes"] = 0
        config["num_features"] = trunk.num_features
    else:
        config["num_features"] = source.backbone.channels[-1]
    config["pretrained_cfg"] = {
        "tag": "instdisc",
        "custom_load": False,
        "input_size": [3, source.spec.size, source.spec.size],
        "interpolation": source.spec.interpolation,
        "crop_pct": crop_pct(source.spec),
        "crop_mode": "squash" if source.spec.squash else "center",
        "mean": list(source.spec.mean),
        "std": list(source.spec.std),
        "num_classes": 0,
        **own,
    }
    return config


def _stand_in(source: Source) -> dict[str, Tensor]:
    """A classifier of one class for Swin, which timm drops when it opens the file.

    A file without any timm takes for one of Swin's authors, and renames its layers.
    """
    if not timm_name(source).startswith("swin_"):
        return {}
    return {
        "head.fc.weight": torch.zeros(1, source.backbone.feature_dim),
        "head.fc.bias": torch.zeros(1),
    }


def save_timm(folder: Path, source: Source) -> None:
    """Writes the folder."""
    whole = {**to_timm(source), **_stand_in(source)}
    tensors = {name: tensor.contiguous() for name, tensor in whole.items()}
    # Serialised in memory first: the library's own writer hides why a write failed.
    content = safetensors.torch.save(tensors, metadata={"format": "pt"})
    with atomic_file(folder / FOLDER / "model.safetensors") as file:
        file.write(content)
    config = timm_config(source)
    write_json(folder / FOLDER / "config.json", config)
    rows, _ = check_results()  # damaged rows are another command's business
    card = write_card(
        arch=source.arch,
        width=config["num_features"],
        needs_import=source.arch == "alexnet" or source.small_stem,
        sha256=source.weights_sha256,
        pretraining=source.pretraining,
        rows=[row for row in rows if row.weights_hash in source.hashes],
    )
    write_text(folder / FOLDER / "README.md", card)


def load_timm(folder: Path, source: Source) -> Loaded:
    """Opens the folder as a user would, with timm's own transform."""
    model: Any = timm.create_model(f"local-dir:{folder / FOLDER}", pretrained=True).eval()
    data = resolve_model_data_config(model)
    transform = create_transform(**data, is_training=False)
    taps = source.taps if isinstance(source.backbone, Backbone) else {}
    if source.arch == "alexnet":
        stages = zip(taps, model.feature_info, strict=True)
        taps = {stage: info["module"] for stage, info in stages} | FC_TAPS["alexnet"]
    elif source.arch == "vgg16":
        taps |= _VGG_TAPS

    def outputs(images: Tensor) -> dict[str, Tensor]:
        pixels = normalize(images, data["mean"], data["std"])
        if isinstance(source.backbone, TimmBackbone):
            found = record_timm(TimmBackbone(source.arch, model, source.spec), pixels)
        else:
            found = record_outputs(model, taps, pixels)
        for stage in _VGG_TAPS.keys() & found.keys():
            found[stage] = found[stage].flatten(1)
        found["pixels"] = pixels
        found["transform"] = torch.stack([transform(to_pil_image(image)) for image in images])
        return found

    return Loaded({"timm": timm.__version__}, model.state_dict(), outputs)

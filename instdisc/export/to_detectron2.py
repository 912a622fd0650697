"""backbone.pt -> detectron2.pkl and its sidecar detectron2.yaml. Imports no Detectron2.

    cfg = detectron2.config.get_cfg()
    cfg.merge_from_file("export/detectron2.yaml")   # RGB, pixel statistics, depth, stride
    cfg.MODEL.WEIGHTS = "export/detectron2.pkl"

Names in the file:

- ResNets: `stem.conv1.weight`, `res2.0.conv1.weight`, ..., without the model's prefix, which
  differs between detectors (`backbone.` in C4, where res5 is `roi_heads.res5.`, and
  `backbone.bottom_up.` in FPN). Detectron2's own ImageNet files do the same; its suffix matching
  (`matching_heuristics`) finds the place in all of them.
- AlexNet and VGG16: batch norms folded, full names (`backbone.features.0.weight`,
  `roi_heads.box_head.fc1.weight` for fc6), so that nothing is left to matching. Their backbones are
  in `instdisc.export.detectron2_backbones`; importing it registers them.
"""

import pickle
import re
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from instdisc.export.contract import FC_LAYERS, Source, require_buildable
from instdisc.export.fold import fold_trunk
from instdisc.runs.folders import atomic_file, write_text

WEIGHTS = "detectron2.pkl"
SIDECAR = "detectron2.yaml"
AUTHOR = "instdisc"
OUT_FEATURE = "conv5"
# Side of the pooled regions, so that fc6 sees as many inputs as in pretraining.
POOLER_RESOLUTION = {"alexnet": 6, "vgg16": 7}
_RESNET_NAMES = (
    (r"^(conv1|bn1)\.", r"stem.\1."),
    (r"^layer(\d)\.", lambda match: f"res{int(match[1]) + 1}."),
    (r"\.bn(\d)\.", r".conv\1.norm."),
    (r"\.downsample\.0\.", ".shortcut."),
    (r"\.downsample\.1\.", ".shortcut.norm."),
)


def resnet_name(name: str) -> str:
    """Name of a ResNet tensor in torchvision -> in Detectron2, without prefix."""
    for pattern, replacement in _RESNET_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def to_detectron2(source: Source) -> dict[str, Tensor]:
    """Weights under Detectron2's names; the counters of batch norm have no place there."""
    require_buildable(source, "Detectron2")
    if source.arch.startswith("resnet"):
        return {
            resnet_name(name): tensor
            for name, tensor in source.tensors.items()
            if not name.endswith("num_batches_tracked")
        }
    heads = {
        FC_LAYERS[source.arch]["fc6"]: "roi_heads.box_head.fc1",
        FC_LAYERS[source.arch]["fc7"]: "roi_heads.box_head.fc2",
    }
    renamed: dict[str, Tensor] = {}
    for name, tensor in fold_trunk(source.backbone.trunk).items():
        layer, _, kind = name.rpartition(".")
        renamed[f"{heads.get(layer, 'backbone.' + layer)}.{kind}"] = tensor
    return renamed


def detectron2_config(source: Source) -> dict[str, Any]:
    """What Detectron2 must be told about these weights, and nothing about the recipe.

    A ResNet's `BACKBONE.NAME` is left to the recipe, which may put an FPN on it.
    """
    model: dict[str, Any] = {
        "PIXEL_MEAN": [round(255 * value, 6) for value in source.spec.mean],
        "PIXEL_STD": [round(255 * value, 6) for value in source.spec.std],
    }
    if source.arch.startswith("resnet"):
        model["RESNETS"] = {
            "DEPTH": int(source.arch.removeprefix("resnet")),
            "RES2_OUT_CHANNELS": source.backbone.channels[1],
            "STRIDE_IN_1X1": False,
        }
    else:
        model["BACKBONE"] = {"NAME": f"build_{source.arch}_backbone"}
        model["RPN"] = {"IN_FEATURES": [OUT_FEATURE]}
        model["ROI_HEADS"] = {"NAME": "StandardROIHeads", "IN_FEATURES": [OUT_FEATURE]}
        model["ROI_BOX_HEAD"] = {
            "NAME": "FastRCNNConvFCHead",
            "NUM_FC": 2,
            "FC_DIM": 4096,
            "POOLER_RESOLUTION": POOLER_RESOLUTION[source.arch],
        }
    return {"VERSION": 2, "INPUT": {"FORMAT": "RGB"}, "MODEL": model}


def save_detectron2(folder: Path, source: Source) -> None:
    """Writes the weights and the sidecar."""
    content = {
        "model": {name: tensor.numpy() for name, tensor in to_detectron2(source).items()},
        "__author__": AUTHOR,
        "matching_heuristics": source.arch.startswith("resnet"),
    }
    with atomic_file(folder / WEIGHTS) as file:
        pickle.dump(content, file, protocol=4)
    text = f"# What Detectron2 must be told about {WEIGHTS}; merge it after the recipe.\n"
    write_text(folder / SIDECAR, text + yaml.safe_dump(detectron2_config(source), sort_keys=True))

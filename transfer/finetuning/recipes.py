"""Named recipes of fine-tuning: published practice as data. Imports no torch until it must.

Each line of a recipe is what its source states; what a source leaves open keeps the default.
"""

import os
from collections.abc import Mapping
from typing import Any, Literal

from instdisc.images.locations import locate_data
from instdisc.names import DATA_VARIABLE

RecipeName = Literal["paper", "mmselfsup", "swav-1", "swav-10", "demo"]

_LATER: dict[str, Any] = {"epochs": 20, "lr_milestones": (12, 16), "lr_factor": 0.2}
RECIPES: dict[str, dict[str, Any]] = {
    # Section 4.3: 70 epochs, lr 0.01, divided by ten every 30 epochs. The defaults.
    "paper": {},
    # MMSelfSup, configs/benchmarks/classification/imagenet/imagenet_1percent: batch 4x64, a grid of
    # lr 0.1, 0.01, 0.001 by head lr x1, x10, x100. Here the middle lr with x100; --sweep tries all.
    "mmselfsup": {**_LATER, "lr": 0.01, "head_lr_scale": 100.0, "weight_decay": 5e-4},
    # SwAV, eval_semisup.py and its README: batch 8x32; 1% of the labels: lr 0.02, head 5;
    # 10%: lr 0.01, head 0.2; no weight decay.
    "swav-1": {**_LATER, "lr": 0.02, "head_lr_scale": 250.0, "weight_decay": 0.0},
    "swav-10": {**_LATER, "lr": 0.01, "head_lr_scale": 20.0, "weight_decay": 0.0},
    # The paper's schedule on the embedded images; so few that a random draw would miss a class.
    # The untrained network is fine-tuned beside the pretrained one.
    "demo": {"subset": "balanced", "workers": 0, "init": ("pretrained", "scratch")},
}


def is_demo(weights: str | None, data: str | None) -> bool:
    """Whether a transfer command with these arguments will work on the embedded images."""
    if data is not None or os.environ.get(DATA_VARIABLE):
        return locate_data(data).is_demo
    if str(weights or "").partition(":")[0] in ("random", "data-init", "timm"):
        return True
    # What a network was pretrained on is written in its file, which torch must read.
    from instdisc.networks.weights import open_weights

    return open_weights(weights).data in (None, "demo")


def finetune_defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the recipe that was named; else of the demo recipe or the paper's."""
    recipe = given.get("recipe")
    if recipe is None:
        demo = is_demo(given.get("weights"), given.get("data"))
        recipe = "demo" if demo else "paper"
    return {"recipe": recipe, **RECIPES[recipe]}

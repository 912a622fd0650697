"""Image pipelines, one function each: pretraining, fine-tuning, evaluation.

Pretraining follows the authors' code; the paper names the operations without their numbers.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor
from torchvision.transforms import v2

from instdisc.images.augmentation import RandomView

Transform = Callable[[Image], Tensor]

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """How a network wants its images; kept in its checkpoint and used by every task.

    Attributes:
        size: side of the square crop in pixels.
        mean: per-channel mean of pixel values in [0, 1], RGB.
        std: per-channel standard deviation.
        crop_ratio: evaluation resizes the short side to size / crop_ratio before the centre crop.
    """

    size: int = 224
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    crop_ratio: float = 0.875

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "size": self.size,
            "mean": list(self.mean),
            "std": list(self.std),
            "crop_ratio": self.crop_ratio,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "InputSpec":
        """The inverse of `to_dict`; ValueError, TypeError or KeyError for what makes no sense."""
        mean, std = (tuple(float(value) for value in values[name]) for name in ("mean", "std"))
        size, crop_ratio = int(values["size"]), float(values["crop_ratio"])
        sensible = all(math.isfinite(value) for value in (*mean, *std)) and min(std, default=0) > 0
        if len(mean) != 3 or len(std) != 3 or not sensible or size < 1 or not 0 < crop_ratio <= 1:
            raise ValueError(f"input of size {size}, mean {mean}, std {std}, crop {crop_ratio}")
        return cls(size, mean, std, crop_ratio)


def _to_tensor(spec: InputSpec) -> list[v2.Transform]:
    return [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(mean=list(spec.mean), std=list(spec.std)),
    ]


def pretrain_transform(spec: InputSpec, *, min_scale: float = 0.2, flip: bool = True) -> RandomView:
    """Random crop, grayscale, colour jitter, flip: what an instance must be recognised under."""
    return RandomView(
        spec.size, spec.mean, spec.std, min_scale=min_scale, gray=0.2, strength=0.4, flip=flip
    )


def finetune_transform(spec: InputSpec, *, flip: bool = True) -> RandomView:
    """Random crop and flip: the customary augmentation of supervised training."""
    return RandomView(spec.size, spec.mean, spec.std, min_scale=0.08, flip=flip)


def eval_transform(spec: InputSpec) -> Transform:
    """Resize of the short side, one centre crop."""
    resize = round(spec.size / spec.crop_ratio)
    steps = [v2.Resize(resize, antialias=True), v2.CenterCrop(spec.size)]
    return v2.Compose([*steps, *_to_tensor(spec)])

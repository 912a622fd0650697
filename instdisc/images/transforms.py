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
        interpolation: of that resize: bilinear, bicubic, ... as torchvision names them.
        squash: evaluation resizes both sides to that length, whatever their ratio.
    """

    size: int = 224
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    crop_ratio: float = 0.875
    interpolation: str = "bilinear"
    squash: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "size": self.size,
            "mean": list(self.mean),
            "std": list(self.std),
            "crop_ratio": self.crop_ratio,
            "interpolation": self.interpolation,
            "squash": self.squash,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "InputSpec":
        """The inverse of `to_dict`; ValueError, TypeError or KeyError for what makes no sense."""
        mean, std = (tuple(float(value) for value in values[name]) for name in ("mean", "std"))
        size, crop_ratio = int(values["size"]), float(values["crop_ratio"])
        sensible = all(math.isfinite(value) for value in (*mean, *std)) and min(std, default=0) > 0
        if len(mean) != 3 or len(std) != 3 or not sensible or size < 1 or not 0 < crop_ratio <= 1:
            raise ValueError(f"input of size {size}, mean {mean}, std {std}, crop {crop_ratio}")
        # Older files have neither of these.
        interpolation = v2.InterpolationMode(values.get("interpolation", "bilinear")).value
        return cls(size, mean, std, crop_ratio, interpolation, bool(values.get("squash")))


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


def finetune_transform(spec: InputSpec, *, flip: bool = True, colors: bool = False) -> RandomView:
    """Random crop and flip: the customary augmentation of supervised training.

    With `colors` also jitter of brightness, contrast and saturation, and lighting noise.
    """
    strength, lighting = (0.4, 0.1) if colors else (0.0, 0.0)
    return RandomView(
        spec.size, spec.mean, spec.std, min_scale=0.08, flip=flip,
        strength=strength, hue=False, lighting=lighting,
    )  # fmt: skip


def eval_transform(spec: InputSpec) -> v2.Compose:
    """Resize of the short side, one centre crop."""
    resize = round(spec.size / spec.crop_ratio)
    interpolation = v2.InterpolationMode(spec.interpolation)
    sides = [resize, resize] if spec.squash else resize
    steps = [v2.Resize(sides, interpolation, antialias=True), v2.CenterCrop(spec.size)]
    return v2.Compose([*steps, *_to_tensor(spec)])


def split_normalization(transform: v2.Compose) -> tuple[v2.Compose, Tensor]:
    """An evaluation's steps up to bytes, and the value of each level of each channel, `(3, 256)`.

    The values are made by the steps that are left out, so that a look-up equals them bit for bit.
    """
    *steps, to_float, normalize = transform.transforms
    levels = torch.arange(256, dtype=torch.uint8).expand(3, 1, 256)
    return v2.Compose(steps), normalize(to_float(levels))[:, 0]

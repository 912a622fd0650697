"""Image pipelines, one function each: pretraining, fine-tuning, evaluation.

Pretraining follows the authors' code; the paper names the operations without their numbers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor
from torchvision.transforms import v2

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
        """The inverse of `to_dict`."""
        return cls(
            size=int(values["size"]),
            mean=tuple(values["mean"]),
            std=tuple(values["std"]),
            crop_ratio=float(values["crop_ratio"]),
        )


def _to_tensor(spec: InputSpec) -> list[v2.Transform]:
    return [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(mean=list(spec.mean), std=list(spec.std)),
    ]


def pretrain_transform(spec: InputSpec, *, min_scale: float = 0.2, flip: bool = True) -> Transform:
    """Random crop, grayscale, colour jitter, flip: what an instance must be recognised under."""
    steps = [
        v2.RandomResizedCrop(spec.size, scale=(min_scale, 1.0), antialias=True),
        v2.RandomGrayscale(p=0.2),
        v2.ColorJitter(0.4, 0.4, 0.4, 0.4),
    ]
    if flip:
        steps.append(v2.RandomHorizontalFlip())
    return v2.Compose([*steps, *_to_tensor(spec)])


def finetune_transform(spec: InputSpec, *, flip: bool = True) -> Transform:
    """Random crop and flip: the customary augmentation of supervised training."""
    steps: list[v2.Transform] = [v2.RandomResizedCrop(spec.size, antialias=True)]
    if flip:
        steps.append(v2.RandomHorizontalFlip())
    return v2.Compose([*steps, *_to_tensor(spec)])


def eval_transform(spec: InputSpec) -> Transform:
    """Resize of the short side, one centre crop."""
    resize = round(spec.size / spec.crop_ratio)
    steps = [v2.Resize(resize, antialias=True), v2.CenterCrop(spec.size)]
    return v2.Compose([*steps, *_to_tensor(spec)])

"""Converters from backbone.pt to timm, Detectron2 and torchvision, each verified by running it."""

from typing import Literal

Target = Literal["timm", "detectron2", "torchvision"]

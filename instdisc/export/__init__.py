"""Converters from backbone.pt to timm, Detectron2 and torchvision, each verified by running it."""

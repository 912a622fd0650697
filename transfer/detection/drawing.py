"""Test images with their ground truth at the left and the detections at the right."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data.catalog import Metadata
from detectron2.data.detection_utils import convert_image_to_rgb, read_image
from detectron2.structures import Boxes, Instances
from detectron2.utils.visualizer import Visualizer
from PIL import Image
from torch import nn

from transfer.detection.data import VocData, build_test_loader

MIN_SCORE = 0.3
SHORT_SIDE = 240  # small images are enlarged: labels have a fixed size


def _picture(pixels: Any, boxes: Any, labels: list[str], scale: float) -> Any:
    canvas = Visualizer(pixels, Metadata(name="drawing"), scale=scale)
    return canvas.overlay_instances(boxes=boxes, labels=labels).get_image()


@torch.no_grad()
def draw_detections(
    folder: Path, model: nn.Module, cfg: CfgNode, data: VocData, count: int
) -> list[Path]:
    """Draws test images, spread evenly over the split, as PNG files; what it wrote."""
    model.eval()
    step = max(1, len(data.test) // max(count, 1))
    indices = list(range(0, len(data.test), step))[:count]
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for index, batch in zip(indices, build_test_loader(cfg, data, 0, 1, indices), strict=True):
        record = data.test[index]
        found: Instances = model(batch)[0]["instances"].to("cpu")
        found = found[found.scores >= MIN_SCORE]
        pixels = convert_image_to_rgb(read_image(record["file_name"], "RGB"), "RGB")
        scale = max(1.0, SHORT_SIDE / min(pixels.shape[:2]))
        names = data.class_names
        truth = Boxes(torch.tensor([a["bbox"] for a in record["annotations"]]).reshape(-1, 4))
        said = [names[a["category_id"]] for a in record["annotations"]]
        left = _picture(pixels, truth, said, scale)
        labels = [
            f"{names[kind]} {score:.2f}"
            for kind, score in zip(found.pred_classes.tolist(), found.scores.tolist(), strict=True)
        ]
        right = _picture(pixels, found.pred_boxes, labels, scale)
        gap = np.full((left.shape[0], 8, 3), 255, np.uint8)
        path = folder / f"{record['image_id']}.png"
        Image.fromarray(np.concatenate([left, gap, right], axis=1)).save(path)
        written.append(path)
    return written

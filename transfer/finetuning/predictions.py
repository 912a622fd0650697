"""What a trained model says of every image, and how often it is right."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from instdisc.errors import UserError
from instdisc.images.loading import build_loader, keep_valid, sequential_plan, to_device
from instdisc.neighbors.vote import top_k_accuracy
from instdisc.runs.log import LOGGER, progress
from instdisc.training.dist import Process, gather_by_index

TOP = 5  # ranked classes that a prediction keeps


@torch.inference_mode()
def predict(
    model: nn.Module,
    samples: Dataset[Any],
    num_images: int,
    process: Process,
    *,
    batch_size: int,
    workers: int = 0,
    skip_bad: bool = False,
) -> dict[str, Tensor]:
    """The best classes of every image, best first, for every head: `(N, min(5, C))` by name.

    With `skip_bad`, an unreadable image has the classes -1.
    """
    if num_images < process.world_size:
        raise UserError(f"{num_images} images for {process.world_size} processes: start fewer")
    model.eval()
    plan = sequential_plan(num_images, batch_size, process.rank, process.world_size)
    loader = build_loader(samples, plan, workers, pin_memory=process.device.type == "cuda")
    report = functools.partial(LOGGER.warning, "left out: %s") if skip_bad else None
    ranked: list[Tensor] = []
    places: list[Tensor] = []
    names: list[str] = []
    for inputs, indices, errors in progress(loader, title="evaluating", enabled=process.is_main):
        valid = keep_valid(errors, process.device, report)
        outputs = model(to_device(inputs, process.device))
        names = list(outputs)
        best = [outputs[name].float() for name in names]
        best = [each.topk(min(TOP, each.shape[1]), dim=1).indices for each in best]
        ranked.append(torch.where(valid[:, None, None] > 0, torch.stack(best, dim=1), -1))
        places.append(indices.to(process.device))
    table = gather_by_index(torch.cat(ranked), torch.cat(places), num_images).cpu()
    return {name: table[:, number] for number, name in enumerate(names)}


def accuracy(ranked: Tensor, labels: Tensor, k: int) -> float:
    """Percentage of the readable images whose class is among the first k predictions."""
    readable = ranked[:, 0] >= 0
    if not readable.any():
        raise UserError("none of the images to evaluate can be read: name other data")
    return top_k_accuracy(ranked[readable], labels[readable], k)

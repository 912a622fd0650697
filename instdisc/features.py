"""A model over a data set: features in the order of the images."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from instdisc.cli import UserError
from instdisc.data import ImageSet
from instdisc.dist import Process, gather_by_index
from instdisc.loading import Samples, build_loader, sequential_plan
from instdisc.run_log import progress
from instdisc.transforms import InputSpec, eval_transform


@torch.inference_mode()
def extract_features(
    model: nn.Module | Callable[[Tensor], Tensor],
    images: ImageSet,
    spec: InputSpec,
    process: Process,
    *,
    batch_size: int = 256,
    workers: int = 0,
    title: str = "features",
) -> Tensor:
    """Runs a model over every image once, shared over the processes.

    Returns:
        Features on the CPU in the order of the images, `(N, D)`, float32, on every process.
    """
    if isinstance(model, nn.Module):
        model.eval()
    samples = Samples(images, eval_transform(spec), spec, seed=0)
    plan = sequential_plan(len(images), batch_size, process.rank, process.world_size)
    rows, places = [], []
    loader = build_loader(samples, plan, workers, pin_memory=process.device.type == "cuda")
    for pixels, indices, errors in progress(loader, title=title, enabled=process.is_main):
        for error in filter(None, errors):
            raise UserError(error)
        rows.append(model(pixels.to(process.device, non_blocking=True)).float().cpu())
        places.append(indices)
    table = torch.cat(rows) if rows else torch.empty(0, 0)
    where = torch.cat(places) if places else torch.empty(0, dtype=torch.int64)
    if process.world_size == 1 or process.device.type == "cpu":
        return gather_by_index(table, where, len(images))
    device = process.device
    return gather_by_index(table.to(device), where.to(device), len(images)).cpu()

"""A model over a data set: which features there are, and their values in the order of the images.

`extract_features` keeps them in memory, for a network that is still being trained; for one that is
finished, `instdisc.features.store` computes them once and keeps them on disk.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from instdisc.errors import UserError
from instdisc.images.loading import Samples, build_loader, sequential_plan, to_device
from instdisc.images.sets import ImageSet
from instdisc.images.transforms import InputSpec, eval_transform
from instdisc.networks.weights import Weights
from instdisc.runs.log import progress
from instdisc.training.dist import Process, all_gather_rows, gather_by_index

Model = nn.Module | Callable[[Tensor], Tensor]
Batches = Sequence[Sequence[tuple[int, int]]]


@dataclasses.dataclass(frozen=True)
class Extractor:
    """Images `(B, 3, H, W)` -> rows `(B, D)` of one of a network's features.

    Attributes:
        name: embedding, backbone, or a stage of the network.
        what: of which network and how exactly; part of the key of stored features.
        function: makes them, before normalisation.
        unit: normalise them; else they are given as they come.
    """

    name: str
    what: str
    function: Callable[[Tensor], Tensor]
    unit: bool = True

    def __call__(self, images: Tensor) -> Tensor:
        """Rows in float32."""
        rows = self.function(images).float()
        return nn.functional.normalize(rows, dim=1) if self.unit else rows


def default_features(weights: Weights) -> str:
    """The paper's choice, the 128-d output; the backbone's where there is no projection."""
    return "embedding" if weights.embedding is not None else "backbone"


def describe_network(weights: Weights) -> str:
    """Which network it is: some share all tensors and yet compute different things."""
    backbone: Any = weights.backbone
    return f"{backbone.arch} {getattr(backbone, 'stem', '')}".strip()


def check_stages(weights: Weights, names: Sequence[str]) -> None:
    """Refuses the first name that is none of the network's stages, nor its output."""
    known = ("embedding", "backbone", *weights.backbone.stage_names)
    for name in names:
        if name not in known:
            raise UserError(f"{weights.name} has no {name}: choose from {', '.join(known)}")


def build_extractor(weights: Weights, name: str) -> Extractor:
    """The features of that name: the embedding, the backbone's output, or a stage, averaged.

    An imported AlexNet or VGG16 may have come without its linear layers; its backbone's features
    are then the averaged maps that those layers would see.
    """
    backbone: Any = weights.backbone
    network = describe_network(weights)
    if name == "embedding":
        if weights.embedding is None:
            raise UserError(f"{weights.name} has no projection: use --features backbone")
        return Extractor(name, f"{network}: {name}", weights.embedding)
    if name == "backbone":
        missing = weights.pretraining.get("missing") or ()
        if any(str(layer).startswith("classifier.") for layer in missing):
            maps = backbone.trunk.features
            return Extractor(
                name, f"{network}: averaged pool5", lambda images: maps(images).mean((2, 3))
            )
        return Extractor(name, f"{network}: {name}", backbone)
    check_stages(weights, [name])
    return Extractor(
        name,
        f"{network}: averaged {name}",
        lambda images: backbone.stages(images)[name].mean((2, 3)),
    )


@torch.inference_mode()
def iterate_features(
    model: Model,
    images: ImageSet,
    spec: InputSpec,
    process: Process,
    plan: Batches,
    *,
    workers: int = 0,
    title: str = "features",
) -> Iterator[tuple[Tensor, Tensor, list[str]]]:
    """Runs a model over the planned batches.

    Yields:
        Indices `(B,)`, features `(B, D)` in float32 on the CPU, and a message for each image that
        could not be read (else empty), whose features mean nothing.
    """
    if isinstance(model, nn.Module):
        model.eval()
    samples = Samples(images, eval_transform(spec), spec, seed=0)
    on_gpu = process.device.type == "cuda"
    # Starting a worker takes longer than a few batches.
    loader = build_loader(samples, plan, min(workers, len(plan) // 2), pin_memory=on_gpu)
    for pixels, indices, errors in progress(loader, title=title, enabled=process.is_main):
        rows = model(to_device(pixels, process.device))
        yield indices, rows.float().cpu(), list(errors)


def extract_features(
    model: Model,
    images: ImageSet,
    spec: InputSpec,
    process: Process,
    *,
    batch_size: int = 256,
    workers: int = 0,
    title: str = "features",
    skip_bad: bool = False,
    check: Callable[[], None] | None = None,
) -> Tensor:
    """Runs a model over every image once, shared over the processes.

    Args:
        model: images `(B, 3, H, W)` -> `(B, D)`.
        images: the data set.
        spec: how the model wants its images.
        process: this process among its peers.
        batch_size: images at a time.
        workers: loader processes.
        title: of the progress bar.
        skip_bad: give an unreadable image zeros, which are like nothing, instead of stopping.
        check: called between batches, equally often on every process; may raise to stop.

    Returns:
        Features on the CPU in the order of the images, `(N, D)`, float32, on every process.
    """
    plan = sequential_plan(len(images), batch_size, process.rank, process.world_size)
    rows, places = [], []
    batches = iterate_features(model, images, spec, process, plan, workers=workers, title=title)
    # As many turns as the first process has batches: another may have one less.
    for _ in sequential_plan(len(images), batch_size, 0, process.world_size):
        if check is not None:
            check()
        batch = next(batches, None)
        if batch is None:
            continue
        indices, features, errors = batch
        if any(errors):
            if not skip_bad:
                raise UserError(next(filter(None, errors)))
            readable = torch.tensor([not error for error in errors])
            features = torch.where(readable[:, None], features, 0.0)
        rows.append(features)
        places.append(indices)
    device = process.device
    # A process may have no image at all, and learns here how wide the rows are.
    width = all_gather_rows(torch.tensor([rows[0].shape[1] if rows else 0], device=device))
    table = torch.cat(rows) if rows else torch.empty(0, int(width.max()))
    where = torch.cat(places) if places else torch.empty(0, dtype=torch.int64)
    if process.world_size == 1:  # no detour over a GPU
        return gather_by_index(table, where, len(images))
    return gather_by_index(table.to(device), where.to(device), len(images)).cpu()

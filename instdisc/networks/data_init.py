"""Data-dependent initialisation (Krähenbühl et al., ICLR 2016), a baseline of the paper's tables.

Gaussian weights are scaled, layer by layer, until every channel has zero mean and unit variance
over a few images; then the layers are scaled against each other until all of them would learn at
the same rate. Neither step changes which function of its input a channel computes beyond an affine
map. The variant without k-means: weights stay random.

Where batch norm follows a layer, its statistics take up the mean of a layer that has no bias, and
the scale that balancing gives to the layer: the norm's output keeps unit variance.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instdisc.images.locations import locate_data
from instdisc.images.sets import ImageSet, load_images
from instdisc.images.transforms import InputSpec, eval_transform
from instdisc.networks.backbones import Embedding
from instdisc.training.seed import generator

NUM_IMAGES = 32
NUM_FOR_RATES = 16  # gradients cost three times the memory and time
CHUNK = 4  # images per backward pass
Affine = (nn.Conv2d, nn.Linear)


@dataclasses.dataclass
class Unit:
    """A layer with weights, and the batch norm that reads its output, if one does."""

    layer: nn.Conv2d | nn.Linear
    norm: nn.BatchNorm2d | None = None


def _statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, `(C,)`, over images and places."""
    flat = values.transpose(0, 1).flatten(1)
    return flat.mean(dim=1), flat.std(dim=1, correction=0).clamp_min(1e-8)


def _shaped(channels: Tensor, like: Tensor) -> Tensor:
    return channels.view(1, -1, *([1] * (like.dim() - 2)))


@torch.no_grad()
def normalize_layers(model: nn.Module, pixels: Tensor, seed: int = 0) -> list[Unit]:
    """Draws Gaussian weights, and scales each layer by what comes out of it.

    One forward pass: a layer is corrected as its output appears, so those behind it see their input
    as it will be.

    Args:
        model: changed in place; in eval mode.
        pixels: `(B, 3, H, W)`.
        seed: of the weights.

    Returns:
        The layers in the order in which they run.
    """
    units: list[Unit] = []
    last_output: list[Tensor] = []

    def correct(module: Any, args: Any, output: Tensor) -> Tensor:
        mean, std = _statistics(output)
        module.weight /= std.view(-1, *([1] * (module.weight.dim() - 1)))
        output = output / _shaped(std, output)
        if module.bias is not None:
            module.bias.copy_(-mean / std)
            output = output - _shaped(mean / std, output)
        units.append(Unit(module))
        last_output[:] = [output]
        return output

    def take_statistics(module: Any, args: tuple[Tensor, ...]) -> None:
        mean, std = _statistics(args[0])
        module.reset_parameters()
        module.running_mean.copy_(mean)
        module.running_var.copy_(std.square())
        if last_output and args[0] is last_output[0]:
            units[-1].norm = module

    handles = []
    for name, module in model.named_modules():
        if isinstance(module, Affine):
            module.weight.normal_(generator=generator(seed, "data-init", name))
            if module.bias is not None:
                module.bias.zero_()
            handles.append(module.register_forward_hook(correct))
        elif isinstance(module, nn.BatchNorm2d):
            handles.append(module.register_forward_pre_hook(take_statistics))
    try:
        model(pixels)
    finally:
        for handle in handles:
            handle.remove()
    return units


def learning_rates(
    model: nn.Module, units: Sequence[Unit], pixels: Tensor, seed: int = 0
) -> list[float]:
    """How fast each layer would change: size of its gradient over size of its weights.

    The loss is a random linear function of the output, another one for each image, so that the
    squares of the summed gradient are in expectation the sum of each image's.
    """
    weights = [unit.layer.weight for unit in units]
    squares = [0.0] * len(units)
    noise = generator(seed, "data-init", "loss")
    for part in pixels.split(CHUNK):
        output = model(part)
        direction = torch.randn(output.shape, generator=noise)
        gradients = torch.autograd.grad((output * direction).sum(), weights)
        squares = [s + float(g.square().sum()) for s, g in zip(squares, gradients, strict=True)]
    sizes = [float(weight.detach().square().sum()) for weight in weights]
    return [math.sqrt(s / size) for s, size in zip(squares, sizes, strict=True)]


@torch.no_grad()
def balance_layers(units: Sequence[Unit], rates: Sequence[float]) -> None:
    """Scales the layers so that all learn at the geometric mean of their rates.

    A layer that is scaled by r has its gradient divided by r, and so its rate by r squared, once
    the scale is undone behind it: by its batch norm, or else by the weights of the next layer. The
    last layer's scale is undone by the L2 normalisation of the embedding.
    """
    target = math.exp(sum(map(math.log, rates)) / len(rates))
    before = 1.0  # scale of this layer's input that it has to undo
    for unit, rate in zip(units, rates, strict=True):
        scale = before * math.sqrt(rate / target)
        unit.layer.weight *= scale / before
        if unit.layer.bias is not None:
            unit.layer.bias *= scale
        before = scale
        if unit.norm is not None:
            assert unit.norm.running_mean is not None
            assert unit.norm.running_var is not None
            unit.norm.running_mean *= scale
            unit.norm.running_var *= scale**2
            before = 1.0


def initialize(model: Embedding, pixels: Tensor, seed: int = 0) -> Embedding:
    """Initialises a network from images, `(B, 3, H, W)`, in place; leaves it in eval mode."""
    model.eval()
    # Without the L2 normalisation, whose gradient would vanish along the output.
    chain = nn.Sequential(model.backbone, model.projection)
    units = normalize_layers(chain, pixels, seed)
    rates = learning_rates(chain, units, pixels[:NUM_FOR_RATES], seed)
    balance_layers(units, rates)
    return model


def sample_pixels(images: ImageSet, spec: InputSpec, *, count: int, seed: int) -> Tensor:
    """Random images as a network sees them in evaluation, `(count, 3, H, W)`."""
    order = torch.randperm(len(images), generator=generator(seed, "data-init", "images"))
    chosen = np.sort(order[:count].numpy())
    transform = eval_transform(spec)
    return torch.stack([transform(images.open(int(index))) for index in chosen])


def initialize_from_data(
    model: Embedding, spec: InputSpec, *, data: str | None = None, seed: int = 0
) -> Embedding:
    """The same from training images of `data`, as `--data` names it; of the demo set if nothing."""
    images = load_images(locate_data(data), "train")
    return initialize(model, sample_pixels(images, spec, count=NUM_IMAGES, seed=seed), seed)

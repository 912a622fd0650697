"""Folds batch norm into the convolution before it, for targets that have none.

In eval mode y = g (w * x + b - mean) / sqrt(var + eps) + beta is again a convolution. It is
computed in float64 and rounded once, so the only error is that of storing it in float32.
"""

import torch
from torch import Tensor, nn


def fold_pair(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Weight `(O, I, H, W)` and bias `(O,)` of the convolution that equals both layers."""
    assert norm.running_mean is not None, "without statistics there is nothing to fold"
    assert norm.running_var is not None, "without statistics there is nothing to fold"
    weight = conv.weight.detach().double()
    bias = conv.bias.detach().double() if conv.bias is not None else weight.new_zeros(len(weight))
    scale = norm.weight.detach().double() / torch.sqrt(norm.running_var.double() + norm.eps)
    shift = norm.bias.detach().double() - norm.running_mean.double() * scale
    return (weight * scale.view(-1, 1, 1, 1)).float(), (bias * scale + shift).float()


def fold_batch_norm(features: nn.Sequential) -> dict[str, Tensor]:
    """The convolutions of `features` with their batch norms folded in.

    Returns:
        `N.weight` and `N.bias`, where N counts the layers as if there were no batch norms: the
        numbering of torchvision's `alexnet` and `vgg16`.
    """
    folded: dict[str, Tensor] = {}
    layers = list(features)
    number = 0
    for position, layer in enumerate(layers):
        if isinstance(layer, nn.BatchNorm2d):
            assert isinstance(layers[position - 1], nn.Conv2d), "batch norm follows a convolution"
            continue
        if isinstance(layer, nn.Conv2d):
            follower = layers[position + 1]
            if isinstance(follower, nn.BatchNorm2d):
                weight, bias = fold_pair(layer, follower)
            else:
                assert layer.bias is not None, "a convolution without norm has a bias here"
                weight, bias = layer.weight.detach(), layer.bias.detach()
            folded[f"{number}.weight"], folded[f"{number}.bias"] = weight, bias
        number += 1
    return folded


def fold_trunk(trunk: nn.Module) -> dict[str, Tensor]:
    """AlexNet's or VGG16's weights under the names of torchvision's networks without batch norm."""
    features = trunk.get_submodule("features")
    assert isinstance(features, nn.Sequential), "AlexNet and VGG16 only"
    folded = {f"features.{name}": tensor for name, tensor in fold_batch_norm(features).items()}
    rest = {k: v.detach() for k, v in trunk.state_dict().items() if k.startswith("classifier.")}
    return {**folded, **rest}

"""Linear layers trained by SGD on frozen features, as MoCo, VISSL and OpenSelfSup have them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from instdisc.training import dist
from transfer.finetuning.supervised import build_head


class BatchStatistics(nn.Module):
    """Batch norm without scale and shift, over the batch of all processes.

    No gradient goes through it: what it normalises is frozen. So it needs neither torch's synced
    batch norm, which is for GPUs only, nor its communication on the way back.
    """

    mean: Tensor
    var: Tensor

    def __init__(self, channels: int, *, momentum: float = 0.1, eps: float = 1e-5) -> None:
        super().__init__()
        self.channels, self.momentum, self.eps = channels, momentum, eps
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))

    @torch.no_grad()
    def forward(self, rows: Tensor) -> Tensor:
        """Maps as rows `(B, C * P)`, normalised by channel; the running statistics in eval mode."""
        maps = rows.view(len(rows), self.channels, -1)
        mean, var = self.mean, self.var
        if self.training:
            count = maps.new_full((1,), len(maps) * maps.shape[2], dtype=torch.float64)
            sums = maps.sum((0, 2), dtype=torch.float64), maps.double().square().sum((0, 2))
            parts = dist.all_reduce_sum(torch.cat([count, *sums]))
            count, (total, squares) = parts[:1], parts[1:].split(self.channels)
            exact = total / count
            spread = (squares / count - exact.square()).clamp(min=0)
            mean, var = exact.float(), spread.float()
            # As torch has it: normalised by the batch's own variance, estimated for the others.
            unbiased = (spread * count / (count - 1).clamp(min=1)).float()
            self.mean.lerp_(mean, self.momentum)
            self.var.lerp_(unbiased, self.momentum)
        return ((maps - mean[:, None]) * (var[:, None] + self.eps).rsqrt()).flatten(1)


class LinearHeads(nn.Module):
    """For every stage one linear layer per learning rate, all trained side by side.

    Args:
        widths: dimension of each stage.
        channels: how many of them each stage has.
        num_classes: outputs of a layer.
        num_heads: layers on a stage; they start from the same weights.
        batch_norm: off, plain, or affine; statistics are shared by the layers of a stage, scale and
            shift are each one's own.
        init: of weight and bias: normal (0.01 and 0) or torch's uniform.
        seed: of that draw.
    """

    def __init__(
        self,
        widths: Mapping[str, int],
        channels: Mapping[str, int],
        num_classes: int,
        *,
        num_heads: int,
        batch_norm: str,
        init: str,
        seed: int,
    ) -> None:
        super().__init__()
        self.names = {stage: [f"{stage}/{i}" for i in range(num_heads)] for stage in widths}
        self.channels = dict(channels)
        self.norms, self.layers = nn.ModuleDict(), nn.ModuleDict()
        self.scales, self.shifts = nn.ParameterDict(), nn.ParameterDict()
        for stage, names in self.names.items():
            if batch_norm != "off":
                self.norms[stage] = BatchStatistics(channels[stage])
            for name in names:
                self.layers[name] = build_head(
                    widths[stage], num_classes, init, seed, "heads", stage
                )
                if batch_norm == "affine":
                    self.scales[name] = torch.ones(channels[stage], 1)
                    self.shifts[name] = torch.zeros(channels[stage], 1)

    def forward(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scores `(B, C)` by `stage/number of the layer`."""
        scores: dict[str, Tensor] = {}
        for stage, names in self.names.items():
            rows = features[stage].float()
            if stage in self.norms:
                rows = self.norms[stage](rows)
            for name in names:
                inputs = rows
                if name in self.scales:
                    maps = rows.view(len(rows), self.channels[stage], -1)
                    inputs = torch.addcmul(self.shifts[name], maps, self.scales[name]).flatten(1)
                scores[name] = self.layers[name](inputs)
        return scores

    def groups(
        self, rates: Mapping[str, Sequence[float]], weight_decay: float
    ) -> list[dict[str, Any]]:
        """Parameters with the learning rates of their stage; scale and shift do not decay."""
        groups: list[dict[str, Any]] = []
        for stage, names in self.names.items():
            for name, rate in zip(names, rates[stage], strict=True):
                layer = list(self.layers[name].parameters())
                groups.append({"params": layer, "lr_scale": rate, "weight_decay": weight_decay})
                if name in self.scales:
                    affine = [self.scales[name], self.shifts[name]]
                    groups.append({"params": affine, "lr_scale": rate, "weight_decay": 0.0})
        return groups

"""What linear probes look at: feature maps pooled to about 10K dimensions (section 4.2)."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from instdisc.errors import UserError
from instdisc.features.extract import (
    Extractor,
    build_extractor,
    check_stages,
    describe_network,
)
from instdisc.networks.recording import recorded_outputs
from instdisc.networks.weights import Weights

POOLED_DIM = 10_000
# Kernel, stride and padding of the averages of VISSL and OpenSelfSup, by channels and height of a
# map: conv1 (before its max pooling) to conv5 of ResNet-50 at 224 pixels, 12, 6, 4, 3, 2 wide.
VISSL_WINDOWS = {
    (64, 112): (10, 10, 4),
    (256, 56): (16, 8, 0),
    (512, 28): (13, 5, 0),
    (1024, 14): (8, 3, 0),
    (2048, 7): (6, 1, 0),
}
LARGEST_HALF = torch.finfo(torch.float16).max


class NotFrozenError(RuntimeError):
    """A network that a probe must leave alone has changed: its numbers mean nothing."""


def grid_side(channels: int) -> int:
    """Side of the pooled map: the largest square grid with at most 10,000 values, one at least.

    AlexNet's 96, 256, 384 channels give 10x10, 6x6, 5x5; ResNet-50's stages 12, 6, 4, 3, 2.
    """
    return max(1, math.isqrt(POOLED_DIM // channels))


def pool_map(maps: Tensor, pooling: str = "grid") -> Tensor:
    """Averages `(B, C, H, W)` over a grid, `(B, C * side * side)`; never finer than the map.

    With `vissl`, over overlapping windows where these are published.
    """
    windows = VISSL_WINDOWS.get((maps.shape[1], maps.shape[2])) if pooling == "vissl" else None
    if windows is not None and maps.shape[2] == maps.shape[3]:
        return nn.functional.avg_pool2d(maps, *windows).flatten(1)
    side = grid_side(maps.shape[1])
    size = (min(side, maps.shape[2]), min(side, maps.shape[3]))
    return nn.functional.adaptive_avg_pool2d(maps, size).flatten(1)


class StageFeatures:
    """A frozen network: images -> the features of the stages that are probed, in one pass.

    Deliberately no nn.Module: held by a probe it is none of its parts, so that the loop can neither
    switch it to training mode nor optimise nor save it.
    """

    def __init__(self, weights: Weights, stages: Sequence[str], pooling: str = "grid") -> None:
        if "embedding" in stages and weights.embedding is None:
            raise UserError(f"{weights.name} has no projection: use --stage backbone")
        check_stages(weights, stages)
        self.weights, self.stages, self.pooling = weights, tuple(stages), pooling
        self.maps = tuple(name for name in stages if name in weights.backbone.stage_names)
        self.modules: list[nn.Module] = [weights.embedding or weights.backbone]
        self.direct: dict[str, Any] = {
            name: build_extractor(weights, name).function
            for name in stages
            if name not in self.maps
        }
        backbone: Any = weights.backbone
        self.recorded: dict[str, nn.Module] = {"trunk": backbone.trunk}
        if pooling == "vissl" and getattr(backbone, "taps", {}).get("conv1") == "maxpool":
            self.recorded["conv1"] = backbone.trunk.relu
        for module in self.modules:
            module.requires_grad_(False).eval()

    @torch.no_grad()
    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Features by stage, `(B, D)` in float32."""
        found: dict[str, Tensor] = {}
        output: dict[str, Tensor] = {}
        backbone = self.weights.backbone
        if self.maps:
            # Our trunk also gives its output on the way; another one is asked for it again.
            with recorded_outputs(self.recorded) as output:
                maps = backbone.stages(images)
            found = {
                stage: pool_map(output.get(stage, maps[stage]), self.pooling) for stage in self.maps
            }
        for stage, function in self.direct.items():
            if output and function is self.weights.backbone:
                found[stage] = output["trunk"]
            elif output and function is self.weights.embedding:
                projected = self.weights.embedding.projection(output["trunk"])
                found[stage] = nn.functional.normalize(projected.float(), dim=1)
            else:
                found[stage] = function(images)
        return {stage: found[stage].float() for stage in self.stages}

    @functools.cached_property
    def widths(self) -> dict[str, int]:
        """The dimension of each stage, by trying."""
        device = next(self.modules[0].parameters()).device
        size = self.weights.spec.size
        blank = torch.zeros(1, 3, size, size, device=device)
        return {stage: rows.shape[1] for stage, rows in self(blank).items()}

    @property
    def channels(self) -> dict[str, int]:
        """How many channels each stage has; a feature without places is all channels."""
        backbone = self.weights.backbone
        known = dict(zip(backbone.stage_names, backbone.channels, strict=True))
        return {stage: known.get(stage, width) for stage, width in self.widths.items()}

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """Rows that hold all stages side by side, `(B, sum of D)`, by stage."""
        return dict(zip(self.widths, rows.split(list(self.widths.values()), dim=1), strict=True))

    def prove_unchanged(self, before: str) -> None:
        """Compares the hash of all tensors, batch-norm statistics included.

        Raises:
            NotFrozenError: something has changed them.
        """
        if self.weights.hash != before:
            raise NotFrozenError(
                f"{self.weights.name} changed while probes were trained on it: no result is kept"
            )


@dataclasses.dataclass(frozen=True)
class PooledExtractor(Extractor):
    """All probed stages side by side as one row, as the feature store takes them."""

    largest: float = math.inf

    def __call__(self, images: Tensor) -> Tensor:
        """Rows `(B, sum of D)` in float32, not normalised: a probe standardises them itself."""
        rows = self.function(images)
        if rows.abs().max() > self.largest:
            raise UserError("the features leave the range of half precision: --precision float32")
        return rows


def pooled_extractor(features: StageFeatures, precision: str) -> Extractor:
    """The extractor of a frozen network's stages; of the embedding alone the one that kNN has."""
    if features.stages == ("embedding",):
        return build_extractor(features.weights, "embedding")
    names = "+".join(features.stages)
    windows = ", windows of VISSL" if features.pooling == "vissl" else ""
    return PooledExtractor(
        name=names,
        what=f"{describe_network(features.weights)}: {names} pooled to {POOLED_DIM}{windows}",
        function=lambda images: torch.cat(list(features(images).values()), dim=1),
        largest=LARGEST_HALF if precision == "half" else math.inf,
    )

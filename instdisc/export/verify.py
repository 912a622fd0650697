"""Proof of a conversion: the target library opens the file, runs it, and gives the same features.

Two checks that do not share their mistakes: every backbone tensor of the library's own model must
equal, value for value, the one that was to be written; and every stage must give the same numbers
as the original network, which also catches a tensor that was written under another one's name.
Differences are relative to the largest absolute value of the original's stage. An absolute bound
would be blind to small activations, and would refuse large ones: random networks reach thousands,
where float32 itself is no better than 1e-4.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torchvision.transforms.v2.functional import to_pil_image

from instdisc.errors import UserError, some_of
from instdisc.export import Target
from instdisc.export.contract import (
    FC_TAPS,
    Loaded,
    Source,
    normalize,
    record_outputs,
    record_timm,
)
from instdisc.export.to_detectron2 import save_detectron2, to_detectron2
from instdisc.export.to_timm import load_timm, save_timm, to_timm
from instdisc.export.to_torchvision import load_torchvision, save_torchvision, to_torchvision
from instdisc.images.transforms import eval_transform
from instdisc.networks.timm_backbones import TimmBackbone

TOLERANCE = 1e-4
SMALLEST = 1e-3  # a stage below this is dead, and its rounding errors are no features


@dataclasses.dataclass(frozen=True)
class Converter:
    """Tensors for a target, its files, and the way back through its library."""

    convert: Callable[[Source], dict[str, Tensor]]
    save: Callable[[Path, Source], None]
    load: Callable[[Path, Source], Loaded]


def _load_detectron2(folder: Path, source: Source) -> Loaded:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch, about what fvcore does on import
        # Late, so that the other targets do without Detectron2.
        from instdisc.export.detectron2_check import load_detectron2

    return load_detectron2(folder, source)


CONVERTERS: dict[Target, Converter] = {
    "timm": Converter(to_timm, save_timm, load_timm),
    "detectron2": Converter(to_detectron2, save_detectron2, _load_detectron2),
    "torchvision": Converter(to_torchvision, save_torchvision, load_torchvision),
}


@dataclasses.dataclass(frozen=True)
class Verification:
    """A conversion that passed.

    Attributes:
        target: the library's short name.
        library: its name and version.
        num_tensors: backbone tensors of its model, all of them loaded with the right values.
        differences: largest difference of each output from the original's.
    """

    target: Target
    library: dict[str, str]
    num_tensors: int
    differences: dict[str, float]

    @property
    def largest_difference(self) -> float:
        """Over all outputs."""
        return max(self.differences.values())

    def __str__(self) -> str:
        count = f"{self.num_tensors} of {self.num_tensors} tensors"
        return f"{self.target}: {count}, largest difference {self.largest_difference:.1e}"


def fixed_images() -> Tensor:
    """Two RGB images of bytes, noise and coloured patches, `(2, 3, 96, 112)`."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (3, 96, 112), generator=generator, dtype=torch.uint8)
    patches = torch.randint(0, 256, (3, 6, 7), generator=generator, dtype=torch.uint8)
    return torch.stack([noise, patches.repeat_interleave(16, 1).repeat_interleave(16, 2)])


def reference_outputs(source: Source, images: Tensor) -> dict[str, Tensor]:
    """Everything a target may be compared in, computed by the original network."""
    pixels = normalize(images, source.spec.mean, source.spec.std)
    if isinstance(source.backbone, TimmBackbone):
        outputs = record_timm(source.backbone, pixels)
    else:
        taps = {**source.taps, **FC_TAPS.get(source.arch, {})}
        outputs = record_outputs(source.backbone.trunk, taps, pixels)
    transform = eval_transform(source.spec)
    outputs["pixels"] = pixels
    outputs["transform"] = torch.stack([transform(to_pil_image(image)) for image in images])
    return outputs


def difference(found: Tensor, reference: Tensor) -> float:
    """Largest absolute difference, in units of the largest absolute reference."""
    if found.shape != reference.shape:
        return math.inf
    scale = max(SMALLEST, float(reference.abs().max()))
    return float((found - reference).abs().max()) / scale


def _wrong_tensors(loaded: Loaded, expected: dict[str, Tensor]) -> list[str]:
    """Names that are missing on one side or differ in a value."""

    def same(ours: Tensor | None, theirs: Tensor | None) -> bool:
        if ours is None or theirs is None or ours.dtype != theirs.dtype:
            return False
        return torch.equal(ours, theirs)

    names = sorted(loaded.tensors.keys() | expected.keys())
    return [name for name in names if not same(expected.get(name), loaded.tensors.get(name))]


def verify_target(
    folder: Path, target: Target, original: Source, images: Tensor | None = None
) -> Verification:
    """Opens a converted file through its library and compares it with the original.

    Args:
        folder: the export folder. Detectron2 unpickles its file: only for files of our own making.
        target: which of its files.
        original: the network that was converted.
        images: RGB bytes `(B, 3, H, W)` to run both on, no larger than 224 pixels; the fixed
            ones without it.

    Raises:
        UserError: a tensor is missing or altered, or a stage differs; the message names them.
    """
    converter = CONVERTERS[target]
    expected = converter.convert(original)
    try:
        loaded = converter.load(folder, original)
    except RuntimeError as error:  # torch's strict loading, which names the tensors itself
        reason = " ".join(str(error).split())
        raise UserError(f"{target}: the converted weights do not load: {reason}") from None
    images = fixed_images() if images is None else images
    if isinstance(original.backbone, TimmBackbone):  # many take images of one size only
        images = nn.functional.interpolate(images, size=(original.spec.size,) * 2)
    reference = reference_outputs(original, images)
    found = loaded.outputs(images)
    compared = [name for name in reference if name in found]
    assert set(original.backbone.stage_names) <= set(compared), f"{target} must show all stages"
    differences = {name: difference(found[name], reference[name]) for name in compared}

    total = len(loaded.tensors)
    wrong = _wrong_tensors(loaded, expected)
    # A NaN is no difference below the tolerance, hence the `not`.
    apart = [name for name, value in differences.items() if not value <= TOLERANCE]
    if wrong or apart:
        right = total - len(set(wrong) & loaded.tensors.keys())
        worst = max((math.inf if math.isnan(v) else v) for v in differences.values())
        parts = [f"{right} of {total} tensors, largest difference {worst:.1e}"]
        if wrong:
            parts.append(f"missing or altered: {some_of(wrong)}")
        if apart:
            parts.append(f"above {TOLERANCE}: {some_of(apart)}")
        raise UserError(f"{target}: the conversion failed: {'; '.join(parts)}")
    return Verification(target, loaded.library, total, differences)

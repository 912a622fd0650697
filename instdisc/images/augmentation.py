"""Random views of an image: what is drawn, apart from how it is computed.

The distribution is that of torchvision's RandomResizedCrop, RandomGrayscale, ColorJitter and
RandomHorizontalFlip in this order, as the authors' code has them; tests compare the two. All draws
of a view are one call of torch's CPU generator. Pixels go from the decoder to the normalised
tensor through a few calls that loop in C, and colours are handled in bytes until the last of them.
"""

import dataclasses
import itertools
import math

import cv2
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from instdisc.images.decode import to_rgb

RATIO = (3 / 4, 4 / 3)  # of width to height
ATTEMPTS = 10  # crops that do not fit are drawn again; then the largest central one is taken
NUM_DRAWS = 32
ORDERS = tuple(itertools.permutations(("brightness", "contrast", "saturation", "hue")))
LUMINANCE = (0.299, 0.587, 0.114)
# A JPEG is decoded at 1/2, 1/4 or 1/8 where the crop then still has this many times the pixels of
# the output on each side, so that most of the smoothing is still done by the resize.
REDUCTION_MARGIN = 1.5
_LEVELS = np.arange(256, dtype=np.float32)


@dataclasses.dataclass(frozen=True)
class View:
    """What one look at an image consists of.

    Attributes:
        box: left, top, right, bottom of the crop, in pixels of the whole image.
        gray: whether colours are dropped.
        flip: whether left and right are exchanged.
        order: names of the jitter's operations, in the order of their use; none without jitter.
        factors: of brightness, contrast, saturation (1 changes nothing) and hue (0 does).
    """

    box: tuple[int, int, int, int]
    gray: bool = False
    flip: bool = False
    order: tuple[str, ...] = ()
    factors: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 0.0)


def draw_box(
    width: int, height: int, min_scale: float, draws: list[float]
) -> tuple[int, int, int, int]:
    """A crop of uniform area share, log-uniform aspect ratio and uniform place.

    Args:
        width: of the image.
        height: of the image.
        min_scale: smallest share of the image's area.
        draws: 2 * ATTEMPTS + 2 numbers from [0, 1).
    """
    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for attempt in range(ATTEMPTS):
        area = width * height * (min_scale + (1 - min_scale) * draws[2 * attempt])
        ratio = math.exp(low + (high - low) * draws[2 * attempt + 1])
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left = int(draws[-2] * (width - w + 1))
            top = int(draws[-1] * (height - h + 1))
            return left, top, left + w, top + h
    w, h = min(width, round(height * RATIO[1])), min(height, round(width / RATIO[0]))
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def read_crop(image: Image.Image, box: tuple[int, int, int, int], size: int) -> np.ndarray:
    """Decodes the crop as RGB bytes `(H, W, 3)`, already of `size` if it came reduced.

    Args:
        image: an opened image, decoded or not.
        box: left, top, right, bottom in its pixels.
        size: side of the output that the crop is for.
    """
    width, height = image.size
    shortest = min(box[2] - box[0], box[3] - box[1])
    scale = next((s for s in (8, 4, 2) if shortest >= s * size * REDUCTION_MARGIN), 1)
    drafted = image.draft(None, (width // scale, height // scale)) if scale > 1 else None
    if image.mode != "RGB":
        image = to_rgb(image)
    if drafted is None:  # not a JPEG, decoded before, or wanted whole
        return np.asarray(image.crop(box))
    across, down = drafted[1][2] / width, drafted[1][3] / height
    left, top, right, bottom = box[0] * across, box[1] * down, box[2] * across, box[3] * down
    x, y = int(left), int(top)
    part = image.crop((x, y, math.ceil(right), math.ceil(bottom)))
    inner = (left - x, top - y, right - x, bottom - y)
    return np.asarray(part.resize((size, size), Image.Resampling.BILINEAR, box=inner))


def resize(pixels: np.ndarray, size: int) -> np.ndarray:
    """Antialiased bilinear resize of bytes `(H, W, 3)` to a square; Pillow's, but vectorised."""
    if pixels.shape[:2] == (size, size):
        return pixels
    # torch warns about arrays that it may not write to; it only reads this one.
    pixels = pixels if pixels.flags.writeable else pixels.copy()
    batch = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(
        batch, (size, size), mode="bilinear", antialias=True, align_corners=False
    )
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def _blend(pixels: np.ndarray, other: float, factor: float) -> np.ndarray:
    """`factor` of the pixels and the rest of one level, clipped and truncated as Pillow does."""
    table = other + np.float32(factor) * (_LEVELS - np.float32(other))
    return cv2.LUT(pixels, np.minimum(np.maximum(table, 0), 255).astype(np.uint8))


def _mean_luminance(pixels: np.ndarray) -> int:
    means = cv2.mean(pixels)
    if pixels.ndim == 2:
        return int(means[0] + 0.5)
    return int(sum(w * m for w, m in zip(LUMINANCE, means[:3], strict=True)) + 0.5)


def jitter(
    pixels: np.ndarray, order: tuple[str, ...], factors: tuple[float, float, float, float]
) -> np.ndarray:
    """Changes brightness, contrast, saturation, hue of `(H, W, 3)` bytes; `(H, W)` if all gray."""
    brightness, contrast, saturation, hue = factors
    for name in order:
        if name == "brightness":
            pixels = _blend(pixels, 0, brightness)
        elif name == "contrast":
            pixels = _blend(pixels, _mean_luminance(pixels), contrast)
        elif pixels.ndim == 2:
            continue  # without colours, saturation and hue change nothing
        elif name == "saturation":
            gray = cv2.cvtColor(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
            # It rounds where torchvision truncates: nearly half a level less makes up for that.
            pixels = cv2.addWeighted(pixels, saturation, gray, 1 - saturation, -0.499)
        else:
            # In floats: as fast as in bytes, and free of the steps of an 8-bit hue.
            hsv: np.ndarray = cv2.cvtColor(pixels.astype(np.float32), cv2.COLOR_RGB2HSV)
            hsv[..., 0] += np.float32(360 * (hue % 1))
            pixels = cv2.convertScaleAbs(cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB))
    return pixels


@dataclasses.dataclass(frozen=True)
class RandomView:
    """Image -> a random view as a normalised tensor `(3, size, size)`, stored channels last.

    Attributes:
        size: side of the output.
        mean: per-channel mean of pixel values in [0, 1], RGB.
        std: per-channel standard deviation.
        min_scale: smallest share of the image's area that a crop has.
        gray: probability of dropping the colours.
        strength: of the colour jitter, for all four of its operations; 0 for none.
        flip: whether views are flipped half of the time.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    min_scale: float
    gray: float = 0.0
    strength: float = 0.0
    flip: bool = True

    def __post_init__(self) -> None:
        mean, std = np.array(self.mean), np.array(self.std)
        table = (np.arange(256)[:, None] / 255 - mean) / std
        # The normalised value of each level of each channel: the conversion is one look-up.
        object.__setattr__(self, "_table", table[None].astype(np.float32))

    def draw(self, width: int, height: int) -> View:
        """Draws a view of an image of this size from torch's CPU generator."""
        draws = torch.rand(NUM_DRAWS).tolist()
        used = 2 * ATTEMPTS + 2
        box = draw_box(width, height, self.min_scale, draws[:used])
        u_gray, u_flip, u_order, *u_factors = draws[used : used + 7]
        gray, flip = u_gray < self.gray, self.flip and u_flip < 0.5
        if not self.strength:
            return View(box, gray, flip)
        steps = [self.strength * (2 * u - 1) for u in u_factors]
        factors = (1 + steps[0], 1 + steps[1], 1 + steps[2], steps[3])
        return View(box, gray, flip, ORDERS[int(u_order * len(ORDERS))], factors)

    def render(self, crop: np.ndarray, view: View) -> Tensor:
        """The view, from the pixels of its box."""
        pixels = resize(crop, self.size)
        if view.gray:
            pixels = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
        pixels = jitter(pixels, view.order, view.factors)
        if view.flip:
            pixels = cv2.flip(pixels, 1)
        if pixels.ndim == 2:
            pixels = cv2.cvtColor(pixels, cv2.COLOR_GRAY2RGB)
        return torch.from_numpy(cv2.LUT(pixels, self._table)).permute(2, 0, 1)  # type: ignore[attr-defined]  # set above

    def look(self, image: Image.Image) -> tuple[np.ndarray, View]:
        """Draws a view of an opened image and decodes what it needs."""
        view = self.draw(*image.size)
        return read_crop(image, view.box, self.size), view

    def __call__(self, image: Image.Image) -> Tensor:
        """A random view."""
        return self.render(*self.look(image))

"""Random views of an image: what is drawn, apart from how it is computed.

The distribution is that of torchvision's RandomResizedCrop, RandomGrayscale, ColorJitter and
RandomHorizontalFlip in this order, as the authors' code has them, and of AlexNet's lighting noise
where it is asked for; tests compare the two. All draws of a view are one call of torch's CPU
generator. Pixels go from the decoder to the normalised tensor through a few calls that loop in C,
and colours are handled in bytes until the last of them.
"""

import dataclasses
import itertools
import math
import statistics

import cv2
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from instdisc.images.decode import Jpeg, to_rgb

RATIO = (3 / 4, 4 / 3)  # of width to height
ATTEMPTS = 10  # crops that do not fit are drawn again; then the largest central one is taken
NUM_DRAWS = 32
# Principal components of ImageNet's colours: deviations, and directions as columns (AlexNet's
# lighting noise, with the numbers that public code has).
COLOR_DEVIATIONS = np.array([0.2175, 0.0188, 0.0045])
COLOR_DIRECTIONS = np.array(
    [[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]]
)
ORDERS = tuple(itertools.permutations(("brightness", "contrast", "saturation", "hue")))
LUMINANCE = (0.299, 0.587, 0.114)
# A JPEG is decoded at 1/2, 1/4 or 1/8 where the crop then still has this many times the pixels of
# the output on each side, so that most of the smoothing is still done by the resize.
REDUCTION_MARGIN = 1.5
LEVELS = np.arange(256, dtype=np.uint8)


@dataclasses.dataclass(frozen=True)
class View:
    """What one look at an image consists of.

    Attributes:
        box: left, top, right, bottom of the crop, in pixels of the whole image.
        gray: whether colours are dropped.
        flip: whether left and right are exchanged.
        order: names of the jitter's operations, in the order of their use; none without jitter.
        factors: of brightness, contrast, saturation (1 changes nothing) and hue (0 does).
        light: what is added to red, green and blue, as parts of the whole range.
    """

    box: tuple[int, int, int, int]
    gray: bool = False
    flip: bool = False
    order: tuple[str, ...] = ()
    factors: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 0.0)
    light: tuple[float, float, float] = (0.0, 0.0, 0.0)


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


def read_crop(image: Image.Image | Jpeg, box: tuple[int, int, int, int], size: int) -> np.ndarray:
    """Decodes the crop as RGB bytes `(H, W, 3)`, reduced where `size` allows.

    The edges of a reduced crop are the nearest ones between its pixels.

    Args:
        image: an opened image, decoded or not.
        box: left, top, right, bottom in its pixels.
        size: side of the output that the crop is for.
    """
    if not isinstance(image, Jpeg):
        return np.asarray((image if image.mode == "RGB" else to_rgb(image)).crop(box))
    left, top, right, bottom = box
    shortest = min(right - left, bottom - top)
    scale = next((s for s in (8, 4, 2) if shortest >= s * size * REDUCTION_MARGIN), 1)
    pixels = image.decode(bottom, scale)
    left, top, right, bottom = (round(edge / scale) for edge in box)
    return pixels[top:bottom, left:right]


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


def _blend(table: np.ndarray, other: float, factor: float) -> np.ndarray:
    """`factor` of the levels and the rest of one level, clipped and truncated as Pillow does."""
    blended = other + np.float32(factor) * (table.astype(np.float32) - np.float32(other))
    return np.minimum(np.maximum(blended, 0), 255).astype(np.uint8)


def _apply(table: np.ndarray, pixels: np.ndarray) -> np.ndarray:
    return pixels if table is LEVELS else cv2.LUT(pixels, table)


def _mean_luminance(pixels: np.ndarray) -> int:
    means = cv2.mean(pixels)
    if pixels.ndim == 2:
        return int(means[0] + 0.5)
    return int(sum(w * m for w, m in zip(LUMINANCE, means[:3], strict=True)) + 0.5)


def jitter(
    pixels: np.ndarray, order: tuple[str, ...], factors: tuple[float, float, float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Changes brightness, contrast, saturation, hue of `(H, W, 3)` bytes; `(H, W)` if all gray.

    Returns:
        Pixels, and a table `(256,)` of what is still to become of each of their levels.
    """
    brightness, contrast, saturation, hue = factors
    table = LEVELS
    for name in order:
        if name == "brightness":
            table = _blend(table, 0, brightness)
            continue
        if name != "contrast" and (pixels.ndim == 2 or (name == "hue" and hue == 0)):
            continue  # without colours, saturation and hue change nothing
        pixels, table = _apply(table, pixels), LEVELS
        if name == "contrast":
            table = _blend(table, _mean_luminance(pixels), contrast)
        elif name == "saturation":
            gray = cv2.cvtColor(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
            # It rounds where torchvision truncates: nearly half a level less makes up for that.
            pixels = cv2.addWeighted(pixels, saturation, gray, 1 - saturation, -0.499)
        else:
            # In floats: as fast as in bytes, and free of the steps of an 8-bit hue.
            hsv: np.ndarray = cv2.cvtColor(pixels.astype(np.float32), cv2.COLOR_RGB2HSV)
            turned = cv2.add(hsv, (360 * (hue % 1), 0, 0, 0), dst=hsv)  # type: ignore[call-overload]  # its types lack scalars
            pixels = cv2.convertScaleAbs(cv2.cvtColor(turned, cv2.COLOR_HSV2RGB))
    return pixels, table


@dataclasses.dataclass(frozen=True)
class RandomView:
    """Image -> a random view as a normalised tensor `(3, size, size)`, stored channels last.

    Attributes:
        size: side of the output.
        mean: per-channel mean of pixel values in [0, 1], RGB.
        std: per-channel standard deviation.
        min_scale: smallest share of the image's area that a crop has.
        gray: probability of dropping the colours.
        strength: of the colour jitter, for all of its operations; 0 for none.
        hue: whether it shifts hues too.
        lighting: deviation of the noise along ImageNet's principal colours; 0 for none.
        flip: whether views are flipped half of the time.
    """

    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    min_scale: float
    gray: float = 0.0
    strength: float = 0.0
    hue: bool = True
    lighting: float = 0.0
    flip: bool = True

    def __post_init__(self) -> None:
        mean, std = np.array(self.mean), np.array(self.std)
        normalized = (LEVELS[:, None] / 255 - mean) / std
        object.__setattr__(self, "_normalized", normalized[None].astype(np.float32))

    def draw(self, width: int, height: int, generator: torch.Generator | None = None) -> View:
        """Draws a view of an image of this size from a generator; else from torch's own."""
        draws = torch.rand(NUM_DRAWS, generator=generator).tolist()
        used = 2 * ATTEMPTS + 2
        box = draw_box(width, height, self.min_scale, draws[:used])
        u_gray, u_flip, u_order, *u_factors = draws[used : used + 7]
        gray, flip = u_gray < self.gray, self.flip and u_flip < 0.5
        light = self._draw_light(draws[used + 7 : used + 10])
        if not self.strength:
            return View(box, gray, flip, light=light)
        steps = [self.strength * (2 * u - 1) for u in u_factors]
        factors = (1 + steps[0], 1 + steps[1], 1 + steps[2], steps[3] if self.hue else 0.0)
        return View(box, gray, flip, ORDERS[int(u_order * len(ORDERS))], factors, light)

    def _draw_light(self, draws: list[float]) -> tuple[float, float, float]:
        if not self.lighting:
            return 0.0, 0.0, 0.0
        normal = statistics.NormalDist(sigma=self.lighting)
        # A draw may be 0, where a normal variable is infinite.
        amounts = np.array([normal.inv_cdf(max(u, 1e-9)) for u in draws])
        red, green, blue = (COLOR_DIRECTIONS * (amounts * COLOR_DEVIATIONS)).sum(axis=1).tolist()
        return red, green, blue

    def _paint(self, crop: np.ndarray, view: View) -> tuple[np.ndarray, np.ndarray]:
        """Bytes `(size, size, 3)` from the pixels of the box, and what each level still becomes."""
        pixels = resize(crop, self.size)
        if view.gray:
            pixels = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
        pixels, table = jitter(pixels, view.order, view.factors)
        if view.flip:
            pixels = cv2.flip(pixels, 1)
        if pixels.ndim == 2:
            pixels = cv2.cvtColor(pixels, cv2.COLOR_GRAY2RGB)
        return pixels, table

    def render_bytes(
        self, crop: np.ndarray, view: View, target: np.ndarray | None = None
    ) -> Tensor:
        """The view before it is normalised; without lighting noise, which is no level.

        Args:
            crop: the pixels of its box.
            view: what was drawn.
            target: where to write the result, `(size, size, 3)`; None for new memory.
        """
        pixels, table = self._paint(crop, view)
        return torch.from_numpy(cv2.LUT(pixels, table, dst=target)).permute(2, 0, 1)

    @property
    def level_values(self) -> Tensor:
        """The normalised value of each level of each channel, `(3, 256)`."""
        normalized: np.ndarray = self._normalized  # type: ignore[attr-defined]  # set above
        return torch.from_numpy(normalized[0].T.copy())

    def render(self, crop: np.ndarray, view: View, target: np.ndarray | None = None) -> Tensor:
        """The view, from the pixels of its box; arguments as those of `render_bytes`."""
        pixels, table = self._paint(crop, view)
        # The normalised value of each level of each channel: the conversion is one look-up.
        normalized: np.ndarray = self._normalized  # type: ignore[attr-defined]  # set above
        if table is not LEVELS:
            normalized = cv2.LUT(cv2.cvtColor(table[None], cv2.COLOR_GRAY2RGB), normalized)
        values: np.ndarray = cv2.LUT(pixels, normalized, dst=target)
        if any(view.light):
            values += (np.array(view.light) / np.array(self.std)).astype(np.float32)
        return torch.from_numpy(values).permute(2, 0, 1)

    def __call__(self, image: Image.Image | Jpeg) -> Tensor:
        """A random view of an opened image."""
        view = self.draw(*image.size)
        return self.render(read_crop(image, view.box, self.size), view)

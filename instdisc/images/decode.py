"""Whatever Pillow opens, as 8-bit RGB: one rule for every place that decodes an image."""

import numpy as np
from PIL import Image


def to_rgb(image: Image.Image) -> Image.Image:
    """8-bit RGB of an opened image.

    CMYK, grey and palettes are converted, alpha is dropped without a background, of several frames
    the first counts, a turn in the EXIF data is not made (all as in torchvision's ImageFolder).
    Pillow would clip 16-bit values at 255 and leave a white image: here the upper 8 bits count.

    Raises:
        ValueError: the pixels are floating-point numbers, whose range is not in the file.
    """
    if image.mode == "F":
        raise ValueError("floating-point pixels: save it with 8 or 16 bits a channel")
    if image.mode.startswith("I"):
        deep = np.asarray(image).astype(np.int64).clip(0, 65535)
        image = Image.fromarray((deep >> 8).astype(np.uint8))
    return image.convert("RGB")

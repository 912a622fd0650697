"""Whatever Pillow opens, as 8-bit RGB: one rule for every place that decodes an image.

JPEGs are read into memory and go through simplejpeg (libjpeg-turbo without Pillow's buffers), with
the same pixels. Where a crop ends above the last row, decoding ends there too. What simplejpeg
refuses or complains of is decoded by Pillow, which decides whether an image is readable.
"""

import contextlib
import dataclasses
import io
import os
from collections.abc import Iterator

import numpy as np
from PIL import Image

try:
    import simplejpeg
except ImportError:  # no wheel for this platform: Pillow decodes everything
    simplejpeg = None

START, END = b"\xff\xd8\xff", b"\xff\xd9"
# Frame headers: Huffman-coded baseline, extended and progressive. Not arithmetic, not lossless.
FRAMES = (0xC0, 0xC1, 0xC2)
WITHOUT_LENGTH = (0x01, *range(0xD0, 0xD9))
# The last row of a cut image is interpolated as if nothing came below it: decode one more than is
# wanted. A second one costs nothing, as rows are coded 8 or 16 at a time.
MARGIN = 2


@dataclasses.dataclass(frozen=True)
class Jpeg:
    """A JPEG of 8 bits, grey or in three colours, that has not been decoded.

    Attributes:
        source: what it was read from, for Pillow.
        data: the file.
        size: width and height.
        place: where in the data the height is, two bytes.
    """

    source: str | io.BytesIO
    data: bytes
    size: tuple[int, int]
    place: int

    def decode(self, bottom: int | None = None, scale: int = 1) -> np.ndarray:
        """RGB bytes `(H, W, 3)` of the rows above `bottom`, and perhaps of some below.

        Args:
            bottom: row of the whole image that is no longer needed; None for all of them.
            scale: 1, 2, 4 or 8; both sides are divided by it, rounded up.
        """
        width, height = self.size
        rows = height if bottom is None else min(height, bottom + MARGIN * scale)
        data: bytes | bytearray = self.data
        if rows < height:
            data = bytearray(data)
            data[self.place : self.place + 2] = rows.to_bytes(2, "big")
        if simplejpeg is not None:
            with contextlib.suppress(ValueError):
                # The rest of a cut image is a surplus of data, and so a warning.
                return simplejpeg.decode_jpeg(
                    data,
                    "RGB",
                    min_height=-(-rows // scale),
                    min_width=-(-width // scale),
                    min_factor=scale,
                    strict=rows == height,
                )
        with Image.open(self.source) as image:
            if scale > 1:
                image.draft(None, (width // scale, height // scale))
            return np.asarray(to_rgb(image))


def parse_jpeg(source: str | io.BytesIO, data: bytes) -> Jpeg | None:
    """The JPEG that the data holds; None for every other kind of image, and for damaged ones."""
    # Pillow refuses a file that ends early; libjpeg-turbo would fill the rest with gray.
    if not data.startswith(START) or not data.endswith(END):
        return None
    at = 2
    while at + 10 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF or marker in WITHOUT_LENGTH:
            at += 1 if marker == 0xFF else 2
        elif marker in FRAMES:
            return _parse_frame(source, data, at + 4)
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def _parse_frame(source: str | io.BytesIO, data: bytes, at: int) -> Jpeg | None:
    """The image of a frame header: precision, height, width, and three bytes for each colour."""
    height, width = (int.from_bytes(data[at + i : at + i + 2], "big") for i in (1, 3))
    samplings = data[at + 7 : at + 6 + 3 * data[at + 5] : 3]
    plain = data[at] == 8 and data[at + 5] in (1, 3) and all(s & 15 in (1, 2) for s in samplings)
    # Pillow warns of images larger than it allows, and refuses those of twice the size.
    small = 0 < width * height <= (Image.MAX_IMAGE_PIXELS or 0)
    return Jpeg(source, data, (width, height), at + 1) if plain and small else None


@contextlib.contextmanager
def open_image(source: str | io.BytesIO) -> Iterator[Image.Image | Jpeg]:
    """An image with its size known and its pixels perhaps not decoded yet.

    Args:
        source: name or bytes of a file.
    """
    if isinstance(source, str):
        with open(source, "rb", buffering=0) as file:  # noqa: PTH123 (a Path costs more than it)
            start = os.pread(file.fileno(), len(START), 0)
            data = file.readall() if start == START else start
    else:
        data = source.getvalue()
    jpeg = parse_jpeg(source, data)
    if jpeg is not None:
        yield jpeg
        return
    with Image.open(source) as image:
        yield image


def to_rgb(image: Image.Image | Jpeg) -> Image.Image:
    """8-bit RGB of an opened image.

    CMYK, grey and palettes are converted, alpha is dropped without a background, of several frames
    the first counts, a turn in the EXIF data is not made (all as in torchvision's ImageFolder).
    Pillow would clip 16-bit values at 255 and leave a white image: here the upper 8 bits count.

    Raises:
        ValueError: the pixels are floating-point numbers, whose range is not in the file.
    """
    if isinstance(image, Jpeg):
        return Image.fromarray(image.decode())
    if image.mode == "F":
        raise ValueError("floating-point pixels: save it with 8 or 16 bits a channel")
    if image.mode.startswith("I"):
        deep = np.asarray(image).astype(np.int64).clip(0, 65535)
        image = Image.fromarray((deep >> 8).astype(np.uint8))
    return image.convert("RGB")

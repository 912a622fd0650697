"""JPEGs through simplejpeg against Pillow: the same pixels, whole, cut and reduced."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from instdisc.images import decode
from instdisc.images.decode import Jpeg, open_image, parse_jpeg, to_rgb


def photo(width: int, height: int) -> Image.Image:
    """Noise over smooth colours: every coefficient of the code is in use."""
    rng = np.random.default_rng(width * height)
    coarse = Image.fromarray(rng.integers(0, 256, (7, 9, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    noise = rng.integers(-30, 31, smooth.shape)
    return Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, form: str = "JPEG", **options: Any) -> io.BytesIO:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    stream.seek(0)
    return stream


def by_pillow(source: str | io.BytesIO, scale: int = 1) -> np.ndarray:
    with Image.open(source) as image:
        if scale > 1:
            image.draft(None, (image.width // scale, image.height // scale))
        return np.asarray(image.convert("RGB"))


def parsed(stream: io.BytesIO) -> Jpeg:
    jpeg = parse_jpeg(stream, stream.getvalue())
    assert jpeg is not None
    return jpeg


KINDS: dict[str, dict[str, Any]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True},
    "progressive 4:4:4": {"progressive": True, "subsampling": 0, "quality": 97},
    "restarts": {"restart_marker_rows": 1},
    "not YCbCr": {"keep_rgb": True},
    "with EXIF and ICC": {"exif": b"Exif\0\0" + bytes(5000), "icc_profile": bytes(70000)},
}


@pytest.mark.skipif(decode.simplejpeg is None, reason="simplejpeg is not installed")
@pytest.mark.parametrize("kind", [*KINDS, "grey"])
@pytest.mark.parametrize("size", [(97, 75), (64, 48), (33, 130)])
def test_pixels_are_pillows_whole_cut_and_reduced(
    kind: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = photo(*size)
    stream = encoded(image.convert("L")) if kind == "grey" else encoded(image, **KINDS[kind])
    jpeg = parsed(stream)
    assert jpeg.size == image.size
    expected = {scale: by_pillow(stream, scale) for scale in (1, 2, 4, 8)}

    def refuse(*_: object) -> None:
        raise AssertionError("Pillow was asked")

    monkeypatch.setattr(decode.Image, "open", refuse)
    for scale, whole in expected.items():
        assert np.array_equal(jpeg.decode(scale=scale), whole)
        for bottom in range(1, size[1] + 1):
            rows = -(-bottom // scale)
            cut = jpeg.decode(bottom, scale)
            assert np.array_equal(cut[:rows], whole[:rows]), (scale, bottom)
            assert len(cut) <= len(whole)


def test_without_simplejpeg_pixels_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    jpeg = parsed(encoded(photo(97, 75)))
    with_it = [jpeg.decode(75, scale) for scale in (1, 2)]
    monkeypatch.setattr(decode, "simplejpeg", None)
    for scale, pixels in zip((1, 2), with_it, strict=True):
        assert np.array_equal(jpeg.decode(75, scale), pixels)
        assert np.array_equal(jpeg.decode(40, scale)[: 40 // scale], pixels[: 40 // scale])


@pytest.mark.parametrize(
    "stream",
    [
        encoded(photo(40, 30), "PNG"),
        encoded(photo(40, 30).convert("CMYK")),
        io.BytesIO(encoded(photo(40, 30)).getvalue()[:-200]),
        io.BytesIO(b"\xff\xd8\xff\xd9"),
        io.BytesIO(b"\xff\xd8\xff\xc0\x00\xff\xd9"),
        io.BytesIO(b""),
    ],
    ids=["PNG", "CMYK", "ends early", "no frame", "short frame", "empty"],
)
def test_everything_else_is_pillows(stream: io.BytesIO) -> None:
    assert parse_jpeg(stream, stream.getvalue()) is None


def test_what_pillow_finds_too_large_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = encoded(photo(40, 30))
    monkeypatch.setattr(decode.Image, "MAX_IMAGE_PIXELS", 500)
    with pytest.raises(Image.DecompressionBombError), open_image(stream) as image:
        to_rgb(image)


def test_damage_gives_pillows_pixels_or_pillows_error() -> None:
    """Bytes changed at random: whole images are as Pillow has them, or refused as it does."""
    whole = encoded(photo(97, 75), quality=60).getvalue()
    rng, seen = np.random.default_rng(0), {"pixels": 0, "error": 0}
    for _ in range(150):
        damaged = bytearray(whole)
        for place in rng.integers(2, len(damaged) - 2, 3):
            damaged[place] = rng.integers(256)
        stream = io.BytesIO(bytes(damaged))
        try:
            expected = by_pillow(stream)
        except Exception as error:
            seen["error"] += 1
            with pytest.raises(type(error)), open_image(stream) as image:
                to_rgb(image)
        else:
            seen["pixels"] += 1
            with open_image(stream) as image:
                assert np.array_equal(np.asarray(to_rgb(image)), expected)
            if isinstance(image, Jpeg):
                image.decode(20)  # damage may lie below; it raises nothing
    assert min(seen.values()) > 5


def test_real_photographs_are_as_pillow_has_them(shared_data: Path) -> None:
    found = [*shared_data.rglob("*.jpg"), *shared_data.rglob("*.JPEG")]
    files = [str(file) for file in sorted(found)[::200]]
    rng = np.random.default_rng(0)
    for file in files:
        expected = by_pillow(file)
        with open_image(file) as image:
            assert np.array_equal(np.asarray(to_rgb(image)), expected)
            assert isinstance(image, Jpeg)
            bottom = int(rng.integers(1, len(expected) + 1))
            assert np.array_equal(image.decode(bottom)[:bottom], expected[:bottom])
            half = by_pillow(file, 2)[: bottom // 2]
            assert np.array_equal(image.decode(bottom, 2)[: bottom // 2], half)
    assert len(files) > 20

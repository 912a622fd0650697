"""Every kind of odd image has a rule; docs/data.md has the table."""

import io
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from instdisc.errors import UserError
from instdisc.images.loading import Samples
from instdisc.images.sets import ImageSet, find_bad_images, read_folder
from instdisc.images.transforms import InputSpec, pretrain_transform

RGB = Image.fromarray(np.random.default_rng(0).integers(0, 255, (24, 16, 3), dtype=np.uint8))


def encoded(image: Image.Image, form: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)
    return stream.getvalue()


def a_set(tmp_path: Path, content: bytes, name: str = "x.png") -> ImageSet:
    folder = tmp_path / "train" / "class"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(content)
    return read_folder(tmp_path / "train", "odd", "train")


def check_readable(images: ImageSet) -> np.ndarray:
    """Read whole, read as a training crop, and passed by the scan."""
    assert find_bad_images(images) == []
    spec = InputSpec(size=8)
    pixels, _, error = Samples(images, pretrain_transform(spec), spec, 0)[(0, 0)]
    assert error == ""
    assert pixels.shape == (3, 8, 8)
    found = images.open(0)
    assert found.mode == "RGB"
    return np.asarray(found)


def test_cmyk_grey_and_palette_are_converted(tmp_path: Path) -> None:
    for name, mode, form in (("a", "CMYK", "JPEG"), ("b", "L", "PNG"), ("c", "P", "PNG")):
        image = RGB.convert(mode)
        content = encoded(image, form)
        with Image.open(io.BytesIO(content)) as same:
            wanted = np.asarray(same.convert("RGB"))
        assert np.array_equal(check_readable(a_set(tmp_path / name, content)), wanted)


def test_sixteen_bits_keep_their_upper_half(tmp_path: Path) -> None:
    values = np.arange(0, 65536, 150, dtype=np.uint16)[:400].reshape(20, 20)
    for name, form in (("a", "PNG"), ("b", "TIFF")):
        found = check_readable(a_set(tmp_path / name, encoded(Image.fromarray(values), form)))
        assert np.array_equal(found, np.repeat((values >> 8).astype(np.uint8)[..., None], 3, 2))


def test_floating_point_pixels_are_refused(tmp_path: Path) -> None:
    images = a_set(tmp_path, encoded(Image.fromarray(np.ones((9, 9), np.float32)), "TIFF"))
    assert find_bad_images(images) == [0]
    with pytest.raises(UserError, match=r"x\.png.*floating-point"):
        images.open(0)


def test_alpha_is_dropped_and_of_several_frames_the_first_counts(tmp_path: Path) -> None:
    clear = RGB.copy()
    clear.putalpha(0)
    found = check_readable(a_set(tmp_path / "a", encoded(clear, "PNG")))
    assert np.array_equal(found, np.asarray(RGB))
    frames = [RGB.rotate(180)]
    for name, form in (("b", "PNG"), ("c", "GIF")):
        content = encoded(RGB, form, save_all=True, append_images=frames)
        found = check_readable(a_set(tmp_path / name, content))
        with Image.open(io.BytesIO(encoded(RGB, form))) as first:
            assert np.array_equal(found, np.asarray(first.convert("RGB")))


def test_an_exif_turn_is_not_made(tmp_path: Path) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    found = check_readable(a_set(tmp_path, encoded(RGB, "JPEG", exif=turned)))
    assert found.shape == (24, 16, 3)


def test_one_pixel_is_an_image_and_the_content_counts_not_the_ending(tmp_path: Path) -> None:
    assert check_readable(a_set(tmp_path / "a", encoded(RGB.resize((1, 1)), "PNG"))).size == 3
    check_readable(a_set(tmp_path / "b", encoded(RGB, "PNG"), name="really-a-png.jpg"))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "BMP", "TIFF", "WEBP"])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, form: str) -> None:
    content = encoded(RGB, form)
    images = a_set(tmp_path, content[: len(content) // 2])
    assert find_bad_images(images) == [0]
    with pytest.raises(UserError, match=r"x\.png is not a readable image"):
        images.open(0)


def test_empty_files_and_other_endings_are_refused_before_anything_is_decoded(
    tmp_path: Path,
) -> None:
    for name, content in (("x.png", b""), ("notes.txt", b"words"), ("a.gif", b"GIF89a")):
        with pytest.raises(UserError, match=name):
            a_set(tmp_path / name, content, name)


def test_a_decompression_bomb_is_refused_by_its_header(tmp_path: Path) -> None:
    content = bytearray(encoded(RGB, "PNG"))
    content[16:24] = struct.pack(">II", 60_000, 60_000)
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    images = a_set(tmp_path, bytes(content))
    assert find_bad_images(images) == [0]
    with pytest.raises(UserError, match="exceeds limit"):
        images.open(0)


def test_links_that_lead_to_themselves(tmp_path: Path) -> None:
    images = a_set(tmp_path, encoded(RGB, "PNG"))
    root, folder = tmp_path / "train", tmp_path / "train" / "class"
    (root / "class-loop").symlink_to("class-loop")  # no folder, so no class
    (folder / "again").symlink_to(folder)  # a folder inside itself: visited once
    assert list(read_folder(root, "odd", "train").names) == list(images.names)
    (folder / "loop.png").symlink_to("loop.png")
    with pytest.raises(UserError, match=r"loop\.png"):
        read_folder(root, "odd", "train")
    kept = read_folder(root, "odd", "train", skip_bad=True)
    assert list(kept.names) == list(images.names)
    assert [Path(name).name for name in kept.skipped] == ["loop.png"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_file_and_a_folder_without_permission(tmp_path: Path) -> None:
    images = a_set(tmp_path, encoded(RGB, "PNG"))
    file = tmp_path / "train" / "class" / "x.png"
    file.chmod(0)
    with pytest.raises(UserError, match="Permission denied"):
        images.open(0)
    file.parent.chmod(0)
    try:
        with pytest.raises(UserError, match="cannot be listed"):
            read_folder(tmp_path / "train", "odd", "train")
    finally:
        file.parent.chmod(0o700)

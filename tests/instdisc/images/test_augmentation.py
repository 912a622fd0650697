"""Random views against torchvision: the distribution of what is drawn, and the pixels it gives."""

import dataclasses
import io
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from instdisc.images import augmentation
from instdisc.images.augmentation import (
    COLOR_DEVIATIONS,
    COLOR_DIRECTIONS,
    ORDERS,
    RandomView,
    View,
    draw_box,
    jitter,
    read_crop,
    resize,
)
from instdisc.images.decode import Jpeg, open_image, to_rgb
from instdisc.images.transforms import InputSpec, finetune_transform, pretrain_transform

NUM = 5000
# About fifty comparisons are made here, so at 0.01 each one of them would fail by chance every
# other time. With 0.01 for all of them together, each has 0.01 / 50; the controls below show that
# a real difference is still seen.
P_VALUE = 0.01 / 50


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with some grain, so that rounding and edges matter as in photographs."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (8, 10, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    grain = rng.integers(-12, 13, (height, width, 3))
    return Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8))


def levels(image: Image.Image | np.ndarray) -> np.ndarray:
    return np.asarray(image).astype(int)


def our_views(width: int, height: int, **changes: object) -> list[View]:
    view = pretrain_transform(InputSpec(size=32), **changes)  # type: ignore[arg-type]
    torch.manual_seed(0)
    return [view.draw(width, height) for _ in range(NUM)]


def their_boxes(width: int, height: int, min_scale: float) -> list[tuple[int, int, int, int]]:
    crop = v2.RandomResizedCrop(32, scale=(min_scale, 1.0))
    blank = torch.empty(3, height, width, dtype=torch.uint8)
    torch.manual_seed(1)
    found = []
    for _ in range(NUM):
        p = crop.make_params([blank])
        found.append((p["left"], p["top"], p["left"] + p["width"], p["top"] + p["height"]))
    return found


def traits(
    boxes: list[tuple[int, int, int, int]], width: int, height: int
) -> dict[str, np.ndarray]:
    left, top, right, bottom = np.array(boxes).T
    w, h = right - left, bottom - top
    return {
        "area": w * h / (width * height),
        "aspect": w / h,
        "horizontal place": left / np.maximum(1, width - w),
        "vertical place": top / np.maximum(1, height - h),
        "area by place": (w * h) * (left + right),  # sees a dependence between the two
    }


# The long one draws many crops that do not fit, and often ends with the central one.
@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 500), (32, 32), (400, 60)])
@pytest.mark.parametrize("min_scale", [0.2, 0.08])
def test_crops_are_distributed_as_torchvisions(width: int, height: int, min_scale: float) -> None:
    ours = traits([v.box for v in our_views(width, height, min_scale=min_scale)], width, height)
    theirs = traits(their_boxes(width, height, min_scale), width, height)
    for name in ours:
        assert stats.ks_2samp(ours[name], theirs[name]).pvalue > P_VALUE, name


def test_the_comparisons_see_small_differences() -> None:
    ours = traits([v.box for v in our_views(500, 375, min_scale=0.25)], 500, 375)
    theirs = traits(their_boxes(500, 375, 0.2), 500, 375)
    assert stats.ks_2samp(ours["area"], theirs["area"]).pvalue < P_VALUE
    wider = [0.44 / 0.4 * (v.factors[3]) for v in our_views(500, 375)]
    assert stats.kstest(wider, stats.uniform(-0.4, 0.8).cdf).pvalue < P_VALUE
    assert stats.binomtest(round(0.23 * NUM), NUM, 0.2).pvalue < P_VALUE


@pytest.mark.parametrize(("width", "height"), [(500, 20), (20, 500)])
def test_a_crop_that_never_fits_becomes_torchvisions_central_one(width: int, height: int) -> None:
    crop = v2.RandomResizedCrop(32, scale=(0.9, 1.0))
    p = crop.make_params([torch.empty(3, height, width)])
    expected = (p["left"], p["top"], p["left"] + p["width"], p["top"] + p["height"])
    assert draw_box(width, height, 0.9, [0.5] * 22) == expected


def test_jitter_gray_and_flip_are_distributed_as_torchvisions() -> None:
    views = our_views(500, 375)
    colour = v2.ColorJitter(0.4, 0.4, 0.4, 0.4)
    torch.manual_seed(1)
    params = [colour.make_params([]) for _ in range(NUM)]
    for i, name in enumerate(("brightness", "contrast", "saturation", "hue")):
        theirs = [p[f"{name}_factor"] for p in params]
        assert stats.ks_2samp([v.factors[i] for v in views], theirs).pvalue > P_VALUE, name
    counts = Counter(v.order for v in views)
    assert stats.chisquare([counts[order] for order in ORDERS]).pvalue > P_VALUE
    assert stats.binomtest(sum(v.gray for v in views), NUM, 0.2).pvalue > P_VALUE
    assert stats.binomtest(sum(v.flip for v in views), NUM, 0.5).pvalue > P_VALUE
    assert stats.binomtest(sum(v.flip and v.gray for v in views), NUM, 0.1).pvalue > P_VALUE
    boxes = traits([v.box for v in views], 500, 375)
    places = [boxes["horizontal place"], boxes["vertical place"], boxes["area"]]
    columns = np.array([[*v.factors, v.gray, v.flip] for v in views]).T
    correlations = np.corrcoef([*columns, *places]) - np.eye(9)
    assert np.abs(correlations).max() < 4.5 / math.sqrt(NUM)  # 36 pairs, the same caution


def test_options_switch_off_what_they_name_and_move_no_other_draw() -> None:
    plain, still = our_views(300, 200), our_views(300, 200, flip=False)
    assert not any(v.flip for v in still)
    assert [v.box for v in plain] == [v.box for v in still]
    assert [v.factors for v in plain] == [v.factors for v in still]
    torch.manual_seed(0)
    tuned = finetune_transform(InputSpec(size=32)).draw(300, 200)
    assert (tuned.gray, tuned.order) == (False, ())


@pytest.mark.parametrize("size", [224, 64, 32])
def test_crop_and_resize_give_torchvisions_pixels(size: int) -> None:
    image, box = photo(500, 375), (37, 20, 337, 300)
    theirs = functional.resized_crop(image, 20, 37, 280, 300, [size, size], antialias=True)
    ours = resize(read_crop(image, box, size), size)
    assert np.abs(levels(ours) - levels(theirs)).max() <= 1


def one_step(name: str, factor: float, pixels: np.ndarray) -> np.ndarray:
    names = ("brightness", "contrast", "saturation", "hue")
    factors = tuple(factor if name == each else 1.0 for each in names)
    changed, table = jitter(pixels, (name,), factors)  # type: ignore[arg-type]
    return levels(table[changed])


@pytest.mark.parametrize("factor", [0.6, 0.87, 1.0, 1.15, 1.4])
@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_each_blend_gives_torchvisions_pixels(name: str, factor: float) -> None:
    image = photo(64, 64)
    theirs = levels(getattr(functional, f"adjust_{name}")(image, factor))
    difference = one_step(name, factor, np.asarray(image)) - theirs
    assert np.abs(difference).max() <= 1
    assert abs(difference.mean()) < 0.3


@pytest.mark.parametrize("factor", [-0.4, -0.17, 0.0, 0.05, 0.31, 0.4])
def test_hue_gives_torchvisions_pixels(factor: float) -> None:
    """Its tensor form, exact up to rounding; its Pillow form takes steps of 1/256 of the circle."""
    pixels = np.array(photo(64, 64))
    tensor = functional.adjust_hue(torch.from_numpy(pixels).permute(2, 0, 1), factor)
    ours = one_step("hue", factor, pixels)
    assert np.abs(ours - levels(tensor.permute(1, 2, 0).numpy())).max() <= 1
    pillow = levels(functional.adjust_hue(Image.fromarray(pixels), factor))
    assert np.abs(ours - pillow).mean() < 1.5


def test_whole_views_give_torchvisions_pixels() -> None:
    image = photo(200, 150)
    transform = RandomView(48, (0, 0, 0), (1, 1, 1), 0.2, gray=0.3, strength=0.4)
    torch.manual_seed(0)
    for _ in range(60):
        view = transform.draw(*image.size)
        left, top, right, bottom = view.box
        crop = (top, left, bottom - top, right - left)
        other = functional.resized_crop(image, *crop, [48, 48], antialias=True)
        if view.gray:
            other = functional.rgb_to_grayscale(other, num_output_channels=3)
        for name in view.order:
            if name == "hue":  # without the steps of the Pillow form
                shifted = functional.adjust_hue(functional.pil_to_tensor(other), view.factors[3])
                other = functional.to_pil_image(shifted)
            else:
                factor = view.factors[ORDERS[0].index(name)]
                other = getattr(functional, f"adjust_{name}")(other, factor)
        if view.flip:
            other = functional.horizontal_flip(other)
        ours = transform.render(read_crop(image, view.box, 48), view) * 255
        difference = np.abs(ours.permute(1, 2, 0).numpy() - levels(other))
        assert difference.mean() < 1
        assert np.percentile(difference, 99) <= 3  # roundings add up, times contrast


def test_the_tensor_is_normalised_and_stored_channels_last() -> None:
    mean, std = (0.5, 0.25, 0.0), (0.5, 0.25, 1.0)
    transform = RandomView(60, mean, std, 0.2)
    crop = np.array(photo(60, 60))
    tensor = transform.render(crop, View((0, 0, 60, 60)))
    expected = (crop / 255 - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(tensor.permute(1, 2, 0).numpy(), expected, atol=1e-6)
    assert tensor.permute(1, 2, 0).is_contiguous()
    turned = transform.render(crop, View((0, 0, 60, 60), flip=True))
    assert torch.equal(turned, tensor.flip(2))


def test_lighting_noise_is_that_of_public_code() -> None:
    """Shifts of a whole view along ImageNet's principal colours, and nothing else."""
    transform = RandomView(8, (0.5, 0.5, 0.5), (0.5, 0.25, 1.0), 0.2, lighting=0.1, flip=False)
    crop = np.array(photo(8, 8))
    torch.manual_seed(0)
    views = [transform.draw(8, 8) for _ in range(4000)]
    plain = transform.render(crop, dataclasses.replace(views[0], light=(0.0, 0.0, 0.0)))
    shift = (transform.render(crop, views[0]) - plain).flatten(1)
    expected = torch.tensor(views[0].light) / torch.tensor((0.5, 0.25, 1.0))
    torch.testing.assert_close(shift, expected[:, None].expand_as(shift).float())
    lights = np.array([view.light for view in views])
    directions, deviations = COLOR_DIRECTIONS, 0.1 * COLOR_DEVIATIONS
    covariance = (directions * deviations**2) @ directions.T
    np.testing.assert_allclose(np.cov(lights.T), covariance, atol=0.06 * covariance.max())
    assert np.abs(lights.mean(axis=0)).max() < 3 * math.sqrt(covariance.max() / 4000)


def test_jitter_without_hue_leaves_hues_alone() -> None:
    transform = RandomView(48, (0, 0, 0), (1, 1, 1), 0.2, strength=0.4, hue=False)
    torch.manual_seed(0)
    views = [transform.draw(200, 150) for _ in range(50)]
    assert {view.factors[3] for view in views} == {0.0}
    assert len({view.factors[:3] for view in views}) == 50
    pixels = np.array(photo(48, 48))
    same, table = jitter(pixels, ("hue",), (1.0, 1.0, 1.0, 0.0))
    assert np.array_equal(same, pixels)
    assert np.array_equal(table, np.arange(256))


def jpeg(image: Image.Image) -> io.BytesIO:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=95)
    stream.seek(0)
    return stream


@pytest.mark.parametrize(("side", "reduced"), [(300, True), (191, False)])
def test_jpegs_are_decoded_reduced_only_when_the_crop_allows(side: int, reduced: bool) -> None:
    """64 pixels from a decode at 1/2 want a crop of 2 * 64 * 1.5 = 192 pixels or more."""
    box = (30, 20, 30 + side, 20 + side)
    with open_image(jpeg(photo(501, 375))) as image:
        crop = read_crop(image, box, 64)
    assert crop.shape == ((side // 2, side // 2, 3) if reduced else (side, side, 3))
    whole = Image.open(jpeg(photo(501, 375))).convert("RGB")
    expected = levels(resize(read_crop(whole, box, 64), 64))
    difference = np.abs(levels(resize(crop, 64)) - expected)
    assert difference.mean() < 1.5 if reduced else difference.max() == 0


def test_a_reduced_decode_looks_at_the_same_place() -> None:
    """A ramp tells where each output pixel came from: within a fifth of an input pixel.

    At 1/8, where the edges of the crop fall on those of reduced pixels.
    """
    ramp = np.tile(np.linspace(0, 255, 512).astype(np.uint8), (384, 1))
    ramp = np.stack([ramp, ramp, ramp], axis=2)
    for left in (0, 24, 104):
        box = (left, 8, left + 400, 8 + 304)
        with open_image(jpeg(Image.fromarray(ramp))) as image:
            crop = read_crop(image, box, 24)
        assert crop.shape == (38, 50, 3)
        ours = levels(resize(crop, 24)).mean(axis=(0, 2))
        theirs = levels(resize(ramp[box[1] : box[3], box[0] : box[2]].copy(), 24)).mean(axis=(0, 2))
        assert np.abs(ours - theirs)[1:-1].mean() < 0.3


def test_edges_of_a_reduced_crop_are_the_nearest_ones() -> None:
    with open_image(jpeg(photo(501, 375))) as image:
        assert isinstance(image, Jpeg)
        whole = image.decode(scale=2)
        for box in ((31, 20, 332, 317), (0, 0, 501, 375), (1, 1, 499, 373)):
            left, top, right, bottom = (round(edge / 2) for edge in box)
            assert np.array_equal(read_crop(image, box, 64), whole[top:bottom, left:right])


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = photo(90, 60).convert(mode)
    crop = read_crop(image, (10, 5, 50, 45), 40)
    assert np.array_equal(crop, levels(image.convert("RGB"))[5:45, 10:50])


def test_real_photographs_keep_their_look_when_decoded_reduced(shared_data: Path) -> None:
    files = sorted((shared_data / "voc2007-mini").rglob("*.jpg"))[:12]
    view = RandomView(64, (0, 0, 0), (1, 1, 1), 0.2)
    torch.manual_seed(0)
    differences = []
    for file in files:
        with open_image(str(file)) as image:
            box = view.draw(*image.size).box
            crop = read_crop(image, box, 64)
            scale = round((box[2] - box[0]) / crop.shape[1])
            nearest = tuple(scale * round(edge / scale) for edge in box)
            whole = read_crop(to_rgb(image), nearest, 64)  # type: ignore[arg-type]
        differences.append(np.abs(levels(resize(crop, 64)) - levels(resize(whole, 64))).mean())
    assert 0 < np.mean(differences) < 1.5
    assert augmentation.REDUCTION_MARGIN >= 1

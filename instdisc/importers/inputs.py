"""How an imported network wants its images: what the file's neighbours and its dialect say.

Weights do not tell pixel statistics, channel order or where a stride sits; a wrong guess gives
features that are merely bad. So each is known, or asked for.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from instdisc.errors import UserError
from instdisc.images.transforms import InputSpec
from instdisc.importers.dialect_table import Dialect
from instdisc.importers.plan import read_small, timm_config
from instdisc.importers.recognition import Network
from instdisc.names import Stem
from instdisc.untrusted.containers import ForeignFile
from instdisc.untrusted.limits import check_yaml

# Writers of Detectron2 files whose networks see RGB and stride in the 3x3 convolutions: ours,
# Detectron2's converter for torchvision, and those of MoCo, PyContrast and OpenSelfSup/MMSelfSup.
RGB_AUTHORS = ("instdisc", "torchvision", "MOCO", "Yonglong", "OpenSelfSup", "MMSelfSup")


@dataclasses.dataclass(frozen=True)
class Overrides:
    """What the user says about the network; None leaves it to the file."""

    image_size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop_ratio: float | None = None
    stem: Stem | None = None
    assume_rgb: bool = False


def _detectron2_config(path: Path) -> dict[str, Any]:
    """The config beside a Detectron2 file of the same name, as our export writes it."""
    try:
        text = read_small(path.with_suffix(".yaml"))
        check_yaml(text)
        config = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def check_detectron2(file: ForeignFile, network: Network, assume_rgb: bool) -> None:
    """Refuses a Detectron2 file that does not show how its network was trained."""
    author = file.content.get("__author__") if isinstance(file.content, dict) else None
    config = _detectron2_config(file.path)
    images, model = config.get("INPUT"), config.get("MODEL")
    blocks = model.get("RESNETS") if isinstance(model, dict) else None
    stride = isinstance(blocks, dict) and blocks.get("STRIDE_IN_1X1") is False
    rgb = isinstance(images, dict) and images.get("FORMAT") == "RGB"
    shown = rgb and (stride or not network.arch.startswith("resnet"))
    if assume_rgb or shown or (isinstance(author, str) and author in RGB_AUTHORS):
        return
    raise UserError(
        f"{file.path} does not say how it was trained, and Detectron2's defaults (BGR images, "
        "strides in the 1x1 convolutions) are another network than ours: if it saw RGB with "
        "ImageNet's pixel statistics and STRIDE_IN_1X1 False, import it with --assume-rgb"
    )


def _check_timm(config: Mapping[str, Any], network: Network) -> None:
    """Compares the network with the name in timm's config: some differ in no tensor."""
    name = config["architecture"].partition(".")[0].removeprefix("tv_")
    options = config.get("model_args")
    small = name.endswith("_small_stem") or (
        isinstance(options, dict) and options.get("stem") == "small"
    )
    if name.removesuffix("_small_stem").removesuffix("_bn") != network.arch:
        raise UserError(
            f"config.json beside the file names {name}, which is not our {network.arch} although "
            "its tensors are alike: import another one"
        )
    if small and network.arch != "vgg16" and network.stem != "small":
        raise UserError("config.json beside the file names a 3x3 stem, the tensors have another")
    if network.stem == "small" and not small:
        raise UserError(f"config.json beside the file names {name}, the tensors have a 3x3 stem")


def _triple(value: Any, what: str) -> tuple[float, float, float]:
    numbers = tuple(value) if isinstance(value, list | tuple) else ()
    if len(numbers) != 3 or not all(isinstance(n, int | float) for n in numbers):
        raise UserError(f"{what} must be three numbers, for red, green and blue")
    return float(numbers[0]), float(numbers[1]), float(numbers[2])


def _from_timm(config: Mapping[str, Any]) -> InputSpec:
    values = config.get("pretrained_cfg")
    values = {**config, **(values if isinstance(values, dict) else {})}
    found: dict[str, Any] = {
        name: _triple(values[name], f"config.json: {name}")
        for name in ("mean", "std")
        if name in values
    }
    size, crop = values.get("input_size"), values.get("crop_pct")
    if isinstance(size, list) and size and isinstance(size[-1], int):
        found["size"] = size[-1]
    if isinstance(crop, int | float):
        found["crop_ratio"] = float(crop)
    return InputSpec(**found)


def _from_detectron2(config: Mapping[str, Any]) -> InputSpec:
    model = config.get("MODEL")
    found: dict[str, Any] = {}
    for name, key in (("mean", "PIXEL_MEAN"), ("std", "PIXEL_STD")):
        if isinstance(model, dict) and key in model:
            pixels = _triple(model[key], f"sidecar: {key}")
            found[name] = tuple(round(value / 255, 9) for value in pixels)
    return InputSpec(**found)


def find_input(
    file: ForeignFile, dialect: Dialect, network: Network, overrides: Overrides
) -> tuple[InputSpec, str]:
    """How the network wants its images, and who says so.

    Raises:
        UserError: the stem is of a kind whose stride and padding are not known.
    """
    config = timm_config(file.path) if dialect.name == "timm" else None
    sidecar = _detectron2_config(file.path) if dialect.name == "detectron2" else {}
    spec, origin = InputSpec(**dialect.input), f"customary for {dialect.name}"
    if config is not None:
        _check_timm(config, network)
        spec, origin = _from_timm(config), "config.json beside the file"
    elif sidecar:
        spec, origin = _from_detectron2(sidecar), f"{file.path.with_suffix('.yaml').name}"
    elif network.stem == "small":
        if dialect.small_input is None and overrides.stem != "small":
            raise UserError(
                f"{file.path} has a 3x3 stem, and {dialect.name} files do not say its stride and "
                "padding: if it has stride 1, padding 1 and no max pooling, add --stem small"
            )
        spec = InputSpec(**(dialect.small_input or {"size": 32, "crop_ratio": 1.0}))
    given: dict[str, Any] = {
        "size": overrides.image_size,
        "mean": overrides.mean and _triple(overrides.mean, "--mean"),
        "std": overrides.std and _triple(overrides.std, "--std"),
        "crop_ratio": overrides.crop_ratio,
    }
    given = {name: value for name, value in given.items() if value is not None}
    spec = dataclasses.replace(spec, **given)
    if spec.size <= 0 or not 0 < spec.crop_ratio <= 1 or min(spec.std) <= 0:
        raise UserError("image size and std must be positive, the crop ratio in (0, 1]")
    return spec, "; ".join([origin, *(f"{name} as given" for name in given)])

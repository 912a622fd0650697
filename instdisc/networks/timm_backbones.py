"""Any timm network behind the interface of `Backbone`: pooled features, stages, input.

Stages are named as what they are. A pyramid, convolutional or Swin, has `stage1..stageN`, N being
four or five as a rule; a network of equal blocks (ViT, MLP-Mixer) has a block at the end of each
quarter of its depth: `block3, block6, block9, block12`. timm itself is imported by the functions
that need it: who uses another network does not wait for it.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from instdisc.errors import UserError
from instdisc.images.transforms import InputSpec
from instdisc.names import TIMM, Stem
from instdisc.networks.recording import recorded_outputs

QUARTERS = 4  # blocks that stand for the depth of a network without a pyramid
SECONDS_TO_ANSWER = 2  # of the hub, before it counts as out of reach


class TimmBackbone(nn.Module):
    """A timm network: `forward` gives the features, `stages` its feature maps.

    Attributes:
        arch: `timm:NAME`.
        trunk: timm's model without a classifier.
        spec: how the network wants its images.
        feature_dim: width of what its classifier would see.
        channels: width of each stage.
        stage_names: what the stages are called.
    """

    # Every backbone.pt has these two; a timm network has no other stem, and keeps its norms.
    stem: Stem = "imagenet"
    batch_norm = True
    trunk: Any

    def __init__(self, arch: str, trunk: nn.Module, spec: InputSpec) -> None:
        super().__init__()
        self.arch, self.trunk, self.spec = arch, trunk, spec
        self.feature_dim = self._find_width()
        levels = list(getattr(self.trunk, "feature_info", ()))
        self.has_method = hasattr(self.trunk, "forward_intermediates")
        places = {name for name, _ in self.trunk.named_modules()}
        hooked = all(level["module"] in places for level in levels)
        if len(levels) < 2 or not (self.has_method or hooked):  # a few have no maps to show
            levels = []
        numbers = list(range(len(levels)))
        word = "stage"
        if len(levels) > QUARTERS and len({level["reduction"] for level in levels}) == 1:
            word = "block"
            numbers = [len(levels) * part // QUARTERS - 1 for part in range(1, QUARTERS + 1)]
        self.indices = numbers
        self.stage_names = tuple(f"{word}{number + 1}" for number in numbers)
        self.channels = tuple(int(levels[number]["num_chs"]) for number in numbers)
        self.modules_of_stages = [str(levels[number]["module"]) for number in numbers]

    @torch.no_grad()
    def _find_width(self) -> int:
        """Width of the features, by trying: the only way that is right for every model."""
        was_training, size = self.trunk.training, self.spec.size
        blank = torch.zeros(1, 3, size, size, device=next(self.trunk.parameters()).device)
        try:
            width = int(self.trunk.eval()(blank).shape[1])
        except (RuntimeError, AssertionError, ValueError, IndexError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"{self.arch} does not take images of {size} pixels ({reason}): choose the size "
                "that it was made for, or another network"
            ) from None
        if not width:
            raise UserError(f"{self.arch} has no features without its classifier: take another")
        self.trunk.train(was_training)
        return width

    def forward(self, images: Tensor) -> Tensor:
        """Pooled features before the classifier, `(B, feature_dim)`."""
        return self.trunk(images)

    def stages(self, images: Tensor) -> dict[str, Tensor]:
        """Feature maps by stage, each `(B, C, H, W)`."""
        if self.has_method:
            maps = self.trunk.forward_intermediates(
                images, indices=self.indices, intermediates_only=True
            )
        else:
            maps = self._hooked(images)
        return dict(zip(self.stage_names, maps, strict=True))

    def _hooked(self, images: Tensor) -> list[Tensor]:
        """The same for the models of timm that have no such method, VGG among them."""
        places = {name: self.trunk.get_submodule(name) for name in self.modules_of_stages}
        with recorded_outputs(places) as found:
            self.trunk(images)
        maps: list[Any] = [found[name] for name in places]
        # DPN's modules give a map in two parts, SelecSLS's the map and what later modules need.
        maps = [m[0] if isinstance(m, list) else m for m in maps]
        return [torch.cat(m, dim=1) if isinstance(m, tuple) else m for m in maps]


def find_spec(trunk: nn.Module, size: int | None = None) -> InputSpec:
    """The evaluation of timm's own data config: pixels, interpolation, crop.

    Its `border`, which pads the image and which six sets of weights want, is taken for `center`.
    """
    from timm.data.config import resolve_model_data_config

    config: dict[str, Any] = resolve_model_data_config(trunk)
    size = size or int(config["input_size"][-1])
    return InputSpec(
        size=size,
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        # timm rounds the resized side down where we round to the nearest.
        crop_ratio=size / math.floor(size / float(config["crop_pct"])),
        interpolation=str(config["interpolation"]),
        squash=config["crop_mode"] == "squash",
    )


@contextlib.contextmanager
def _hub_at_hand() -> Iterator[bool]:
    """Whether the hub answers; if not, only the cache is asked, instead of a minute of retries."""
    from huggingface_hub import constants, utils

    before = constants.HF_HUB_OFFLINE
    answers = False
    with contextlib.suppress(Exception):  # of httpx or requests, as the hub's version has it
        if not before:
            session: Any = utils.get_session()  # type: ignore[attr-defined] # documented there
            session.head(constants.ENDPOINT, timeout=SECONDS_TO_ANSWER)
            answers = True
    constants.HF_HUB_OFFLINE = not answers
    try:
        yield answers
    finally:
        constants.HF_HUB_OFFLINE = before


def _create(name: str, *, pretrained: bool, **options: Any) -> Any:
    """A model of timm's without a classifier, or one line that says why not."""
    import timm

    with contextlib.ExitStack() as stack:
        local = name.startswith("local-dir:")
        remote = name.startswith("hf-hub:") or (pretrained and not local)
        answers = stack.enter_context(_hub_at_hand()) if remote else True
        try:
            return timm.create_model(name, pretrained=pretrained, num_classes=0, **options)
        except (RuntimeError, ValueError, OSError, TypeError, LookupError) as error:
            reason = str(error).partition("\n")[0]
            if isinstance(error, OSError) and not answers:
                raise UserError(
                    f"the weights of timm:{name} are not on this machine, and the hub that has "
                    "them does not answer: take timm:local-dir:DIR, a folder of timm's with "
                    f"config.json and weights, or random:timm:{name} for random ones"
                ) from None
            raise UserError(f"timm cannot make {name} ({reason}): see timm.list_models()") from None


def build_timm(name: str, *, size: int | None = None, pretrained: bool = False) -> TimmBackbone:
    """Makes a timm network, at random or with timm's weights.

    Args:
        name: what `timm.create_model` takes: a name of its registry, local-dir:DIR, hf-hub:NAME.
        size: side of its images; timm's own if not given.
        pretrained: load weights, from timm's cache or the hub.
    """
    import timm

    options: dict[str, Any] = {}
    if size is not None and ":" not in name and timm.is_model(name.partition(".")[0]):
        config = timm.get_pretrained_cfg(name)
        if config is not None and config.fixed_input_size and config.input_size[-1] != size:
            options["img_size"] = size  # position embeddings and windows depend on it
    trunk = _create(name, pretrained=pretrained, **options)
    return TimmBackbone(TIMM + name, trunk, find_spec(trunk, size))

"""Networks that timm lacks: AlexNet, and the ResNets with the stem for 32 pixels.

Importing this module (or `instdisc.export.to_timm`) registers them, after which
`timm.create_model("local-dir:export/timm", pretrained=True)` opens an exported folder of theirs.
AlexNet's weights keep torchvision's names, so torchvision's own weights fit it too.
"""

from typing import Any

import torchvision
from timm.models import ResNet, build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor, nn

from instdisc.images.transforms import IMAGENET_MEAN, IMAGENET_STD
from instdisc.names import Stem


class AlexNet(torchvision.models.AlexNet):
    """torchvision's AlexNet with the interface of a timm model."""

    def __init__(
        self,
        num_classes: int = 1000,
        in_chans: int = 3,
        drop_rate: float = 0.5,
        stem: Stem = "imagenet",
    ) -> None:
        super().__init__(num_classes=max(1, num_classes), dropout=drop_rate)
        if stem == "small":
            self.features[0] = nn.Conv2d(in_chans, 64, 3, stride=1, padding=1)
        elif in_chans != 3:
            self.features[0] = nn.Conv2d(in_chans, 64, 11, stride=4, padding=2)
        self.num_features = 256
        self.head_hidden_size = 4096
        first = 4 if stem == "imagenet" else 1
        ends = ((64, 1, 1), (192, 2, 4), (384, 4, 7), (256, 4, 9), (256, 4, 11))
        self.feature_info = [
            {"num_chs": channels, "reduction": first * stride, "module": f"features.{number}"}
            for channels, stride, number in ends
        ]
        self.reset_classifier(num_classes)

    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.classifier[6]

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replaces the last layer; 0 classes leave fc7 as the output."""
        self.num_classes = num_classes
        self.classifier[6] = nn.Linear(4096, num_classes) if num_classes else nn.Identity()

    def forward_features(self, images: Tensor) -> Tensor:
        """The pooled conv5, `(B, 256, H, W)`."""
        return self.features(images)

    def forward_head(self, maps: Tensor, pre_logits: bool = False) -> Tensor:
        """Class scores, or fc7 with `pre_logits`."""
        flat = self.avgpool(maps).flatten(1)
        return self.classifier[:6](flat) if pre_logits else self.classifier(flat)


def _small_stem_resnet(**kwargs: Any) -> ResNet:
    model: Any = ResNet(**kwargs)
    model.conv1 = nn.Conv2d(kwargs.get("in_chans", 3), 64, 3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    for info, reduction in zip(model.feature_info, (1, 1, 2, 4, 8), strict=True):
        info["reduction"] = reduction
    return model


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
        "interpolation": "bilinear",
        "first_conv": "conv1",
        "classifier": "fc",
        **kwargs,
    }


default_cfgs = generate_default_cfgs(  # timm's registry looks for this name
    {
        "alexnet": _cfg(first_conv="features.0", classifier="classifier.6"),
        "resnet18_small_stem": _cfg(input_size=(3, 32, 32)),
        "resnet50_small_stem": _cfg(input_size=(3, 32, 32)),
    }
)


@register_model
def alexnet(pretrained: bool = False, **kwargs: Any) -> AlexNet:
    """AlexNet in torchvision's form ("one weird trick"), no batch norm."""
    feature_cfg = {"flatten_sequential": True, "out_indices": (0, 1, 2, 3, 4)}
    return build_model_with_cfg(AlexNet, "alexnet", pretrained, feature_cfg=feature_cfg, **kwargs)


@register_model
def resnet18_small_stem(pretrained: bool = False, **kwargs: Any) -> ResNet:
    """ResNet-18 with a 3x3 stem of stride 1 and no max pooling."""
    model_args = {"block": BasicBlock, "layers": (2, 2, 2, 2), **kwargs}
    return build_model_with_cfg(_small_stem_resnet, "resnet18_small_stem", pretrained, **model_args)


@register_model
def resnet50_small_stem(pretrained: bool = False, **kwargs: Any) -> ResNet:
    """ResNet-50 with a 3x3 stem of stride 1 and no max pooling."""
    model_args = {"block": Bottleneck, "layers": (3, 4, 6, 3), **kwargs}
    return build_model_with_cfg(_small_stem_resnet, "resnet50_small_stem", pretrained, **model_args)

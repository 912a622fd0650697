"""The dialects: layouts of checkpoints that differ from torchvision's by more than a prefix.

A dialect has other names, several networks of which one is the one to use, a head that is our
projection, or its own pixel statistics; every other file is `torchvision`. The prefix of a tensor
is its whole path in the file, such as `state_dict.module.encoder_q.`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

_SEQUENTIAL = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3", "7": "layer4"}
_STEM = r"^(model\.)?(backbone\.(bottom_up\.)?)?stem\.conv1\."
_DETECTRON2_NAMES: tuple[tuple[str, str], ...] = (
    (r"^roi_heads\.box_head\.fc1\.", "fc6."),
    (r"^roi_heads\.box_head\.fc2\.", "fc7."),
    (r"^roi_heads\.res5\.norm\.", "head.norm."),
    (r"^(backbone\.bottom_up\.|backbone\.|roi_heads\.(?=res5))", ""),
    (r"^stem\.conv1\.norm\.", "bn1."),
    (r"^stem\.", ""),
    *((rf"^res{stage + 1}\.", f"layer{stage}.") for stage in (1, 2, 3, 4)),
    (r"\.shortcut\.norm\.", ".downsample.1."),
    (r"\.shortcut\.", ".downsample.0."),
    (r"\.conv([123])\.norm\.", r".bn\1."),
)


def from_known(name: str) -> str:
    """Variants of torchvision's names that cannot be taken for anything else.

    `nn.Sequential(*resnet.children())` numbers its parts; CIFAR ResNets say `shortcut`; `features`
    alone may be data parallel; in timm, VGG's linear layers are convolutions.
    """
    first, dot, rest = name.partition(".")
    name = _SEQUENTIAL.get(first, first) + dot + rest
    name = name.replace("shortcut.", "downsample.").replace("features.module.", "features.")
    return name.replace("pre_logits.fc1.", "fc6.").replace("pre_logits.fc2.", "fc7.")


def from_detectron2(name: str) -> str:
    """Backbone files, C4 detectors (res5 is in the heads) and FPN detectors."""
    for pattern, replacement in _DETECTRON2_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


@dataclasses.dataclass(frozen=True)
class Dialect:
    r"""One way to lay out a checkpoint.

    Attributes:
        name: what `--format` calls it.
        source: the public code that writes such files.
        take: patterns of the prefix of the network to use, the best first.
        has: patterns that the file's listing must match: a line of its entries, sorted and
            separated by blanks (`\A.* epoch\b`), then a line for each tensor.
        lacks: a pattern that the listing must not match.
        rename: turns a name behind the prefix into torchvision's; `fc6.` and `fc7.` stand for the
            linear layers of AlexNet and VGG16, which torchvision numbers differently.
        inside: end of the prefix that `rename` wants to see as well.
        projection: beginnings of a linear head followed by L2 normalisation, which is our
            projection; they stand behind the prefix or beside the network.
        input: arguments of InputSpec, where it is not ImageNet's customary one.
        small_input: the same for a 3x3 stem; None where such a stem is not known to be ours.
        refusal: why such files cannot be imported, if they cannot.
    """

    name: str
    source: str
    take: tuple[str, ...] = ("",)
    has: tuple[str, ...] = ()
    lacks: str = r"(?!)"
    rename: Callable[[str], str] = from_known
    inside: str = ""
    projection: tuple[str, ...] = ()
    input: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    small_input: Mapping[str, Any] | None = None
    refusal: str = ""


# How lemniscate.pytorch/cifar.py and SupContrast/main_supcon.py feed their 3x3-stem networks.
CIFAR_INPUT: Mapping[str, Any] = {
    "size": 32,
    "mean": (0.4914, 0.4822, 0.4465),
    "std": (0.2023, 0.1994, 0.2010),
    "crop_ratio": 1.0,
}

# A trunk under any prefix, and so what SimCLR, SimSiam, SwAV, VICReg, Barlow Twins and VISSL
# save. torchvision/references/classification/train.py keeps an average beside `model`.
TORCHVISION = Dialect(
    "torchvision",
    "pytorch/vision: torchvision/models/{alexnet,vgg,resnet}.py, or these names under a prefix",
    take=(r"^model\.(module\.)?$", ""),
)
# Google's TensorFlow weights: nothing in the file tells them from torchvision's, and they
# want pixels in [0, 1] (eval.py), so they are never guessed.
SIMCLR_CONVERTER = Dialect(
    "simclr-converter",
    "tonylins/simclr-converter: convert.py, eval.py",
    take=(r"^state_dict\.$",),
    has=(r"\A state_dict $",),
    input={"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)},
)
DIALECTS: tuple[Dialect, ...] = (
    TORCHVISION,
    # The entry `timm` stands for a timm config.json beside the file.
    Dialect(
        "timm",
        "huggingface/pytorch-image-models: timm/models/{vgg,resnet}.py, "
        "timm/utils/checkpoint_saver.py",
        take=(r"^state_dict_ema\.", ""),
        has=(r"\bpre_logits\.|\A.* timm\b|\A.* arch\b.* state_dict\b.* version\b",),
    ),
    # main.py keeps the memory bank as a pickled module; cifar.py pickles the whole network.
    Dialect(
        "lemniscate",
        "zhirongw/lemniscate.pytorch: main.py, cifar.py, models/{resnet,resnet_cifar}.py",
        take=(r"^(state_dict|net)\.(module\.)?$",),
        has=(r"\A.* lemniscate\b",),
        projection=("fc.", "linear.", "classifier.6."),
        small_input=CIFAR_INPUT,
    ),
    # The other network is the momentum encoder. v1 has a linear fc, v2 an MLP in its place.
    Dialect(
        "moco",
        "facebookresearch/moco: moco/builder.py, main_moco.py",
        take=(r"(^|\.)encoder_q\.$",),
        projection=("fc.",),
    ),
    Dialect(
        "moco-v3",
        "facebookresearch/moco-v3: moco/builder.py, main_moco.py",
        take=(r"(^|\.)base_encoder\.$",),
    ),
    SIMCLR_CONVERTER,
    # CMC's InsResNet50 wraps the encoder in DataParallel and keeps a 128-d fc in it.
    Dialect(
        "pycontrast",
        "HobbitLong/PyContrast: pycontrast/networks/build_backbone.py, "
        "pycontrast/learning/contrast_trainer.py; HobbitLong/CMC: train_moco_ins.py, "
        "models/resnet.py",
        take=(r"^model\.(module\.)?encoder\.(module\.)?$",),
        lacks=r"encoder\.(module\.)?layer2\.0\.shortcut\.",
        projection=("head.0.", "fc."),
    ),
    Dialect(
        "supcontrast",
        "HobbitLong/SupContrast: networks/resnet_big.py, main_supcon.py, util.py",
        take=(r"^model\.(module\.)?encoder\.(module\.)?$",),
        has=(r"encoder\.(module\.)?layer2\.0\.shortcut\.",),
        projection=("head.",),
        small_input=CIFAR_INPUT,
    ),
    Dialect(
        "cmc",
        "HobbitLong/CMC: models/{resnet,alexnet}.py; "
        "HobbitLong/PyContrast: pycontrast/networks/build_backbone.py (CMCSingleHead)",
        has=(
            r"^model\.(module\.)?(l_to_ab|encoder1)\.",
            r"^model\.(module\.)?(ab_to_l|encoder2)\.",
        ),
        refusal="it has two networks, for the L and the ab channels of Lab images, and none of "
        "them sees RGB",
    ),
    # The teacher is what DINO evaluates.
    Dialect(
        "dino",
        "facebookresearch/dino: main_dino.py, utils.py (MultiCropWrapper)",
        take=(r"^teacher\.(module\.)?backbone\.$", r"^student\.(module\.)?backbone\.$"),
    ),
    # openselfsup/models/moco.py has its query encoder a second time, as `backbone`.
    # tools/model_converters/extract_backbone_weights.py takes `backbone.` away and leaves `author`.
    Dialect(
        "mmselfsup",
        "open-mmlab/mmselfsup: mmselfsup/models/algorithms/{npid,moco}.py, "
        "openselfsup/models/moco.py, tools/model_converters/extract_backbone_weights.py",
        take=(r"^state_dict\.(module\.)?(backbone\.)?$",),
        has=(r"\A.* (author|meta)\b",),
        projection=("neck.fc.",),
    ),
    # Older versions say `encoder.`. Its CIFAR stem pads by 2, ours by 1: not the same network.
    Dialect(
        "solo-learn",
        "vturrisi/solo-learn: solo/methods/base.py, main_linear.py",
        take=(r"^state_dict\.(backbone|encoder)\.$",),
        has=(r"\A.* pytorch-lightning_version\b", r"^state_dict\.(backbone|encoder)\.conv1\."),
        lacks=r"\bprojection_head\.",
    ),
    Dialect(
        "lightly",
        "lightly-ai/lightly: examples/pytorch_lightning/{simclr,moco}.py",
        take=(r"(^|\.)backbone\.$",),
        has=(r"\bbackbone\.4\.0\.|\bprojection_head\.",),
    ),
    # Released detectors and MSRA's ResNets want BGR and stride in the 1x1 convolutions, which the
    # file does not say: inputs.py asks. Our export keeps AlexNet and VGG16 under full names.
    Dialect(
        "detectron2",
        "facebookresearch/detectron2: tools/convert-torchvision-to-d2.py, "
        "detectron2/checkpoint/detection_checkpoint.py; facebookresearch/moco: "
        "detection/convert-pretrain-to-detectron2.py; our export/to_detectron2.py",
        take=(r"^(model\.)?$",),
        has=(rf"{_STEM}|\A.* __author__\b", rf"{_STEM}|^(model\.)?backbone\.features\."),
        rename=from_detectron2,
        inside=r"backbone\.(bottom_up\.)?$",
    ),
    Dialect(
        "caffe2",
        "facebookresearch/detectron2: detectron2/checkpoint/c2_model_loading.py",
        has=(r"^((blobs|model)\.)?(res2_0_branch2a_w|conv1_w)$",),
        refusal="Caffe2's networks see BGR images and stride in their 1x1 convolutions, and no "
        "backbone here computes the same",
    ),
)

BY_NAME: Mapping[str, Dialect] = {dialect.name: dialect for dialect in DIALECTS}
FORMATS: tuple[str, ...] = tuple(BY_NAME)

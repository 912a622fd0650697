"""Published numbers as data, each with its source. Imports no torch.

"The paper" is Wu, Xiong, Yu, Lin: Unsupervised Feature Learning via Non-Parametric Instance
Discrimination, CVPR 2018. Numbers stand as they are printed there.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from instdisc.names import STAGES

PAPER = "Wu et al., CVPR 2018"
AUTHORS = "authors' repository"
MOCO = "MoCo repository"
VISSL = "VISSL model zoo"
PYCONTRAST = "PyContrast repository"
MMSELFSUP = "MMSelfSup model zoo"
OPENSELFSUP = "OpenSelfSup model zoo"
ADDRESSES = {
    PAPER: "https://arxiv.org/abs/1805.01978",
    AUTHORS: "https://github.com/zhirongw/lemniscate.pytorch",
    MOCO: "https://github.com/facebookresearch/moco",
    VISSL: "https://github.com/facebookresearch/vissl/blob/main/MODEL_ZOO.md",
    PYCONTRAST: "https://github.com/HobbitLong/PyContrast",
    MMSELFSUP: "https://github.com/open-mmlab/mmselfsup",
    OPENSELFSUP: "https://github.com/open-mmlab/OpenSelfSup",
}
READOUTS = (*STAGES, "kNN")
# How a published row relates to what can be run here: its own method, a baseline that has a name
# for --weights or --init, or another method, which is shown and not compared.
Kind = Literal["ours", "random", "data-init", "labels", "other"]


@dataclasses.dataclass(frozen=True)
class Published:
    """One published row.

    Attributes:
        table: where it stands: "Table 2"; may be empty.
        method: what the row is called.
        arch: the network, by the suite's name where it has one.
        values: column -> number, in percent; what was not published is absent.
        kind: what it can be compared with.
        source: whose numbers they are.
        remark: what the source says of this row; may be empty.
    """

    table: str
    method: str
    arch: str
    values: Mapping[str, float]
    kind: Kind = "other"
    source: str = PAPER
    remark: str = ""

    @property
    def citation(self) -> str:
        """Source and place."""
        return ", ".join(filter(None, (self.source, self.table)))


def find_address(citation: str) -> str:
    """Where the source of a citation can be read."""
    return next(address for source, address in ADDRESSES.items() if citation.startswith(source))


def _rows(
    table: str, columns: tuple[str, ...], text: str, source: str = PAPER
) -> tuple[Published, ...]:
    """Reads lines of `method | arch | kind | numbers`; a dash is a number that was not printed."""
    rows = []
    for line in text.strip().splitlines():
        method, arch, kind, numbers = (part.strip() for part in line.split("|"))
        pairs = zip(columns, numbers.split(), strict=True)
        values = {column: float(number) for column, number in pairs if number != "-"}
        rows.append(Published(table, method, arch, values, kind, source))  # type: ignore[arg-type] # checked by tests
    return tuple(rows)


# CIFAR-10, ResNet-18: linear SVM and kNN on the learned feature. The method names the objective.
TABLE1 = _rows(
    "Table 1",
    ("linear SVM", "kNN"),
    """
    parametric softmax      | resnet18 | ours | 60.3 63.0
    NCE, m = 1              | resnet18 | ours | 44.3 42.5
    NCE, m = 10             | resnet18 | ours | 60.2 63.4
    NCE, m = 512            | resnet18 | ours | 64.3 78.4
    NCE, m = 4096           | resnet18 | ours | 70.2 80.4
    non-parametric softmax  | resnet18 | ours | 75.4 80.8
    """,
)
# The objective and m that each row of Table 1 was trained with, as pretrain/run.py names them.
TABLE1_SETTINGS: dict[str, tuple[str, int | None]] = {
    "parametric softmax": ("parametric", None),
    "NCE, m = 1": ("nce", 1),
    "NCE, m = 10": ("nce", 10),
    "NCE, m = 512": ("nce", 512),
    "NCE, m = 4096": ("nce", 4096),
    "non-parametric softmax": ("softmax", None),
}

TABLE1_PROTOCOL = "ResNet-18; a linear SVM, or kNN with k = 200, on the learned 128-d feature"

# ImageNet, top-1: linear SVMs on conv1..conv5, kNN on the 128-d output.
TABLE2 = _rows(
    "Table 2",
    READOUTS,
    """
    Random           | alexnet   | random    | 11.6 17.1 16.9 16.3 14.1 3.5
    Data-Init        | alexnet   | data-init | 17.5 23.0 24.5 23.2 20.6 -
    Context          | alexnet   | other     | 16.2 23.3 30.2 31.7 29.6 -
    Adversarial      | alexnet   | other     | 17.7 24.5 31.0 29.9 28.0 -
    Color            | alexnet   | other     | 13.1 24.8 31.0 32.6 31.8 -
    Jigsaw           | alexnet   | other     | 19.2 30.1 34.7 33.9 28.3 -
    Count            | alexnet   | other     | 18.0 30.6 34.3 32.5 25.7 -
    SplitBrain       | alexnet   | other     | 17.7 29.3 35.4 35.2 32.8 11.8
    Exemplar         | resnet101 | other     | - - 31.5 - - -
    this method      | alexnet   | ours      | 16.8 26.5 31.8 34.1 35.6 31.3
    this method      | vgg16     | ours      | 16.5 21.4 27.6 35.1 39.2 33.9
    this method      | resnet18  | ours      | 16.0 19.9 29.8 39.0 44.5 41.0
    this method      | resnet50  | ours      | 15.3 18.8 24.9 40.6 54.0 46.5
    """,
)
# Places205, top-1, the same readouts of networks trained on ImageNet.
TABLE3 = _rows(
    "Table 3",
    READOUTS,
    """
    Random           | alexnet   | random    | 15.7 20.3 19.8 19.1 17.5 3.9
    Data-Init        | alexnet   | data-init | 21.4 26.2 27.1 26.1 24.0 -
    Context          | alexnet   | other     | 19.7 26.7 31.9 32.7 30.9 -
    Adversarial      | alexnet   | other     | 17.7 24.5 31.0 29.9 28.0 -
    Video            | alexnet   | other     | 20.1 28.5 29.9 29.7 27.9 -
    Color            | alexnet   | other     | 22.0 28.7 31.8 31.3 29.7 -
    Jigsaw           | alexnet   | other     | 23.0 32.1 35.5 34.8 31.3 -
    SplitBrain       | alexnet   | other     | 21.3 30.7 34.0 34.1 32.5 10.8
    this method      | alexnet   | ours      | 18.8 24.3 31.9 34.5 33.6 30.1
    this method      | vgg16     | ours      | 17.6 23.1 29.5 33.8 36.3 32.8
    this method      | resnet18  | ours      | 17.8 23.0 30.1 37.0 38.1 38.6
    this method      | resnet50  | ours      | 18.1 22.3 29.7 42.1 45.5 41.6
    """,
)
READOUT_PROTOCOL = (
    "top-1; linear SVMs on conv1..conv5, pooled to about 10,000 numbers; "
    "kNN with k = 200 and tau 0.07 on the 128-d output"
)
# ImageNet, ResNet-18, kNN top-1 by the width of the embedding, and by the part of the images that
# the network was trained on.
TABLE4 = {32: 34.0, 64: 38.8, 128: 41.0, 256: 40.1}
TABLE5 = {0.001: 3.9, 0.01: 10.7, 0.1: 23.1, 0.3: 31.7, 1.0: 41.0}
ABLATION_PROTOCOL = "ResNet-18; kNN top-1 with k = 200 and tau 0.07 on the learned feature"
# VOC2007 trainval -> test, mAP at IoU 0.5, 11-point: Fast R-CNN (AlexNet, VGG16) and Faster R-CNN.
VOC07 = "AP50, 11-point"
TABLE6 = _rows(
    "Table 6",
    (VOC07,),
    """
    ImageNet labels  | alexnet   | labels    | 56.8
    Gaussian         | alexnet   | random    | 43.4
    Data-Init        | alexnet   | data-init | 45.6
    Context          | alexnet   | other     | 51.1
    Adversarial      | alexnet   | other     | 46.9
    Color            | alexnet   | other     | 46.9
    Video            | alexnet   | other     | 47.4
    this method      | alexnet   | ours      | 48.1
    ImageNet labels  | vgg16     | labels    | 67.3
    Gaussian         | vgg16     | random    | 39.7
    Video            | vgg16     | other     | 60.2
    Context          | vgg16     | other     | 61.5
    Transitivity     | vgg16     | other     | 63.2
    this method      | vgg16     | ours      | 60.5
    ImageNet labels  | resnet50  | labels    | 76.2
    this method      | resnet50  | ours      | 65.4
    """,
)
TABLE6_PROTOCOL = "VOC2007 trainval -> test, 11-point AP at IoU 0.5"

# What others published of this method since. Their protocols are not the paper's, nor each other's:
# each keeps a column of its own.
_LINEAR = {
    name: f"linear top-1, {name}" for name in ("authors", "VISSL", "PyContrast", "MMSelfSup")
}


def _anchor(method: str, column: str, value: float, source: str) -> Published:
    return Published("ResNet-50", method, "resnet50", {column: value}, source=source)


IMAGENET_ANCHORS = (
    _anchor("authors' later weights", "kNN top-1", 46.8, AUTHORS),
    _anchor("update: sampled softmax, 65,536 negatives", _LINEAR["authors"], 58.5, AUTHORS),
    _anchor("authors' weights, probed by VISSL", _LINEAR["VISSL"], 54.99, VISSL),
    _anchor("NPID, 4,096 negatives, 200 epochs", _LINEAR["VISSL"], 52.73, VISSL),
    _anchor("NPID++, 32,000 negatives, 800 epochs", _LINEAR["VISSL"], 56.68, VISSL),
    _anchor("InstDis, 200 epochs", _LINEAR["PyContrast"], 59.5, PYCONTRAST),
    _anchor("NPID, 200 epochs", _LINEAR["MMSelfSup"], 58.3, MMSELFSUP),
)
ANCHORS_PROTOCOL = "kNN: k = 200 on the 128-d output; linear: as the named code trains it"
# VOC2007 + 2012 trainval -> VOC2007 test, as Detectron2 prints it: 11-point, since the test year is
# 2007. Never beside a column of VOC2007 alone.
VOC0712_COLUMNS = (VOC07, "AP, 11-point", "AP75, 11-point")
LATER_DETECTION = tuple(
    dataclasses.replace(row, remark="mean of 5 trials")
    for row in _rows(
        "ResNet-50-C4",
        VOC0712_COLUMNS,
        """
        ImageNet labels        | resnet50 | other | 81.3 53.5 58.8
        MoCo v2, 800 epochs    | resnet50 | other | 82.5 57.4 64.0
        """,
        MOCO,
    )
)

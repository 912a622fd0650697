"""Names that several packages share: data, no code. Imports no torch."""

import signal
from typing import Literal, get_args

ArchName = Literal["alexnet", "vgg16", "resnet18", "resnet50"]
ARCH_NAMES: tuple[ArchName, ...] = get_args(ArchName)
Stem = Literal["imagenet", "small"]
STAGES = ("conv1", "conv2", "conv3", "conv4", "conv5")
# What a flag takes: N in a word stands for a number, NAME for a name (see instdisc.cli.option).
ARCH_CHOICES = (*ARCH_NAMES, "timm:NAME")
FEATURE_CHOICES = ("embedding", "backbone", *STAGES, "stageN", "blockN")
TIMM = "timm:"  # how the architecture of a timm network begins
Precision = Literal["half", "float32"]  # of stored features
SubsetMode = Literal["random", "balanced"]

# The detection config of each architecture; the paper has no detector with ResNet-18.
DETECTORS = {
    "alexnet": "fast_alexnet",
    "vgg16": "fast_vgg16",
    "resnet18": "faster_r18",
    "resnet50": "faster_r50",
}
# Of COCO: the one of the published tables (R50-C4, 2x), and one for small machines.
COCO_DETECTORS = {"resnet18": "coco/mask_r18_fpn", "resnet50": "coco/mask_r50_c4_2x"}
PAPER_DETECTORS = {"alexnet": "fast_alexnet", "vgg16": "fast_vgg16", "resnet50": "faster_r50"}

# First words of a --weights that names no file: random:ARCH, untrained:RUN, ...
NAMED_NETWORKS = ("random", "untrained", "data-init", "timm")

# Environment variables: the folder of all runs, the default of --data, that of --voc-root, the
# timeout of collectives between processes, the silence after which a process counts as dead.
RUNS_VARIABLE = "INSTDISC_RUNS"
DATA_VARIABLE = "INSTDISC_DATA"
VOC_VARIABLE = "DETECTRON2_DATASETS"
TIMEOUT_VARIABLE = "INSTDISC_TIMEOUT_SECONDS"
SILENCE_VARIABLE = "INSTDISC_SILENCE_SECONDS"

# SIGTERM: preemption, cancelling. SIGUSR1, SIGUSR2: what a scheduler is told to send before the
# time limit. SIGINT: a person.
SCHEDULER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
STOP_SIGNALS = (*SCHEDULER_SIGNALS, signal.SIGINT)

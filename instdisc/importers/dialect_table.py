"""The dialects: how peers name the tensors of their checkpoints, each with its source.

Where an entry leaves something out, the dialect's public code is why; see `dialects.Dialect`.
"""

import dataclasses
from collections.abc import Mapping

from instdisc.images.transforms import InputSpec
from instdisc.importers.dialects import (
    Dialect,
    Evidence,
    from_detectron2,
    from_kuangliu,
    from_sequential,
    from_timm,
)

# How lemniscate.pytorch/cifar.py and SupContrast/main_supcon.py feed their 3x3-stem networks.
CIFAR_INPUT = InputSpec(32, (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), 1.0)


_TRAINING = ("epoch", "arch", "optimizer", "best_acc1", "best_prec1", "scheduler", "lr_scheduler")
_PLAIN = Evidence(
    no_top=("lemniscate", "author", "version", "timm"),
    no_keys=("projection_head.", "prototypes.", "pre_logits.", "backbone.", "encoder"),
)

DIALECTS: tuple[Dialect, ...] = (
    # Also what DINO, VICReg and Barlow Twins publish as resnet50.pth (their hubconf.py), and
    # what pytorch/examples/imagenet/main.py and torchvision/references/classification/train.py
    # save around it.
    Dialect(
        "torchvision",
        "pytorch/vision: torchvision/models/{alexnet,vgg,resnet}.py",
        roots=((), ("state_dict",), ("model",)),
        evidence=(
            dataclasses.replace(_PLAIN, no_top=(*_PLAIN.no_top, "state_dict", "model")),
            dataclasses.replace(_PLAIN, top=("state_dict",), any_top=_TRAINING),
            dataclasses.replace(_PLAIN, top=("model",), any_top=_TRAINING),
        ),
        rename=from_kuangliu,
        siblings=("model_ema",),
    ),
    # `timm` stands for a timm config.json beside the file.
    Dialect(
        "timm",
        "huggingface/pytorch-image-models: timm/models/{vgg,resnet}.py, "
        "timm/utils/checkpoint_saver.py",
        roots=(("state_dict_ema",), ("state_dict",), ()),
        evidence=(
            Evidence(keys=("pre_logits.",)),
            Evidence(top=("timm",)),
            Evidence(top=("state_dict", "arch", "version")),
        ),
        rename=from_timm,
        heads=("fc.", "head.fc.", "classifier.6."),
        siblings=("state_dict", "state_dict_ema"),
    ),
    # main.py keeps the memory bank as a pickled module; cifar.py pickles the whole network.
    Dialect(
        "lemniscate",
        "zhirongw/lemniscate.pytorch: main.py, cifar.py, models/{resnet,resnet_cifar}.py",
        roots=(("state_dict",), ("net",)),
        evidence=(Evidence(top=("lemniscate",)),),
        rename=from_kuangliu,
        siblings=("lemniscate",),
        projection=(("fc.", ""), ("linear.", ""), ("classifier.6.", "")),
        small_input=CIFAR_INPUT,
    ),
    # v1 has a linear fc, v2 an MLP in its place.
    Dialect(
        "moco",
        "facebookresearch/moco: moco/builder.py, main_moco.py",
        roots=(("state_dict",),),
        prefixes=("encoder_q.",),
        evidence=(Evidence(keys=("encoder_q.",), no_keys=("backbone.", "encoder_q.0.")),),
        drop=("encoder_k.", "queue"),
        projection=(("encoder_q.fc.", ""),),
    ),
    Dialect(
        "moco-v3",
        "facebookresearch/moco-v3: moco/builder.py, main_moco.py",
        roots=(("state_dict",),),
        prefixes=("base_encoder.",),
        evidence=(Evidence(keys=("base_encoder.",)),),
        drop=("momentum_encoder.", "predictor."),
    ),
    # sthalles keeps the MLP in backbone.fc; Spijkervet saves the bare state dict.
    Dialect(
        "simclr",
        "sthalles/SimCLR: models/resnet_simclr.py, simclr.py; "
        "Spijkervet/SimCLR: simclr/simclr.py, model.py",
        roots=(("state_dict",), ()),
        prefixes=("backbone.", "encoder."),
        evidence=(
            Evidence(top=("state_dict",), keys=("backbone.fc.0.", "backbone.fc.2.")),
            Evidence(no_top=("state_dict",), keys=("encoder.conv1.", "projector.")),
        ),
        drop=("projector.",),
    ),
    Dialect(
        "simsiam",
        "facebookresearch/simsiam: simsiam/builder.py, main_simsiam.py",
        roots=(("state_dict",),),
        prefixes=("encoder.",),
        evidence=(Evidence(keys=("encoder.conv1.", "encoder.fc.6.", "predictor.")),),
        drop=("predictor.",),
    ),
    # Google's TensorFlow weights: nothing in the file tells them from torchvision's, and they
    # want pixels in [0, 1] (eval.py), so they are never guessed.
    Dialect(
        "simclr-converter",
        "tonylins/simclr-converter: convert.py, eval.py",
        roots=(("state_dict",),),
        input=InputSpec(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)),
    ),
    # CMC's InsResNet50 wraps the encoder in DataParallel and keeps a 128-d fc in it.
    Dialect(
        "pycontrast",
        "HobbitLong/PyContrast: pycontrast/networks/build_backbone.py, "
        "pycontrast/learning/contrast_trainer.py; HobbitLong/CMC: train_moco_ins.py, "
        "models/resnet.py",
        roots=(("model",),),
        prefixes=("encoder.module.", "encoder."),
        evidence=(
            Evidence(
                top=("model",),
                any_keys=("encoder.conv1.", "encoder.module.conv1."),
                no_keys=("encoder.layer2.0.shortcut.", "encoder.module.layer2.0.shortcut."),
            ),
        ),
        drop=("head.", "head_jig."),
        siblings=("contrast", "model_ema"),
        projection=(("head.0.", "head.2.weight"), ("encoder.module.fc.", "")),
    ),
    Dialect(
        "supcontrast",
        "HobbitLong/SupContrast: networks/resnet_big.py, main_supcon.py, util.py",
        roots=(("model",),),
        prefixes=("encoder.module.", "encoder."),
        evidence=(
            Evidence(
                top=("model",),
                any_keys=("encoder.layer2.0.shortcut.", "encoder.module.layer2.0.shortcut."),
            ),
        ),
        rename=from_kuangliu,
        drop=("head.", "fc."),
        projection=(("head.", ""),),
        small_input=CIFAR_INPUT,
    ),
    Dialect(
        "cmc",
        "HobbitLong/CMC: models/{resnet,alexnet}.py; "
        "HobbitLong/PyContrast: pycontrast/networks/build_backbone.py (CMCSingleHead)",
        roots=(("model",),),
        evidence=(
            Evidence(keys=("l_to_ab.", "ab_to_l.")),
            Evidence(keys=("encoder1.", "encoder2.")),
        ),
        refusal="it has two networks, for the L and the ab channels of Lab images, and none of "
        "them sees RGB",
    ),
    # Published weights are the bare state dict, training checkpoints have it in `state_dict`.
    Dialect(
        "swav",
        "facebookresearch/swav: src/resnet50.py, main_swav.py, hubconf.py",
        roots=(("state_dict",), ()),
        evidence=(
            Evidence(
                any_keys=("projection_head.", "prototypes."), no_keys=("backbone.", "encoder")
            ),
        ),
        drop=("projection_head.", "prototypes."),
    ),
    # The teacher is what DINO evaluates.
    Dialect(
        "dino",
        "facebookresearch/dino: main_dino.py, utils.py (MultiCropWrapper)",
        roots=(("teacher",), ("student",)),
        prefixes=("backbone.",),
        evidence=(Evidence(any_top=("teacher", "student"), keys=("backbone.",)),),
        drop=("head.",),
        siblings=("student", "teacher", "dino_loss"),
    ),
    Dialect(
        "vicreg",
        "facebookresearch/vicreg: main_vicreg.py, resnet.py",
        roots=(("model",),),
        prefixes=("backbone.",),
        evidence=(Evidence(top=("model",), keys=("backbone.", "projector."), no_keys=("bn.",)),),
        drop=("projector.",),
    ),
    Dialect(
        "barlow-twins",
        "facebookresearch/barlowtwins: main.py",
        roots=(("model",),),
        prefixes=("backbone.",),
        evidence=(Evidence(top=("model",), keys=("backbone.", "projector.", "bn.")),),
        drop=("projector.", "bn."),
    ),
    Dialect(
        "vissl",
        "facebookresearch/vissl: vissl/models/trunks/resnext.py, "
        "extra_scripts/convert_vissl_to_torchvision.py",
        roots=(("classy_state_dict", "base_model", "model", "trunk"),),
        prefixes=("_feature_blocks.",),
        evidence=(Evidence(top=("classy_state_dict",)),),
        siblings=("heads", "loss", "losses", "meters", "hooks", "task"),
    ),
    # tools/model_converters/extract_backbone_weights.py takes `backbone.` away and leaves `author`.
    Dialect(
        "mmselfsup",
        "open-mmlab/mmselfsup: mmselfsup/models/algorithms/{npid,moco}.py, "
        "openselfsup/models/moco.py, tools/model_converters/extract_backbone_weights.py",
        roots=(("state_dict",),),
        prefixes=("backbone.", ""),
        evidence=(Evidence(top=("state_dict",), any_top=("meta", "author")),),
        drop=(
            *("neck.", "head.", "encoder_q.", "encoder_k.", "queue", "memory_bank."),
            *("online_net.", "target_net.", "projector.", "predictor.", "data_preprocessor."),
        ),
        siblings=("message_hub", "ema_state_dict"),
        projection=(("neck.fc.", ""),),
    ),
    # Older versions say `encoder.`. Its CIFAR stem pads by 2, ours by 1: not the same network.
    Dialect(
        "solo-learn",
        "vturrisi/solo-learn: solo/methods/base.py, main_linear.py",
        roots=(("state_dict",),),
        prefixes=("backbone.", "encoder."),
        evidence=(
            Evidence(
                top=("state_dict", "pytorch-lightning_version"),
                any_keys=("backbone.conv1.", "encoder.conv1."),
                no_keys=("projection_head.",),
            ),
        ),
        drop=(
            *("classifier.", "projector.", "predictor.", "prototypes.", "queue", "momentum_"),
            *("key_projector.", "head.", "knn."),
        ),
    ),
    Dialect(
        "lightly",
        "lightly-ai/lightly: examples/pytorch_lightning/{simclr,moco}.py",
        roots=(("state_dict",), ()),
        prefixes=("backbone.",),
        evidence=(
            Evidence(keys=("backbone.0.", "backbone.4.0.")),
            Evidence(keys=("backbone.conv1.", "projection_head.")),
        ),
        rename=from_sequential,
        drop=(
            *("projection_head", "prediction_head", "backbone_momentum.", "prototypes"),
            *("criterion.", "memory_bank.", "queue"),
        ),
    ),
    # Released detectors and MSRA's ResNets want BGR and stride in the 1x1 convolutions, which
    # the file does not say: importers.py asks. Ours keeps AlexNet and VGG16 under full names.
    Dialect(
        "detectron2",
        "facebookresearch/detectron2: tools/convert-torchvision-to-d2.py, "
        "detectron2/checkpoint/detection_checkpoint.py; facebookresearch/moco: "
        "detection/convert-pretrain-to-detectron2.py; our export/to_detectron2.py",
        roots=(("model",), ()),
        evidence=(
            Evidence(any_keys=("stem.conv1.", "backbone.stem.conv1.", "backbone.bottom_up.stem.")),
            Evidence(top=("__author__",), keys=("backbone.features.",)),
        ),
        rename=from_detectron2,
        drop=(
            *("proposal_generator.", "roi_heads.box_predictor.", "roi_heads.box_head.conv"),
            *("roi_heads.mask", "roi_heads.keypoint", "roi_heads.res5.norm."),
            *("backbone.fpn_", "backbone.top_block.", "pixel_", "anchor"),
        ),
    ),
    Dialect(
        "caffe2",
        "facebookresearch/detectron2: detectron2/checkpoint/c2_model_loading.py",
        roots=((), ("blobs",), ("model",)),
        evidence=(Evidence(any_keys=("res2_0_branch2a_w", "conv1_w")),),
        refusal="Caffe2's networks see BGR images and stride in their 1x1 convolutions, and no "
        "backbone here computes the same",
    ),
)

FORMATS: tuple[str, ...] = tuple(dialect.name for dialect in DIALECTS)
BY_NAME: Mapping[str, Dialect] = {dialect.name: dialect for dialect in DIALECTS}

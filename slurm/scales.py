"""Flags that make a study smaller than the paper's: for two cores, and for a look at the graph."""

import shlex

SMALL_EPOCHS, SMALL_FRACTION = 30, 0.1
# Table 1 on two cores: 5,000 images and the stem that halves an image twice; minutes for each row.
# Half of the old row stays in the bank, as in the authors' code: with 30 visits to an image that
# gets further than replacing it (docs/protocols.md).
SMALL = shlex.split(
    f"--train-fraction {SMALL_FRACTION} --stem imagenet --epochs {SMALL_EPOCHS} "
    "--bank-momentum 0.5 --monitor-every 0 --workers 0"
)
# The least that does something on the embedded images.
DEMO_QUICK = shlex.split(
    "--train-fraction 0.05 --epochs 2 --batch-size 16 --warmup-epochs 0 --monitor-every 2 "
    "--no-tensorboard"
)
SEMISUP_QUICK = shlex.split("--epochs 2 --batch-size 16")
DETECT_QUICK = shlex.split(
    "--pictures 1 SOLVER.MAX_ITER 4 SOLVER.IMS_PER_BATCH 2 MODEL.RPN.BATCH_SIZE_PER_IMAGE 16 "
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 16 INPUT.MIN_SIZE_TRAIN (64,) INPUT.MIN_SIZE_TEST 64 "
    "TEST.DETECTIONS_PER_IMAGE 5 MODEL.RPN.POST_NMS_TOPK_TEST 20"
)

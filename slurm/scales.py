"""Flags that make a study smaller than the paper's: for two cores, and for a look at the graph."""

import shlex

SMALL_EPOCHS, SMALL_FRACTION = 12, 0.1
# CIFAR-10 on two cores: 5,000 images and the stem that halves an image twice; minutes for each row.
# With so few visits to an image many small steps get further than few large ones, and so does a
# bank that keeps half of the old row, as in the authors' code (docs/protocols.md).
SMALL = shlex.split(
    f"--train-fraction {SMALL_FRACTION} --stem imagenet --epochs {SMALL_EPOCHS} "
    "--batch-size 64 --lr 0.03 --warmup-epochs 2 --lr-milestones 10 "
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

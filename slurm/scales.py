"""The rows of the paper's tables as flags, and what makes them small: for two cores, for a look."""

import shlex

IMAGENET, CIFAR, PLACES, VOC07 = 1_281_167, 50_000, 2_448_873, 5_011
EMBEDDINGS = (32, 64, 128, 256)
FRACTIONS = (0.001, 0.01, 0.1, 0.3, 1.0)
LABELED = (0.01, 0.02, 0.04, 0.1, 0.2)
# Table 1, from the worst row to the best.
OBJECTIVES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("parametric", ("--objective", "parametric")),
    *((f"nce-{m}", ("--objective", "nce", "--num-negatives", str(m))) for m in (1, 10, 512, 4096)),
    ("softmax", ("--objective", "softmax")),
)
# What the last row but one changes by: the proximal term, and noise that a batch shares.
ABLATIONS: tuple[tuple[str, tuple[str, ...]], ...] = tuple(
    (f"nce-4096-{name}", ("--objective", "nce", "--num-negatives", "4096", *flags))
    for name, flags in (
        ("proximal", ("--proximal-weight", "1")),
        ("shared", ("--negatives", "shared")),
    )
)

SMALL_EPOCHS, SMALL_FRACTION = 18, 0.1
# CIFAR-10 on two cores: 5,000 images and the stem that halves an image twice; minutes for each row.
# Many small steps, flips and a bank that keeps half of the old row: what the exact softmax learnt
# with in so few visits to an image. Z of NCE follows the features: while they are still all alike,
# Z of the first batch is too small by far, and NCE did not train (docs/results/table1-small.md).
SMALL = shlex.split(
    f"--train-fraction {SMALL_FRACTION} --stem imagenet --epochs {SMALL_EPOCHS} "
    "--flip --batch-size 64 --lr 0.03 --warmup-epochs 2 --lr-milestones 15 "
    "--bank-momentum 0.5 --normalizer exact --monitor-every 0 --workers 0"
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

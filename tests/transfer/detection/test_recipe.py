"""Configs: the paper's numbers, the scaling to other batches, refusals."""

from importlib.resources import files
from pathlib import Path

import pytest

from instdisc.errors import UserError
from transfer.detection.recipe import (
    REFUSED,
    adapt_to_gloo,
    adapt_to_processes,
    adapt_to_scratch,
    adapt_to_weights,
    arch_of,
    describe,
    read_config,
)
from transfer.detection.settings import shipped_configs

CONFIGS = Path(str(files("detection_configs")))
ALL = list(shipped_configs())


def config(name: str) -> Path:
    return CONFIGS / f"{name}.yaml"


@pytest.mark.parametrize("name", ["fast_alexnet", "fast_vgg16", "faster_r50"])
def test_the_papers_rows_have_its_schedule_and_freezing(name: str) -> None:
    cfg = read_config(config(name))
    assert cfg.SOLVER.BASE_LR == 0.001
    assert cfg.SOLVER.GAMMA == 0.1
    assert cfg.SOLVER.STEPS == (50000, 100000)
    assert cfg.DATASETS.TRAIN == ("voc_2007_trainval",)
    assert cfg.DATASETS.TEST == ("voc_2007_test",)
    assert (3 if name == "faster_r50" else 1) == cfg.MODEL.BACKBONE.FREEZE_AT
    assert cfg.MODEL.RESNETS.NORM == "FrozenBN"
    assert (cfg.INPUT.FORMAT, cfg.MODEL.RESNETS.STRIDE_IN_1X1) == ("RGB", False)
    assert cfg.MODEL.PIXEL_MEAN == [123.675, 116.28, 103.53]
    assert cfg.MODEL.PIXEL_STD == [58.395, 57.12, 57.375]
    assert not cfg.TRANSFER.TRAIN_ON_DIFFICULT
    # Of the Fast and Faster R-CNN papers.
    assert cfg.MODEL.ROI_HEADS.NMS_THRESH_TEST == 0.3
    assert cfg.MODEL.ROI_BOX_HEAD.SMOOTH_L1_BETA == 1
    assert (cfg.SOLVER.BIAS_LR_FACTOR, cfg.SOLVER.WEIGHT_DECAY_BIAS) == (2, 0)
    if name == "faster_r50":
        assert cfg.MODEL.ANCHOR_GENERATOR.SIZES == [[128, 256, 512]]
        assert pytest.approx(1 / 9) == cfg.MODEL.RPN.SMOOTH_L1_BETA
        assert cfg.MODEL.RPN.BOUNDARY_THRESH == 0
    else:
        assert cfg.TRANSFER.FC_DROPOUT == 0.5
        assert cfg.MODEL.ROI_HEADS.IOU_THRESHOLDS == [0.1, 0.5]


@pytest.mark.parametrize(
    ("name", "lists", "step", "end", "proposals"),
    [
        ("fast_r50", 1, 22_000, 30_000, True),
        ("fast_r50_0712", 2, 66_000, 80_000, True),
        ("faster_r50", 1, 38_000, 50_000, False),
        ("faster_r50_0712", 2, 65_000, 100_000, False),
    ],
)
def test_frozen_detection_is_the_benchmarks(
    name: str, lists: int, step: int, end: int, proposals: bool
) -> None:
    cfg = read_config(config(f"frozen/{name}"))
    assert ((step,), end) == (cfg.SOLVER.STEPS, cfg.SOLVER.MAX_ITER)
    assert cfg.SOLVER.BASE_LR == 0.002
    assert len(cfg.DATASETS.TRAIN) == lists
    assert (cfg.MODEL.BACKBONE.FREEZE_AT, cfg.MODEL.RESNETS.NORM) == (4, "FrozenBN")
    assert proposals == cfg.MODEL.LOAD_PROPOSALS


@pytest.mark.parametrize("kind", ["faster", "mask"])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("body", ["r50_c4", "r50_fpn"])
def test_coco_is_mocos_and_detectron2s(kind: str, times: int, body: str) -> None:
    cfg = read_config(config(f"coco/{kind}_{body}{'_2x' if times == 2 else ''}"))
    assert times * 90_000 == cfg.SOLVER.MAX_ITER
    assert (times * 60_000, times * 80_000) == cfg.SOLVER.STEPS
    assert (cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.BASE_LR) == (16, 0.02)
    assert cfg.SOLVER.WEIGHT_DECAY == 0.0001
    assert (cfg.SOLVER.BIAS_LR_FACTOR, cfg.SOLVER.WEIGHT_DECAY_BIAS) == (1, None)
    assert (min(cfg.INPUT.MIN_SIZE_TRAIN), max(cfg.INPUT.MIN_SIZE_TRAIN)) == (640, 800)
    assert (cfg.MODEL.RESNETS.NORM, cfg.MODEL.BACKBONE.FREEZE_AT) == ("SyncBN", 0)
    assert cfg.TEST.PRECISE_BN.ENABLED
    assert (kind == "mask") == cfg.MODEL.MASK_ON
    if body == "r50_c4":
        assert cfg.TRANSFER.RES5_NORM == "SyncBN"
        assert cfg.MODEL.RPN.POST_NMS_TOPK_TEST == 1000
    else:
        assert cfg.MODEL.FPN.NORM == "SyncBN"


def test_mocos_recipe_is_a_variant_of_its_own() -> None:
    cfg = read_config(config("faster_r50_syncbn"))
    assert cfg.DATASETS.TRAIN == ("voc_2007_trainval", "voc_2012_trainval")
    assert (cfg.SOLVER.MAX_ITER, cfg.SOLVER.IMS_PER_BATCH, cfg.SOLVER.BASE_LR) == (24000, 16, 0.02)
    assert (cfg.MODEL.RESNETS.NORM, cfg.TRANSFER.RES5_NORM) == ("SyncBN", "SyncBN")
    assert cfg.MODEL.BACKBONE.FREEZE_AT == 0


@pytest.mark.parametrize("name", ALL)
def test_every_config_has_a_demo_recipe_of_minutes(name: str) -> None:
    cfg = read_config(config(name), demo=True)
    assert cfg.SOLVER.MAX_ITER <= 1000
    assert (round(0.8 * cfg.SOLVER.MAX_ITER),) == cfg.SOLVER.STEPS
    assert cfg.SOLVER.IMS_PER_BATCH == 2
    data = "coco_2017_train" if name.startswith("coco/") else "voc_2007_trainval"
    assert (data,) == cfg.DATASETS.TRAIN
    assert arch_of(cfg) in name or arch_of(cfg).replace("resnet", "r") in name


def test_a_half_batch_halves_the_rate_and_doubles_the_steps() -> None:
    cfg = read_config(config("faster_r50_syncbn"), ("SOLVER.IMS_PER_BATCH", "8"))
    assert cfg.SOLVER.BASE_LR == 0.01
    assert cfg.SOLVER.STEPS == (36000, 44000)
    assert (cfg.SOLVER.MAX_ITER, cfg.SOLVER.WARMUP_ITERS) == (48000, 200)
    assert "48000 iterations of 8 images, lr 0.01 x0.1 at 36000, 44000" in describe(cfg)


def test_keys_that_are_given_are_not_scaled() -> None:
    opts = ("SOLVER.IMS_PER_BATCH", "4", "SOLVER.MAX_ITER", "30000", "SOLVER.BASE_LR", "0.5")
    cfg = read_config(config("faster_r50"), opts)
    assert (cfg.SOLVER.MAX_ITER, cfg.SOLVER.BASE_LR) == (30000, 0.5)
    assert cfg.SOLVER.STEPS == (25000,)  # half of 50,000; the next would be after the end


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_more_processes_than_images_scale_the_schedule_linearly(name: str, world_size: int) -> None:
    own, cfg = read_config(config(name)), read_config(config(name))
    note = adapt_to_processes(cfg, world_size)
    batch = max(own.SOLVER.IMS_PER_BATCH, world_size)
    assert batch == cfg.SOLVER.IMS_PER_BATCH
    factor = batch / own.SOLVER.IMS_PER_BATCH
    assert own.SOLVER.BASE_LR * factor == cfg.SOLVER.BASE_LR
    assert round(cfg.SOLVER.MAX_ITER * factor) == own.SOLVER.MAX_ITER  # as many images are seen
    assert [step * factor for step in cfg.SOLVER.STEPS] == list(own.SOLVER.STEPS)
    assert cfg.SOLVER.WARMUP_ITERS * factor == own.SOLVER.WARMUP_ITERS
    if factor == 1:
        assert (note, cfg.dump()) == ("", own.dump())
    if (name, world_size) == ("faster_r50", 8):
        assert note == "8 images an iteration, 37500 iterations, lr 0.004"


@pytest.mark.parametrize(
    ("opts", "world_size", "fix"),
    [
        (
            ("SOLVER.IMS_PER_BATCH", "6"),
            4,
            "give a multiple of 4, or start another number \\(1, 2, 3, 6\\)$",
        ),
        (
            ("SOLVER.IMS_PER_BATCH", "2"),
            8,
            "give a multiple of 8, or start another number \\(1, 2\\)$",
        ),
        ((), 3, None),
    ],
)
def test_batches_that_do_not_divide_are_refused(
    opts: tuple[str, ...], world_size: int, fix: str | None
) -> None:
    cfg = read_config(config("faster_r50"), opts)
    if fix is None:  # the recipe's own batch grows to any number of processes
        assert adapt_to_processes(cfg, world_size, opts).startswith("3 images an iteration")
        return
    with pytest.raises(UserError, match=fix):
        adapt_to_processes(cfg, world_size, opts)


def test_gloo_has_detectron2s_synchronised_norm() -> None:
    cfg = read_config(config("faster_r50_syncbn"))
    adapt_to_gloo(cfg)
    assert (cfg.MODEL.RESNETS.NORM, cfg.TRANSFER.RES5_NORM) == ("naiveSyncBN", "naiveSyncBN")


def test_scratch_trains_everything() -> None:
    cfg = read_config(config("faster_r50"))
    adapt_to_scratch(cfg)
    assert (cfg.MODEL.BACKBONE.FREEZE_AT, cfg.MODEL.RESNETS.NORM) == (0, "BN")
    opts = ("MODEL.BACKBONE.FREEZE_AT", "2")
    with pytest.raises(UserError, match="leave it out"):
        adapt_to_scratch(read_config(config("faster_r50"), opts), opts)


def test_the_sidecar_of_the_weights_wins() -> None:
    cfg = read_config(config("faster_r50"))
    adapt_to_weights(cfg, {"MODEL": {"PIXEL_MEAN": [1.0, 2.0, 3.0]}, "VERSION": 2})
    assert cfg.MODEL.PIXEL_MEAN == [1.0, 2.0, 3.0]
    opts = ("MODEL.RESNETS.STRIDE_IN_1X1", "True")
    told = {"MODEL": {"RESNETS": {"STRIDE_IN_1X1": False}}}
    with pytest.raises(UserError, match="STRIDE_IN_1X1 True: the weights need False: leave it out"):
        adapt_to_weights(read_config(config("faster_r50"), opts), told, opts)


@pytest.mark.parametrize(
    ("opts", "said"),
    [
        (("SOLVER.MAX_ITERS", "5"), "SOLVER.MAX_ITERS"),
        (("SOLVER.MAX_ITER", "many"), "SOLVER.MAX_ITER"),
        (("SOLVER.IMS_PER_BATCH", "0"), "at least 1"),
    ],
)
def test_wrong_keys_are_refused_in_one_line(opts: tuple[str, ...], said: str) -> None:
    with pytest.raises(UserError, match=said) as refusal:
        read_config(config("faster_r50"), opts)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("MODEL.WEIGHTS", "a.pkl", "use --weights"),
        ("MODEL.DEVICE", "cpu", "use --device"),
        ("OUTPUT_DIR", "here", "use --output"),
        ("SEED", "3", "use --seed"),
        ("MODEL.ROI_HEADS.NUM_CLASSES", "20", "the annotations name the classes"),
        ("TEST.AUG.ENABLED", "True", "seen once"),
        ("TEST.AUG.FLIP", "True", "seen once"),
        ("DATALOADER.ASPECT_RATIO_GROUPING", "True", "random order"),
        ("DATALOADER.SAMPLER_TRAIN", "RepeatFactorTrainingSampler", "random order"),
        ("MODEL.ROI_MASK_HEAD.NUM_CONV", "4", "MODEL.MASK_ON is False"),
        ("INPUT.MASK_FORMAT", "bitmask", "MODEL.MASK_ON is False"),
        ("MODEL.KEYPOINT_ON", "True", "boxes and masks"),
        ("MODEL.RETINANET.NUM_CLASSES", "3", "boxes and masks"),
        ("TRANSFER.TIMM", "convnext_tiny", "use --weights timm:NAME"),
        ("CUDNN_BENCHMARK", "True", "many sizes"),
        ("DATASETS.PROPOSAL_FILES_TEST", "('a.pkl',)", "are for Fast R-CNN"),
        ("MODEL.LOAD_PROPOSALS", "True", "goes with PrecomputedProposals"),
    ],
)
def test_keys_without_effect_are_refused_with_the_fix(key: str, value: str, fix: str) -> None:
    with pytest.raises(UserError, match=fix) as refusal:
        read_config(config("faster_r50"), (key, value))
    assert "\n" not in str(refusal.value)
    assert str(refusal.value).startswith(key[:20])


def test_a_file_cannot_set_what_has_no_effect_either(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(f"_BASE_: {config('faster_r50')}\nCUDNN_BENCHMARK: True\n")
    with pytest.raises(UserError, match="CUDNN_BENCHMARK True would have no effect"):
        read_config(tmp_path / "own.yaml")


def test_every_refused_key_is_one_of_detectron2s() -> None:
    for key in REFUSED:
        node = read_config(config("faster_r50"))
        for part in key.split("."):
            node = node[part]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SOLVER: {MAX_ITTER: 5}", "MAX_ITTER"),
        ("SOLVER: [1, 2", "not YAML"),
        ("SOLVER: 5", "wrong.yaml"),
        ("_BASE_: nowhere.yaml", "nowhere.yaml"),
        ("a: !!python/object/apply:os.system [echo]", "wrong.yaml"),
        ("just words", "wrong.yaml"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "wrong.yaml").write_text(text)
    with pytest.raises(UserError, match=said) as refusal:
        read_config(tmp_path / "wrong.yaml")
    assert "\n" not in str(refusal.value)

"""Configs: the paper's numbers, the scaling to other batches, refusals."""

from importlib.resources import files
from pathlib import Path

import pytest

from instdisc.errors import UserError
from transfer.detection.recipe import (
    adapt_to_scratch,
    adapt_to_weights,
    arch_of,
    describe,
    read_config,
)

CONFIGS = Path(str(files("detection_configs")))
ALL = sorted(path.stem for path in CONFIGS.glob("fast*.yaml"))


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
    assert cfg.DATASETS.TRAIN == ("voc_2007_trainval",)
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


def test_scratch_trains_everything() -> None:
    cfg = read_config(config("faster_r50"))
    adapt_to_scratch(cfg)
    assert (cfg.MODEL.BACKBONE.FREEZE_AT, cfg.MODEL.RESNETS.NORM) == (0, "BN")


def test_the_sidecar_of_the_weights_wins() -> None:
    cfg = read_config(config("faster_r50"))
    adapt_to_weights(cfg, {"MODEL": {"PIXEL_MEAN": [1.0, 2.0, 3.0]}, "VERSION": 2})
    assert cfg.MODEL.PIXEL_MEAN == [1.0, 2.0, 3.0]


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

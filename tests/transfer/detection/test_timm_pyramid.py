"""timm's networks in a detector: every tensor arrives, maps are the network's own, refusals."""

from pathlib import Path

import pytest
import torch
from detectron2.modeling import build_model

from instdisc.errors import UserError
from instdisc.networks.timm_backbones import build_timm
from instdisc.networks.weights import open_weights
from instdisc.runs.results import check_results
from transfer.detect import main
from transfer.detection.recipe import adapt_to_weights, arch_of, read_config
from transfer.detection.settings import find_config
from transfer.detection.timm_pyramid import LEVELS, TimmPyramid, find_levels
from transfer.detection.weights import load_backbone_weights, prepare

TINY = (
    *("SOLVER.MAX_ITER", "1", "INPUT.MIN_SIZE_TEST", "64", "INPUT.MIN_SIZE_TRAIN", "(64,)"),
    *("MODEL.RPN.POST_NMS_TOPK_TEST", "5", "MODEL.RPN.POST_NMS_TOPK_TRAIN", "20"),
    *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", "8", "DATALOADER.NUM_WORKERS", "0"),
    *("MODEL.ROI_BOX_HEAD.FC_DIM", "16", "MODEL.FPN.OUT_CHANNELS", "32"),
)


@pytest.mark.parametrize(
    ("name", "freeze_at"),
    [
        ("resnet18", 3),
        ("efficientnet_b0", 2),
        pytest.param("convnext_tiny", 0, marks=pytest.mark.slow),
    ],
)
def test_every_tensor_arrives_and_the_maps_are_the_networks_own(
    name: str, freeze_at: int, tmp_path: Path
) -> None:
    start = prepare("ours", f"random:timm:{name}:3", "resnet50", tmp_path, with_pyramid=True)
    keys = ("MODEL.BACKBONE.FREEZE_AT", str(freeze_at))
    cfg = read_config(find_config(Path("faster_r50_fpn")), keys, demo=True)
    cfg.MODEL.DEVICE = "cpu"
    adapt_to_weights(cfg, start.sidecar)
    assert arch_of(cfg) == start.arch == f"timm:{name}"
    model = build_model(cfg).eval()
    assert start.folder is not None
    network = open_weights(f"random:timm:{name}:3").backbone
    tensors = [n for n in network.trunk.state_dict() if not n.endswith("num_batches_tracked")]
    assert load_backbone_weights(model, start.folder) == len(tensors)
    images = torch.randn(1, 3, 64, 96)
    pyramid = model.backbone.bottom_up
    with torch.no_grad():
        maps, stages = pyramid(images), network.eval().stages(images)
    for stride, level in LEVELS.items():
        torch.testing.assert_close(maps[level], stages[pyramid.stages[level]])
        assert maps[level].shape[-2:] == (64 // stride, 96 // stride)
    # What is fixed: all that feeds res2 .. res{freeze_at}, and what feeds no map.
    model.train()
    total = sum(found.sum() for found in model.backbone(images).values())
    total.backward()
    for parameter in pyramid.parameters():
        assert (parameter.grad is not None) == parameter.requires_grad
    feeds = {level: fed(pyramid, level) for level in LEVELS.values()}
    for level, names in feeds.items():
        fixed = int(level.removeprefix("res")) <= freeze_at
        learnt = {n for n, p in pyramid.named_parameters() if p.requires_grad}
        assert not (names & learnt) if fixed else names & learnt


def fed(pyramid: TimmPyramid, level: str) -> set[str]:
    """Names of the parameters that a map depends on, found by changing none of them."""
    wanted = {name: p.requires_grad for name, p in pyramid.named_parameters()}
    pyramid.requires_grad_(True)
    pyramid.zero_grad(set_to_none=True)
    pyramid(torch.randn(1, 3, 64, 64))[level].sum().backward()
    names = {name for name, p in pyramid.named_parameters() if p.grad is not None}
    for name, parameter in pyramid.named_parameters():
        parameter.requires_grad_(wanted[name])
    return names


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("vit_tiny_patch16_224", "feature pyramid needs 4, 8, 16 and 32|images of any size"),
        ("swin_tiny_patch4_window7_224", "does not take images of any size"),
    ],
)
def test_networks_without_a_pyramid_are_refused(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as refusal:
        find_levels(build_timm(name))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--cfg", "faster_r50"), "needs a config with a feature pyramid"),
        (("--cfg", "faster_r50_fpn", "TRANSFER.TIMM", "x"), "use --weights timm:NAME"),
    ],
)
def test_configs_that_do_not_fit(
    argv: tuple[str, ...], said: str, scenes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ("--weights", "random:timm:resnet18", "--voc-root", str(scenes))
    assert main([*argv[:2], *named, *argv[2:]]) == 2
    message = capsys.readouterr().err.strip()
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "name",
    [
        "resnet18",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("convnext_tiny", "resnet50d", "efficientnet_b0")
        ),
    ],
)
def test_a_timm_network_detects(
    name: str, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--weights", f"random:timm:{name}", "--voc-root", str(scenes), "--pictures", "0")
    assert main([*flags, *TINY]) == 0
    trunk = build_timm(name).trunk.state_dict()
    count = sum(not key.endswith("num_batches_tracked") for key in trunk)
    assert f"{count} of {count} tensors of random:timm:{name}" in capsys.readouterr().out
    (row, *_), complaints = check_results(tmp_path / "runs" / "results.jsonl")
    assert not complaints
    assert (row.arch, row.protocol.split(",")[0]) == (f"timm:{name}", "faster_r50_fpn")
    folder = tmp_path / "runs" / "detect" / f"faster_r50_fpn-random-timm-{name}"
    assert (folder / "trial-0" / "model_final.pth").exists()

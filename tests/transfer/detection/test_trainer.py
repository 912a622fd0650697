"""The training loop: what is fixed stays, what was killed goes on, two processes agree."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from detectron2.utils import comm
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from instdisc.errors import UserError
from instdisc.training import dist
from instdisc.training.dist import Process
from transfer.detection.data import TrainingOrder, load_data
from transfer.detection.evaluation import detect as detect_all
from transfer.detection.recipe import adapt_to_weights, read_config
from transfer.detection.settings import find_config
from transfer.detection.trainer import DetectionTrainer
from transfer.detection.voc import VocSource
from transfer.detection.weights import load_backbone_weights, prepare

SMALL = (
    *("INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MIN_SIZE_TEST", "64"),
    *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", "8", "MODEL.RPN.POST_NMS_TOPK_TRAIN", "20"),
    *("MODEL.RPN.POST_NMS_TOPK_TEST", "5", "DATASETS.PRECOMPUTED_PROPOSAL_TOPK_TEST", "5"),
)


def build_trainer(
    name: str, arch: str, scenes: Path, backbone: Path, output: Path, *opts: str
) -> DetectionTrainer:
    cfg = read_config(find_config(Path(name)), (*SMALL, *opts), demo=True)
    cfg.OUTPUT_DIR, cfg.MODEL.DEVICE = str(output), "cpu"
    output.mkdir(parents=True, exist_ok=True)
    initial = prepare("ours", str(backbone), arch, output)
    data = load_data(cfg, VocSource(scenes, is_demo=True), make_missing=True)
    adapt_to_weights(cfg, initial.sidecar)
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = len(data.class_names)
    trainer = DetectionTrainer(cfg, data, 0, Process(0, 1, torch.device("cpu")))
    assert initial.folder is not None
    load_backbone_weights(trainer.detector, initial.folder)
    return trainer


def state(trainer: DetectionTrainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trainer.detector.state_dict().items()}


def test_faster_rcnn_fixes_stem_res2_res3_and_every_norm(
    scenes: Path, backbone_file: Callable[[str], Path], tmp_path: Path
) -> None:
    trainer = build_trainer(
        "faster_r18",
        "resnet18",
        scenes,
        backbone_file("resnet18"),
        tmp_path,
        "SOLVER.MAX_ITER",
        "1",
    )
    before = state(trainer)
    trainer.fit(0)
    after = state(trainer)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    fixed = ("backbone.stem.", "backbone.res2.", "backbone.res3.")
    assert not [name for name in changed if name.startswith(fixed) or ".norm." in name]
    for layer in ("backbone.res4.0.conv1.weight", "roi_heads.res5.0.conv1.weight"):
        assert layer in changed
    assert "roi_heads.box_predictor.cls_score.weight" in changed
    assert any(name.startswith("proposal_generator.") for name in changed)


def test_frozen_detection_trains_the_heads_alone(
    scenes: Path, backbone_file: Callable[[str], Path], tmp_path: Path
) -> None:
    """The keys of frozen/faster_r50, on a network that is quickly trained."""
    frozen = read_config(find_config(Path("frozen/faster_r50")))
    assert (frozen.MODEL.BACKBONE.FREEZE_AT, frozen.MODEL.RESNETS.NORM) == (4, "FrozenBN")
    trainer = build_trainer(
        *("faster_r18", "resnet18", scenes, backbone_file("resnet18"), tmp_path),
        *("SOLVER.MAX_ITER", "2", "MODEL.BACKBONE.FREEZE_AT", "4"),
    )
    before = state(trainer)
    trainer.fit(0)
    after = state(trainer)
    body = [name for name in before if name.startswith("backbone.")]
    assert len(body) > 70
    assert all(torch.equal(before[name], after[name]) for name in body)
    heads = [n for n in before if not n.startswith("backbone.") and n.endswith(".weight")]
    learnt = [n for n in heads if ".norm." not in n and "anchor" not in n]
    assert not [name for name in learnt if torch.equal(before[name], after[name])]
    assert any(name.startswith("roi_heads.res5.") for name in learnt)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["frozen/faster_r50", "frozen/fast_r50"])
def test_the_frozen_configs_fix_every_body_tensor(
    name: str, scenes: Path, backbone_file: Callable[[str], Path], tmp_path: Path
) -> None:
    trainer = build_trainer(
        *(name, "resnet50", scenes, backbone_file("resnet50"), tmp_path, "SOLVER.MAX_ITER", "1")
    )
    before = state(trainer)
    trainer.fit(0)
    after = state(trainer)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert not [key for key in changed if key.startswith("backbone.")]
    assert {"roi_heads.res5.0.conv1.weight", "roi_heads.box_predictor.cls_score.weight"} <= changed


@pytest.mark.slow
def test_fast_rcnn_fixes_conv1_alone(
    scenes: Path, backbone_file: Callable[[str], Path], tmp_path: Path
) -> None:
    trainer = build_trainer(
        "fast_alexnet",
        "alexnet",
        scenes,
        backbone_file("alexnet"),
        tmp_path,
        "SOLVER.MAX_ITER",
        "1",
    )
    before = state(trainer)
    trainer.fit(0)
    after = state(trainer)
    convolutions = [n for n in before if n.startswith("backbone.features.") and "weight" in n]
    same = [n for n in convolutions if torch.equal(before[n], after[n])]
    assert len(convolutions) == 5
    assert same == ["backbone.features.0.weight"]
    assert torch.equal(before["backbone.features.0.bias"], after["backbone.features.0.bias"])
    for head in ("fc1", "fc2"):
        name = f"roi_heads.box_head.{head}.weight"
        assert not torch.equal(before[name], after[name])


def test_a_nan_loss_ends_with_the_iteration_and_the_cure(
    scenes: Path, backbone_file: Callable[[str], Path], tmp_path: Path
) -> None:
    opts = ("SOLVER.MAX_ITER", "9", "SOLVER.BASE_LR", "1e12", "SOLVER.WARMUP_ITERS", "0")
    trainer = build_trainer(
        "faster_r18", "resnet18", scenes, backbone_file("resnet18"), tmp_path, *opts
    )
    with pytest.raises(UserError, match=r"NaN at iteration \d: lower SOLVER.BASE_LR"):
        trainer.fit(0)


@pytest.mark.slow
def test_an_evaluation_on_the_way_changes_nothing(
    scenes: Path,
    backbone_file: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    states = []
    for period in ("0", "1"):
        trainer = build_trainer(
            *("faster_r18", "resnet18", scenes, backbone_file("resnet18"), tmp_path / period),
            *("SOLVER.MAX_ITER", "2", "TEST.EVAL_PERIOD", period),
        )
        trainer.fit(0)
        states.append(state(trainer))
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    rows = [json.loads(line) for line in (tmp_path / "1" / "metrics.json").open()]
    measured = [row for row in rows if "ap50_11point" in row]
    assert [row["iteration"] for row in measured] == [0]  # at the end the command measures itself


AMP = """
import sys
from pathlib import Path
import torch
from instdisc.training.dist import Process
from transfer.detection.data import load_data
from transfer.detection.voc import VocSource
from transfer.detection.evaluation import detect
from transfer.detection.recipe import adapt_to_scratch, read_config
from transfer.detection.settings import find_config
from transfer.detection.trainer import DetectionTrainer

scenes, output, *opts = sys.argv[1:]
process = Process(0, 1, torch.device("cpu"))
for enabled in ("False", "True"):
    keys = [*opts, "SOLVER.AMP.ENABLED", enabled]
    cfg = read_config(find_config(Path("faster_r18")), keys, demo=True)
    adapt_to_scratch(cfg)
    cfg.OUTPUT_DIR, cfg.MODEL.DEVICE = output, "cpu"
    data = load_data(cfg, VocSource(Path(scenes), is_demo=True), make_missing=False)
    trainer = DetectionTrainer(cfg, data, 0, process)
    seen = []
    trainer.detector.backbone.res4.register_forward_hook(lambda *args: seen.append(args[2].dtype))
    trainer.fit(0)
    detect(trainer.detector, cfg, data, process)
    loss = trainer.storage.history("total_loss").latest()
    print(seen[0], seen[-1], trainer.detector.backbone.res4[0].conv1.weight.dtype, loss)
"""


@pytest.mark.slow
def test_amp_trains_in_bf16_and_evaluates_in_float32(scenes: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AMP, str(scenes), str(tmp_path), *SMALL, "SOLVER.MAX_ITER", "1"],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (*exact, loss), (*mixed, mixed_loss) = (line.split() for line in done.stdout.splitlines()[-2:])
    assert exact == ["torch.float32"] * 3
    assert mixed == ["torch.bfloat16", "torch.float32", "torch.float32"]
    assert mixed_loss != loss
    assert float(mixed_loss) == pytest.approx(float(loss), rel=0.05)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_order_is_a_function_of_the_iteration(world_size: int) -> None:
    def keys(start: int, end: int) -> list[tuple[int, int]]:
        batches = [
            list(TrainingOrder(5, 4, 7, start, end, rank, world_size)) for rank in range(world_size)
        ]
        return [key for step in zip(*batches, strict=True) for batch in step for key in batch]

    whole = keys(0, 10)
    assert [position for position, _ in whole] == list(range(40))
    assert keys(3, 10) == whole[12:]  # resumed
    assert whole == [k for b in TrainingOrder(5, 4, 7, 0, 10) for k in b]  # any world size
    for epoch in range(8):  # each pass has every image once, in another order
        assert {image for _, image in whole[5 * epoch : 5 * epoch + 5]} == set(range(5))
    assert [i for _, i in whole[:5]] != [i for _, i in whole[5:10]]


def detect(repo: Path, cfg: str, data: tuple[str, str], backbone: Path, *flags: str) -> list[str]:
    sizes = "[[32,64]]" if cfg == "faster_r18" else "[[16],[32],[64],[96],[96]]"
    return [
        *(sys.executable, str(repo / "transfer" / "detect.py"), "--cfg", cfg),
        *("--weights", str(backbone), *data, "--pictures", "1", *flags),
        *(*SMALL, "SOLVER.IMS_PER_BATCH", "2", "DATALOADER.NUM_WORKERS", "0"),
        *("MODEL.ANCHOR_GENERATOR.SIZES", sizes, "SOLVER.STEPS", "(6,)"),
        *("MODEL.ROI_BOX_HEAD.POOLER_RESOLUTION", "4", "SOLVER.CHECKPOINT_PERIOD", "2"),
        *("MODEL.ROI_BOX_HEAD.FC_DIM", "32"),
    ]


def final(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "trial-0" / "model_final.pth", weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("cfg", ["faster_r18", "coco/mask_r18_fpn"])
def test_a_killed_run_resumes_to_the_same_weights(
    cfg: str,
    repo: Path,
    scenes: Path,
    coco_scenes: Path,
    backbone_file: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    data = ("--voc-root", str(scenes)) if cfg == "faster_r18" else ("--coco-root", str(coco_scenes))

    def command(output: str) -> list[str]:
        length = ("SOLVER.MAX_ITER", "8", "--output", str(tmp_path / output), "--resume")
        return detect(repo, cfg, data, backbone_file("resnet18"), *length)

    subprocess.run(command("whole"), check=True, capture_output=True)
    killed = subprocess.Popen(command("killed"), stdout=subprocess.DEVNULL)
    folder = tmp_path / "killed" / "trial-0"
    while not list(folder.glob("model_000000*.pth")):
        assert killed.poll() is None, "it ended before it could be killed"
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    said = subprocess.run(command("killed"), check=True, capture_output=True, text=True).stdout
    assert "going on with iteration" in said
    whole, resumed = final(tmp_path / "whole"), final(tmp_path / "killed")
    assert resumed["iteration"] == whole["iteration"] == 7
    for name, tensor in whole["model"].items():
        assert torch.equal(tensor, resumed["model"][name]), name
    rates = [
        [row["lr"] for row in map(json.loads, (tmp_path / run / "trial-0/metrics.json").open())]
        for run in ("whole", "killed")
    ]
    assert rates[0][-1] == rates[1][-1]
    # A finished run is not trained again.
    said = subprocess.run(command("killed"), check=True, capture_output=True, text=True).stdout
    assert "seed 0 is finished" in said


def _train_rank(
    rank: int, port: int, folder: Path, scenes: Path, backbone: Path, norm: str
) -> None:
    """One of two processes: two iterations, then its weights to a file."""
    os.environ.update(
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    )
    torch.set_num_threads(1)
    process = dist.init_process("cpu")
    comm.create_local_process_group(2)
    opts = (*SMALL, "SOLVER.MAX_ITER", "2", "MODEL.RESNETS.NORM", norm)
    cfg = read_config(find_config(Path("faster_r18")), opts, demo=True)
    cfg.OUTPUT_DIR, cfg.MODEL.DEVICE = str(folder), "cpu"
    data = load_data(cfg, VocSource(scenes, is_demo=True), make_missing=False)
    cfg.MODEL.ROI_HEADS.NUM_CLASSES = len(data.class_names)
    trainer = DetectionTrainer(cfg, data, 0, process)
    initial = prepare("ours", str(backbone), "resnet18", folder / f"init{rank}")
    assert initial.folder is not None
    load_backbone_weights(trainer.detector, initial.folder)
    trainer.fit(0)
    found = detect_all(trainer.detector, cfg, data, process)
    images = {row.image_id for row in found}
    torch.save((state(trainer), sorted(images)), folder / f"rank{rank}.pt")
    dist.close()


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["FrozenBN", "BN"])
def test_two_processes_train_and_agree(
    scenes: Path, backbone_file: Callable[[str], Path], tmp_path: Path, norm: str
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backbone = backbone_file("resnet18")
    # Forked: a fresh interpreter could not import this file.
    arguments = (port, tmp_path, scenes, backbone, norm)
    start_processes(_train_rank, arguments, nprocs=2, start_method="fork")
    (first, images), (second, none) = (
        torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)  # norms included
    # Each has seen other images: alike they are only because gradients were averaged.
    assert len(list(TrainingOrder(6, 2, 0, 0, 2, 0, 2))) == 2
    assert (tmp_path / "model_final.pth").exists()
    assert len(images) > 1  # the first process has the detections of all, the other none
    assert none == []

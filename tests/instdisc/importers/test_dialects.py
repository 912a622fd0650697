"""Checkpoints of single methods in their true layout, against the network they were made from.

Each layout names the public code that writes it. ResNet-18 stands for ResNet-50 where the
dialect's names are the same for both; heads are as large as they need to be told apart.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instdisc.errors import UserError
from instdisc.importers.api import FORMATS, import_checkpoint
from instdisc.networks.backbones import Embedding, build_backbone, restore_backbone

State = dict[str, Tensor]
WIDTH = 512  # of ResNet-18's features


def randomise(model: nn.Module) -> nn.Module:
    """Batch norm statistics that matter, so that a lost one shows."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        if name.endswith(("running_mean", "running_var", "bias")):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
        elif name.endswith("num_batches_tracked"):
            tensor.fill_(12)
    return model.eval()


@pytest.fixture(scope="module")
def source() -> nn.Module:
    torch.manual_seed(0)
    return randomise(build_backbone("resnet18").trunk)


def put(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def linear(prefix: str, rows: int = 128, columns: int = WIDTH) -> State:
    return {f"{prefix}.weight": torch.randn(rows, columns), f"{prefix}.bias": torch.randn(rows)}


def mlp(prefix: str) -> State:
    return linear(f"{prefix}.0", WIDTH) | linear(f"{prefix}.2")


OPTIMIZER = {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
ARGS = argparse.Namespace(arch="resnet18", lr=0.03)


def ddp(state: State) -> State:
    return put("module.", state)


def moco(encoder: State) -> dict[str, Any]:
    queue = {"queue": torch.randn(128, 64), "queue_ptr": torch.zeros(1)}
    state = put("encoder_q.", encoder) | put("encoder_k.", encoder) | queue
    return {"epoch": 200, "arch": "resnet18", "state_dict": ddp(state), "optimizer": OPTIMIZER}


# name of the case -> (dialect, what the file holds)
LAYOUTS: dict[str, tuple[str, Callable[[State], Any]]] = {
    # pytorch/vision: torchvision/models/resnet.py
    "torchvision": ("torchvision", lambda s: s | linear("fc", 1000)),
    # facebookresearch/{dino,vicreg,barlowtwins}: hubconf.py, resnet50.pth without fc
    "published backbone": ("torchvision", lambda s: s),
    # pytorch/examples: imagenet/main.py
    "pytorch examples": (
        "torchvision",
        lambda s: {
            "epoch": 90,
            "arch": "resnet18",
            "state_dict": ddp(s | linear("fc", 1000)),
            "best_acc1": torch.tensor(70.0),
            "optimizer": OPTIMIZER,
        },
    ),
    # huggingface/pytorch-image-models: timm/utils/checkpoint_saver.py
    "timm training": (
        "timm",
        lambda s: {
            "epoch": 1,
            "arch": "resnet18",
            "state_dict": {name: tensor + 1 for name, tensor in s.items()},
            "state_dict_ema": s | linear("fc", 1000),
            "optimizer": OPTIMIZER,
            "version": 2,
            "args": ARGS,
        },
    ),
    # facebookresearch/moco: moco/builder.py, main_moco.py; mlp=False is v1
    "moco v1": ("moco", lambda s: moco(s | linear("fc"))),
    "moco v2": ("moco", lambda s: moco(s | mlp("fc"))),
    # facebookresearch/moco-v3: moco/builder.py (_build_mlp), main_moco.py
    "moco v3": (
        "moco-v3",
        lambda s: {
            "state_dict": ddp(
                put("base_encoder.", s | {"fc.0.weight": torch.randn(64, WIDTH)})
                | put("momentum_encoder.", s)
                | {"predictor.0.weight": torch.randn(64, 64)}
            ),
            "optimizer": OPTIMIZER,
            "scaler": {"scale": torch.tensor(1.0)},
            "args": ARGS,
        },
    ),
    # sthalles/SimCLR: models/resnet_simclr.py, simclr.py
    "simclr sthalles": (
        "simclr",
        lambda s: {
            "epoch": 100,
            "arch": "resnet18",
            "state_dict": put("backbone.", s | mlp("fc")),
            "optimizer": OPTIMIZER,
        },
    ),
    # Spijkervet/SimCLR: simclr/simclr.py, model.py
    "simclr spijkervet": (
        "simclr",
        lambda s: (
            put("encoder.", s)
            | {"projector.0.weight": torch.ones(4, WIDTH), "projector.2.weight": torch.ones(4, 4)}
        ),
    ),
    # facebookresearch/simsiam: simsiam/builder.py, main_simsiam.py
    "simsiam": (
        "simsiam",
        lambda s: {
            "epoch": 100,
            "arch": "resnet18",
            "state_dict": ddp(put("encoder.", s | mlp("fc") | linear("fc.6")) | mlp("predictor")),
            "optimizer": OPTIMIZER,
        },
    ),
    # HobbitLong/PyContrast: networks/build_backbone.py, learning/contrast_trainer.py
    "pycontrast mlp": (
        "pycontrast",
        lambda s: {
            "model": ddp(put("encoder.", s) | mlp("head")),
            "contrast": {"memory": torch.randn(32, 128)},
            "model_ema": put("encoder.", s),
            "optimizer": OPTIMIZER,
            "epoch": 200,
        },
    ),
    "pycontrast linear": (
        "pycontrast",
        lambda s: {"model": ddp(put("encoder.", s) | linear("head.0")), "epoch": 1},
    ),
    # HobbitLong/CMC: train_moco_ins.py, models/resnet.py (InsResNet50)
    "cmc instance discrimination": (
        "pycontrast",
        lambda s: {
            "opt": ARGS,
            "model": put("encoder.module.", s | linear("fc")),
            "contrast": {"params": torch.ones(5), "memory": torch.randn(32, 128)},
            "optimizer": OPTIMIZER,
            "epoch": 240,
        },
    ),
    # facebookresearch/swav: hubconf.py (published) and main_swav.py (training)
    "swav published": (
        "swav",
        lambda s: ddp(
            s
            | linear("projection_head.0", 64)
            | linear("projection_head.3", 128, 64)
            | {"prototypes.weight": torch.randn(30, 128)}
        ),
    ),
    "swav training": (
        "swav",
        lambda s: {
            "epoch": 1,
            "state_dict": ddp(s | {"prototypes.prototypes0.weight": torch.randn(30, 128)}),
            "optimizer": OPTIMIZER,
            "amp": {"loss_scaler0": {"loss_scale": 1.0}},
        },
    ),
    # facebookresearch/dino: main_dino.py, utils.py (MultiCropWrapper, DINOHead)
    "dino": (
        "dino",
        lambda s: {
            "student": ddp(put("backbone.", {n: t + 1 for n, t in s.items()})),
            "teacher": ddp(put("backbone.", s) | mlp("head.mlp")),
            "optimizer": OPTIMIZER,
            "epoch": 3,
            "args": ARGS,
            "dino_loss": {"center": torch.zeros(1, 64)},
        },
    ),
    # facebookresearch/vicreg: main_vicreg.py
    "vicreg": (
        "vicreg",
        lambda s: {
            "epoch": 1,
            "model": ddp(put("backbone.", s) | linear("projector.0", 64)),
            "optimizer": OPTIMIZER,
        },
    ),
    # facebookresearch/barlowtwins: main.py
    "barlow twins": (
        "barlow-twins",
        lambda s: {
            "epoch": 1,
            "model": ddp(
                put("backbone.", s)
                | {"projector.0.weight": torch.ones(64, WIDTH), "bn.running_mean": torch.ones(64)}
            ),
            "optimizer": OPTIMIZER,
        },
    ),
}
# Heads that are our projection: linear, followed by L2 normalisation.
PROJECTIONS = {
    "moco v1": "encoder_q.fc",
    "pycontrast linear": "head.0",
    "cmc instance discrimination": "encoder.module.fc",
}
# Layouts of whole suites are in test_dialect_suites.py.
SUITES = {"lemniscate", "supcontrast", "vissl", "mmselfsup", "solo-learn", "lightly", "detectron2"}
REFUSED = {"cmc", "caffe2"}
ONLY_WHEN_ASKED = {"simclr-converter"}


@pytest.mark.parametrize("case", LAYOUTS)
def test_layout(case: str, source: nn.Module, tmp_path: Path) -> None:
    dialect, lay_out = LAYOUTS[case]
    content = lay_out(dict(source.state_dict()))
    torch.save(content, tmp_path / "peer.pth.tar")
    report = import_checkpoint(tmp_path / "peer.pth.tar")
    assert report.format == dialect
    assert report.payload["trunk"].keys() == source.state_dict().keys()
    for name, tensor in source.state_dict().items():
        assert torch.equal(report.payload["trunk"][name], tensor), name
    head = report.payload["projection"]
    if case in PROJECTIONS:
        whole = next(v for k, v in content.items() if k in ("state_dict", "model"))
        stored = next(v for k, v in whole.items() if k.endswith(f"{PROJECTIONS[case]}.weight"))
        assert torch.equal(head["weight"], stored)
    else:
        assert head is None


def test_outputs_are_the_same(source: nn.Module, tmp_path: Path) -> None:
    content = LAYOUTS["moco v1"][1](dict(source.state_dict()))
    torch.save(content, tmp_path / "moco.pth.tar")
    model = restore_backbone(import_checkpoint(tmp_path / "moco.pth.tar").payload).eval()
    assert isinstance(model, Embedding)
    images = torch.randn(2, 3, 64, 64)
    head = {k.rpartition(".")[2]: v for k, v in content["state_dict"].items() if "q.fc." in k}
    with torch.no_grad():
        assert torch.equal(model.backbone(images), source(images))
        projected = nn.functional.linear(source(images), head["weight"], head["bias"])
        assert torch.equal(model(images), nn.functional.normalize(projected, dim=1))


def test_every_dialect_has_a_layout() -> None:
    here = {dialect for dialect, _ in LAYOUTS.values()}
    assert here | SUITES | REFUSED | ONLY_WHEN_ASKED == set(FORMATS)


# tonylins/simclr-converter: convert.py saves {"state_dict": ...} alone; eval.py: no normalisation
def test_google_simclr_is_never_guessed(source: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "resnet50-1x.pth"
    torch.save({"state_dict": dict(source.state_dict()) | linear("fc", 1000)}, path)
    with pytest.raises(UserError, match=r"tells the format.* torchvision, .*simclr-converter"):
        import_checkpoint(path)
    plain = import_checkpoint(path, format="torchvision").payload
    google = import_checkpoint(path, format="simclr-converter").payload
    assert plain["input"]["std"] == [0.229, 0.224, 0.225]
    assert (google["input"]["mean"], google["input"]["std"]) == ([0.0] * 3, [1.0] * 3)
    assert torch.equal(google["trunk"]["conv1.weight"], source.state_dict()["conv1.weight"])


# HobbitLong/CMC: models/resnet.py; HobbitLong/PyContrast: CMCSingleHead in build_backbone.py
@pytest.mark.parametrize("names", [("l_to_ab.", "ab_to_l."), ("encoder1.", "encoder2.")])
def test_split_channels_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    halves = {f"module.{name}conv1.weight": torch.randn(32, 1, 7, 7) for name in names}
    torch.save({"opt": ARGS, "model": halves, "epoch": 1}, tmp_path / "cmc.pth")
    with pytest.raises(UserError, match=r"cmc.* cannot be imported: .* Lab .*RGB"):
        import_checkpoint(tmp_path / "cmc.pth")

"""Peers' checkpoints in their true layout, against the network they were made from.

Each layout names the public code that writes it. ResNet-18 stands for ResNet-50 where the
dialect's names are the same for both; heads are as large as they need to be told apart.
"""

import argparse
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import omegaconf
import pytest
import torch
from torch import Tensor, nn

from instdisc.errors import UserError
from instdisc.importers.api import ImportReport, import_checkpoint
from instdisc.importers.dialect_table import FORMATS
from instdisc.importers.inputs import Overrides
from instdisc.networks.backbones import Embedding, build_backbone, restore_backbone

State = dict[str, Tensor]
WIDTH = 512  # of ResNet-18's features


def build(stem: Any = "imagenet") -> nn.Module:
    """A network whose batch norm statistics matter, so that a lost one shows."""
    generator = torch.Generator().manual_seed(1)
    model = build_backbone("resnet18", stem=stem).trunk
    for name, tensor in model.state_dict().items():
        if name.endswith(("running_mean", "running_var", "bias")):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
        elif name.endswith("num_batches_tracked"):
            tensor.fill_(12)
    return model.eval()


@pytest.fixture(scope="module")
def source() -> nn.Module:
    return build()


@pytest.fixture(scope="module")
def small() -> nn.Module:
    return build("small")


def put(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def linear(prefix: str, rows: int = 128, columns: int = WIDTH) -> State:
    return {f"{prefix}.weight": torch.randn(rows, columns), f"{prefix}.bias": torch.randn(rows)}


def mlp(prefix: str) -> State:
    return linear(f"{prefix}.0", WIDTH) | linear(f"{prefix}.2")


OPTIMIZER = {"state": {0: {"momentum_buffer": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
ARGS = argparse.Namespace(arch="resnet18", lr=0.03)


def same_trunk(report: ImportReport, source: nn.Module, *, counters: bool = True) -> bool:
    """Compares the weights bit for bit."""
    expected = source.state_dict()
    assert report.payload["trunk"].keys() == expected.keys()
    return all(
        torch.equal(tensor, expected[name])
        for name, tensor in report.payload["trunk"].items()
        if counters or not name.endswith("num_batches_tracked")
    )


def numbered(state: State) -> State:
    """Names in nn.Sequential(*list(resnet.children())[:-1])."""
    order = {"conv1": 0, "bn1": 1, "layer1": 4, "layer2": 5, "layer3": 6, "layer4": 7}
    parts = (name.partition(".") for name in state)
    names = [f"{order[first]}.{rest}" for first, _, rest in parts]
    return dict(zip(names, state.values(), strict=True))


def lightning(state: State, **hyper_parameters: Any) -> dict[str, Any]:
    """What a lightning checkpoint has around the state dict."""
    return {
        "epoch": 9,
        "global_step": 100,
        "pytorch-lightning_version": "2.1.2",
        "state_dict": state,
        "loops": {},
        "callbacks": {},
        "optimizer_states": [OPTIMIZER],
        "lr_schedulers": [],
        "hyper_parameters": hyper_parameters,
    }


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
        "torchvision",
        lambda s: {
            "epoch": 100,
            "arch": "resnet18",
            "state_dict": put("backbone.", s | mlp("fc")),
            "optimizer": OPTIMIZER,
        },
    ),
    # Spijkervet/SimCLR: simclr/simclr.py, model.py
    "simclr spijkervet": (
        "torchvision",
        lambda s: (
            put("encoder.", s)
            | {"projector.0.weight": torch.ones(4, WIDTH), "projector.2.weight": torch.ones(4, 4)}
        ),
    ),
    # facebookresearch/simsiam: simsiam/builder.py, main_simsiam.py
    "simsiam": (
        "torchvision",
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
        "torchvision",
        lambda s: ddp(
            s
            | linear("projection_head.0", 64)
            | linear("projection_head.3", 128, 64)
            | {"prototypes.weight": torch.randn(30, 128)}
        ),
    ),
    "swav training": (
        "torchvision",
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
        "torchvision",
        lambda s: {
            "epoch": 1,
            "model": ddp(put("backbone.", s) | linear("projector.0", 64)),
            "optimizer": OPTIMIZER,
        },
    ),
    # facebookresearch/barlowtwins: main.py
    "barlow twins": (
        "torchvision",
        lambda s: {
            "epoch": 1,
            "model": ddp(
                put("backbone.", s)
                | {"projector.0.weight": torch.ones(64, WIDTH), "bn.running_mean": torch.ones(64)}
            ),
            "optimizer": OPTIMIZER,
        },
    ),
    # facebookresearch/vissl: vissl/models/trunks/resnext.py,
    # extra_scripts/convert_vissl_to_torchvision.py
    "vissl": (
        "torchvision",
        lambda s: {
            "phase_idx": 1,
            "classy_state_dict": {
                "base_model": {
                    "model": {"trunk": put("_feature_blocks.", s), "heads": linear("0.clf.0")},
                    "meta": {},
                },
                "optimizer": OPTIMIZER,
                "loss": {"memory": torch.ones(4)},
            },
        },
    ),
    # open-mmlab/mmselfsup: mmselfsup/models/algorithms/npid.py, necks/linear_neck.py
    "npid": (
        "mmselfsup",
        lambda s: {
            "meta": {"epoch": 200, "config": "model = dict(type='NPID')"},
            "state_dict": put("backbone.", s)
            | linear("neck.fc")
            | {"memory_bank.feature_bank": torch.randn(32, 128)},
            "optimizer": OPTIMIZER,
        },
    ),
    # open-mmlab/mmselfsup: openselfsup/models/moco.py (backbone is encoder_q[0])
    "openselfsup moco": (
        "mmselfsup",
        lambda s: {
            "meta": {},
            "state_dict": put("encoder_q.0.", s)
            | linear("encoder_q.1.mlp.0")
            | put("encoder_k.0.", s)
            | put("backbone.", s)
            | {"queue": torch.randn(128, 8), "queue_ptr": torch.zeros(1)},
        },
    ),
    # open-mmlab/mmselfsup: tools/model_converters/extract_backbone_weights.py
    "mmselfsup extracted": ("mmselfsup", lambda s: {"state_dict": s, "author": "MMSelfSup"}),
    # vturrisi/solo-learn: solo/methods/{base,mocov2plus}.py
    "solo-learn": (
        "solo-learn",
        lambda s: lightning(
            put("backbone.", s)
            | put("momentum_backbone.", s)
            | linear("classifier")
            | linear("projector.0")
            | linear("momentum_projector.0")
            | {"queue": torch.randn(2, 128, 8), "queue_ptr": torch.zeros(1)},
            cfg=omegaconf.OmegaConf.create({"method": "mocov2plus"}),
        ),
    ),
    # vturrisi/solo-learn: main_linear.py still reads `encoder.`
    "solo-learn old": (
        "solo-learn",
        lambda s: lightning(put("encoder.", s) | linear("classifier") | linear("projector.0")),
    ),
    # lightly-ai/lightly: examples/pytorch_lightning/moco.py
    "lightly": (
        "lightly",
        lambda s: lightning(
            put("backbone.", numbered(s))
            | put("backbone_momentum.", numbered(s))
            | linear("projection_head.layers.0")
            | linear("projection_head_momentum.layers.0")
            | {"criterion.memory_bank.bank": torch.randn(128, 8)}
        ),
    ),
    # lightly-ai/lightly: examples/pytorch/simclr.py, its state dict saved
    "lightly plain": (
        "lightly",
        lambda s: put("backbone.", numbered(s)) | linear("projection_head.layers.0"),
    ),
}
# Heads that are our projection: linear, followed by L2 normalisation.
PROJECTIONS = {
    "moco v1": "encoder_q.fc",
    "pycontrast linear": "head.0",
    "cmc instance discrimination": "encoder.module.fc",
    "npid": "neck.fc",
}
# Where the trunk of a file lies that is no dialect of its own.
PREFIXES = {
    "torchvision": "",
    "published backbone": "",
    "pytorch examples": "state_dict.module.",
    "simclr sthalles": "state_dict.backbone.",
    "simclr spijkervet": "encoder.",
    "simsiam": "state_dict.module.encoder.",
    "swav published": "module.",
    "swav training": "state_dict.module.",
    "vicreg": "model.module.backbone.",
    "barlow twins": "model.module.backbone.",
    "vissl": "classy_state_dict.base_model.model.trunk._feature_blocks.",
}
WITH_OWN_TEST = {"lemniscate", "supcontrast", "detectron2"}
REFUSED = {"cmc", "caffe2"}
ONLY_WHEN_ASKED = {"simclr-converter"}


@pytest.mark.parametrize("case", LAYOUTS)
def test_layout(case: str, source: nn.Module, tmp_path: Path) -> None:
    dialect, lay_out = LAYOUTS[case]
    content = lay_out(dict(source.state_dict()))
    torch.save(content, tmp_path / "peer.pth.tar")
    report = import_checkpoint(tmp_path / "peer.pth.tar")
    assert report.format == dialect
    assert (case in PREFIXES) == (dialect == "torchvision")
    assert report.prefix == PREFIXES.get(case, report.prefix)
    assert same_trunk(report, source)
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
    assert here | WITH_OWN_TEST | REFUSED | ONLY_WHEN_ASKED == set(FORMATS)


# tonylins/simclr-converter: convert.py saves {"state_dict": ...} alone; eval.py: no normalisation
def test_google_simclr_is_never_guessed(source: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "resnet50-1x.pth"
    torch.save({"state_dict": dict(source.state_dict()) | linear("fc", 1000)}, path)
    with pytest.raises(UserError, match="fits torchvision and simclr-converter: say which"):
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


class NCEAverage(nn.Module):
    """Stands for lib.NCEAverage.NCEAverage, whose pickle the authors' checkpoints hold."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.randn(16, 128))


def save_as_theirs(content: Any, path: Path, *classes: type) -> None:
    """Saves in the format of torch before 1.6, with classes that only their code has."""
    theirs = types.ModuleType("lemniscate_lib")
    for each in classes:
        setattr(theirs, each.__name__, each)
        each.__module__ = theirs.__name__
    sys.modules[theirs.__name__] = theirs
    try:
        torch.save(content, path, _use_new_zipfile_serialization=False)
    finally:
        del sys.modules[theirs.__name__]


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source")
# zhirongw/lemniscate.pytorch: main.py, models/resnet.py; torch 0.3 had no batch counters
def test_lemniscate_imagenet(source: nn.Module, tmp_path: Path) -> None:
    state = {k: v for k, v in source.state_dict().items() if "num_batches" not in k}
    head = linear("fc")
    content = {
        "epoch": 200,
        "arch": "resnet18",
        "state_dict": put("module.", state | head),
        "lemniscate": NCEAverage(),
        "best_prec1": 0.41,
        "optimizer": OPTIMIZER,
    }
    save_as_theirs(content, tmp_path / "lemniscate_resnet18.pth.tar", NCEAverage)
    report = import_checkpoint(tmp_path / "lemniscate_resnet18.pth.tar")
    assert report.format == "lemniscate"
    assert same_trunk(report, source, counters=False)
    assert torch.equal(report.payload["projection"]["weight"], head["fc.weight"])
    assert not report.payload["trunk"]["bn1.num_batches_tracked"]
    assert any("lemniscate_lib.NCEAverage" in note for note in report.notes)
    assert "lemniscate" in report.dropped


class ResNet(nn.Module):
    """Stands for models.resnet_cifar.ResNet: `shortcut` and `linear`, pickled as a whole."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        for name, child in trunk.named_children():
            if name not in ("fc", "maxpool"):
                setattr(self, name, child)
        self.linear = nn.Linear(WIDTH, 128)
        for block in [module for module in self.modules() if hasattr(module, "downsample")]:
            block.shortcut = block.downsample or nn.Sequential()
            del block.downsample


@pytest.mark.filterwarnings("ignore:Couldn't retrieve source")
# zhirongw/lemniscate.pytorch: cifar.py, models/resnet_cifar.py
def test_lemniscate_cifar(small: nn.Module, tmp_path: Path) -> None:
    net = ResNet(build("small"))
    net.load_state_dict(
        {k.replace("downsample", "shortcut"): v for k, v in small.state_dict().items()},
        strict=False,
    )
    content = {"net": net, "lemniscate": NCEAverage(), "acc": 0.8, "epoch": 199}
    save_as_theirs(content, tmp_path / "ckpt.t7", NCEAverage, ResNet)
    report = import_checkpoint(tmp_path / "ckpt.t7")
    assert report.payload["stem"] == "small"
    assert report.payload["input"]["size"] == 32
    assert same_trunk(report, small)
    assert torch.equal(report.payload["projection"]["weight"], net.linear.weight)
    with torch.no_grad():
        images = torch.randn(2, 3, 32, 32)
        model = restore_backbone(report.payload).eval()
        assert isinstance(model, Embedding)
        assert torch.equal(model.backbone(images), small(images))


# HobbitLong/SupContrast: networks/resnet_big.py, main_supcon.py (DataParallel), util.py
def test_supcontrast(small: nn.Module, tmp_path: Path) -> None:
    state = {k.replace("downsample", "shortcut"): v for k, v in small.state_dict().items()}
    for prefix, head in (("encoder.", "head"), ("encoder.module.", "head.0")):
        content = {"opt": None, "model": put(prefix, state) | linear(head), "epoch": 1}
        torch.save(content, tmp_path / "last.pth")
        report = import_checkpoint(tmp_path / "last.pth")
        assert report.format == "supcontrast"
        assert report.payload["input"]["mean"] == [0.4914, 0.4822, 0.4465]
        assert same_trunk(report, small)
        assert (report.payload["projection"] is not None) == (head == "head")


# vturrisi/solo-learn: solo/methods/base.py pads its CIFAR stem by 2, ours by 1
def test_a_stem_that_may_be_another_is_refused(small: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "cifar.ckpt"
    torch.save(lightning(put("backbone.", dict(small.state_dict())) | linear("classifier")), path)
    with pytest.raises(UserError, match="3x3 stem, and solo-learn files do not say"):
        import_checkpoint(path)
    report = import_checkpoint(path, overrides=Overrides(stem="small", image_size=40))
    assert same_trunk(report, small)
    assert report.payload["input"]["size"] == 40

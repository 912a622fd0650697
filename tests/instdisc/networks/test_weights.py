"""Every name that --weights takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import instdisc
from instdisc.errors import UserError
from instdisc.images.transforms import InputSpec
from instdisc.networks.backbones import Embedding, backbone_payload, build_backbone
from instdisc.networks.weights import open_weights
from instdisc.runs.checkpoint import save_checkpoint, weights_hash
from instdisc.training.seed import seeded
from pretrain.config import PretrainConfig
from pretrain.trainer import pretrain


def save(path: Path, seed: int, *, projection: bool = True) -> Embedding:
    torch.manual_seed(seed)
    model = Embedding(build_backbone("resnet18"), 16)
    payload = {
        **backbone_payload(model if projection else model.backbone),
        "input": InputSpec(size=64).to_dict(),
        "pretraining": {"config": {"data": "demo"}},
    }
    save_checkpoint(path, "backbone", payload)
    return model


def test_files_folders_and_the_newest_run(tmp_path: Path) -> None:
    for age, name in ((10, "old"), (5, "new")):
        file = tmp_path / "runs" / "pretrain" / name / "backbone.pt"
        save(file, age)
        os.utime(file, (1e9 - age, 1e9 - age))
    newest = open_weights(None)
    assert newest.name == "new"
    assert newest.hash == open_weights(tmp_path / "runs" / "pretrain" / "new").hash
    other = open_weights(tmp_path / "runs" / "pretrain" / "old" / "backbone.pt")
    assert other.hash != newest.hash
    assert newest.spec.size == 64
    assert newest.data == "demo"
    assert newest.embedding is not None
    assert not newest.backbone.training


def test_a_backbone_without_projection_has_no_embedding(tmp_path: Path) -> None:
    save(tmp_path / "x.pt", 0, projection=False)
    weights = open_weights(str(tmp_path / "x.pt"))
    assert weights.embedding is None
    assert weights.name == "x"


def test_random_weights_are_seeded() -> None:
    one, same, other = (
        open_weights(n).hash for n in ("random:resnet18", "random:resnet18:0", "random:resnet18:1")
    )
    assert one == same != other


def test_untrained_is_what_a_run_started_from(image_tree: Path, tmp_path: Path) -> None:
    config = PretrainConfig(
        arch="resnet18", data=str(image_tree), output=tmp_path / "run", image_size=16, epochs=1,
        batch_size=8, embedding_dim=16, seed=3, workers=0, objective="softmax", device="cpu",
        monitor_every=0, tensorboard=False,
    )  # fmt: skip
    with seeded(3, "init"):
        start = Embedding(build_backbone("resnet18"), 16)
    pretrain(config)
    trained, untrained = open_weights(tmp_path / "run"), open_weights(f"untrained:{tmp_path}/run")
    assert untrained.name == "untrained:run"
    assert untrained.hash == weights_hash(start.state_dict()) != trained.hash
    assert untrained.spec == trained.spec
    assert untrained.data == trained.data == str(image_tree)
    assert not untrained.backbone.training


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", "no such run"),
        ("random:resnet51", "unknown arch"),
        ("random:resnet18:x", "random:ARCH:SEED"),
        ("untrained:nowhere", "no such run"),
        ("untrained:imported.pt", "not pretrained by this suite"),
    ],
)
def test_names_that_mean_nothing(
    name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(Path("imported.pt"), 0)
    with pytest.raises(UserError, match=words):
        open_weights(name)


def test_importing_the_package_imports_no_torch() -> None:
    script = "import instdisc, sys; assert 'torch' not in sys.modules; instdisc.load_backbone"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert callable(instdisc.load_backbone)
    with pytest.raises(AttributeError):
        _ = instdisc.no_such_name

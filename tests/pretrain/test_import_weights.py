"""The command: where it writes, what it prints, how it fails."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from instdisc.importers.dialect_table import FORMATS
from instdisc.networks.backbones import build_backbone
from instdisc.networks.weights import load_backbone
from pretrain.import_weights import main


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peer") / "moco_v2_800ep.pth.tar"
    trunk = build_backbone("resnet18").trunk.state_dict()
    query = {f"module.encoder_q.{name}": tensor for name, tensor in trunk.items()}
    torch.save({"state_dict": query | {"module.queue": torch.ones(2, 2)}}, path)
    return path


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INSTDISC_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_default_output(peer: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(peer)]) == 0
    output = runs / "pretrain" / "moco_v2_800ep" / "backbone.pt"
    assert load_backbone(output).arch == "resnet18"
    printed = capsys.readouterr().out
    assert "format: moco (found by content)\n" in printed
    assert "used: 120 tensors; dropped: queue\n" in printed
    assert f"backbone: {output}\n" in printed


def test_an_existing_backbone_is_kept(
    peer: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = runs / "pretrain" / "mine" / "backbone.pt"
    target.parent.mkdir(parents=True)
    target.write_text("precious")
    assert main([str(peer), "--name", "mine"]) == 2
    assert (
        "exists: choose another --name, or replace it with --overwrite" in capsys.readouterr().err
    )
    assert target.read_text() == "precious"
    assert main(["--overwrite", str(peer), "--name", "mine"]) == 0
    assert load_backbone(target).arch == "resnet18"


def test_a_training_run_is_not_mixed_with(
    peer: Path, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs / "pretrain" / "resnet50"
    run.mkdir(parents=True)
    (run / "last.pt").write_text("training")
    assert main(["--name", "resnet50", "--overwrite", str(peer)]) == 2
    assert "is a training run: choose another folder with --name" in capsys.readouterr().err
    assert files(run) == ["last.pt"]


def test_output_may_be_named(peer: Path, tmp_path: Path) -> None:
    assert main(["--output", str(tmp_path / "deep" / "net.pt"), "--file", str(peer)]) == 0
    assert load_backbone(tmp_path / "deep" / "net.pt").arch == "resnet18"
    assert (
        main([str(peer), "--format", "moco", "--output", str(tmp_path), "--mean", "0", "0", "0"])
        == 0
    )
    assert load_backbone(tmp_path).arch == "resnet18"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no checkpoint named"),
        (["absent.pth"], "absent.pth: no such file"),
        (["{peer}", "{peer}"], "unrecognized arguments"),
        (["{peer}", "--format", "mocov2"], "mocov2: choose auto or one of torchvision, "),
        (["{peer}", "--format", "dino"], "is not in the dino format"),
        (["{peer}", "--mean", "1"], "--mean must be three numbers"),
        (["{peer}", "--name", "a/b"], "--name is a folder's name"),
        (["{peer}", "--name", "a", "--output", "b"], "--name is a folder's name"),
        (["{broken}"], "cannot be read"),
        (["{peer}", "--output", "{broken}/x/backbone.pt"], "is no folder"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    arguments: list[str],
    message: str,
    peer: Path,
    runs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broken = tmp_path / "broken.pth"
    broken.write_bytes(peer.read_bytes()[:5000])
    try:
        code: object = main([a.format(peer=peer, broken=broken) for a in arguments])
    except SystemExit as end:  # argparse ends by itself
        code = end.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.startswith("import_weights: error: ")
    assert error.count("\n") == 1
    assert files(tmp_path) == ["broken.pth"]


def test_help_names_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    assert ", ".join(FORMATS) in " ".join(capsys.readouterr().out.split())


def test_help_does_without_torch(repo: Path) -> None:
    script = (
        "import sys, pretrain.import_weights as command\n"
        "try:\n    command.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=repo)
    assert done.returncode == 0, done.stderr
    assert "FILE may be given without --file" in done.stdout

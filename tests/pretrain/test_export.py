"""The command: flags, defaults, exit codes, one-line errors."""

import os
import subprocess
import sys

import pytest
import torch

from instdisc.images.transforms import InputSpec
from instdisc.networks.backbones import backbone_payload, build_backbone
from instdisc.runs.checkpoint import save_checkpoint
from pretrain.export import main


@pytest.fixture(scope="module")
def content():
    torch.manual_seed(0)
    backbone = build_backbone("resnet18")
    return {**backbone_payload(backbone), "input": InputSpec().to_dict(), "pretraining": {}}


@pytest.fixture
def run(content, tmp_path, monkeypatch):
    """A finished pretraining run, the newest of two."""
    monkeypatch.setenv("INSTDISC_RUNS", str(tmp_path))
    for age, name in enumerate(("newest", "older")):
        path = tmp_path / "pretrain" / name / "backbone.pt"
        save_checkpoint(path, "backbone", content)
        os.utime(path, (1e9 - age, 1e9 - age))
    return tmp_path / "pretrain" / "newest"


def refused(capsys, *argv):
    assert main([str(word) for word in argv]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("pretrain/export.py: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_the_newest_run_is_exported_for_all_libraries(run, capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "timm: 120 of 120 tensors, largest difference" in out
    assert "detectron2: 100 of 100 tensors, largest difference" in out
    assert "torchvision: 120 of 120 tensors, largest difference" in out
    assert str(run / "export") in out
    assert sorted(path.name for path in (run / "export").iterdir()) == [
        "detectron2.pkl",
        "detectron2.yaml",
        "report.json",
        "timm",
        "torchvision.pth",
    ]


def test_weights_output_and_targets_can_be_chosen(run, tmp_path, capsys):
    argv = ["--weights", str(run.parent / "older"), "--output", str(tmp_path / "mine")]
    assert main([*argv, "--to", "torchvision", "torchvision"]) == 0
    found = sorted(path.name for path in (tmp_path / "mine").iterdir())
    assert found == ["report.json", "torchvision.pth"]
    assert "--overwrite" in refused(capsys, *argv, "--to", "torchvision")
    assert main([*argv, "--to", "torchvision", "--overwrite"]) == 0


def test_mistakes_end_with_one_line(run, tmp_path, capsys, monkeypatch):
    assert "no library" in refused(capsys, "--to")
    assert "no such file" in refused(capsys, "--weights", tmp_path / "none.pt")
    assert "no such file" in refused(capsys, "--weights", tmp_path)
    truncated = tmp_path / "truncated.pt"
    truncated.write_bytes((run / "backbone.pt").read_bytes()[:5000])
    assert "truncated" in refused(capsys, "--weights", truncated)
    assert not (tmp_path / "export").exists()
    monkeypatch.setenv("INSTDISC_RUNS", str(tmp_path / "empty"))
    assert "pretrain/run.py" in refused(capsys)
    with pytest.raises(SystemExit) as caught:
        main(["--to", "caffe"])
    assert caught.value.code == 2


def test_timm_needs_no_detectron2(run, capsys, monkeypatch):
    monkeypatch.delitem(sys.modules, "instdisc.export.detectron2_check", raising=False)
    monkeypatch.setitem(sys.modules, "detectron2", None)
    assert "package detectron2 is not installed" in refused(capsys, "--to", "detectron2")
    assert not (run / "export").exists()
    assert main(["--to", "timm"]) == 0


def test_inspect_says_what_a_checkpoint_is(run, capsys):
    assert main(["--inspect", str(run / "backbone.pt")]) == 0
    assert "arch: resnet18" in capsys.readouterr().out
    assert not (run / "export").exists()


def test_help_does_without_torch():
    code = "import sys, pretrain.export as e; assert 'torch' not in sys.modules; e.main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--overwrite" in done.stdout

"""The export folder appears whole or not at all."""

import dataclasses
import hashlib
import json
import os
import resource
import tempfile
from pathlib import Path

import pytest
import torch

from instdisc.errors import MENDABLE, UserError
from instdisc.export import bundle
from instdisc.export.bundle import export_backbone
from instdisc.export.verify import CONVERTERS
from instdisc.runs.checkpoint import save_checkpoint, weights_hash


@pytest.fixture
def weights(payload, tmp_path):
    path = tmp_path / "backbone.pt"
    save_checkpoint(path, "backbone", payload("resnet18"))
    return path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_report_says_what_was_made_and_how_far_it_is_off(weights, tmp_path):
    lines = []
    report = export_backbone(weights, tmp_path / "export", say=lines.append)
    written = json.loads((tmp_path / "export" / "report.json").read_text())
    assert written == json.loads(json.dumps(report))
    trunk = torch.load(weights, weights_only=True)["trunk"]
    assert written["source"]["weights_sha256"] == weights_hash(trunk)
    assert written["source"]["arch"] == "resnet18"
    files = {}
    for target, library in (("timm", "timm"), ("detectron2", "detectron2")):
        entry = written["targets"][target]
        assert entry["library"].keys() == {library}
        assert {"conv1", "conv2", "conv3", "conv4", "conv5"} <= entry["differences"].keys()
        assert entry["largest_difference"] == max(entry["differences"].values()) <= 1e-4
    for entry in written["targets"].values():
        files.update(entry["files"])
    there = {
        path.relative_to(tmp_path / "export").as_posix(): path
        for path in (tmp_path / "export").rglob("*")
        if path.is_file() and path.name != "report.json"
    }
    assert files.keys() == there.keys()
    for name, digest in files.items():
        assert hashlib.sha256(there[name].read_bytes()).hexdigest() == digest
    assert [line.partition(":")[0] for line in lines] == ["timm", "detectron2", "torchvision"]
    assert "100 of 100 tensors, largest difference" in lines[1]
    assert names(tmp_path) == ["backbone.pt", "export"]


def export_one(weights, output, **kwargs):
    return export_backbone(weights, output, targets=("torchvision",), **kwargs)


def test_an_existing_folder_is_left_alone(weights, tmp_path):
    (tmp_path / "export").mkdir()
    with pytest.raises(UserError, match="--overwrite"):
        export_one(weights, tmp_path / "export")
    assert names(tmp_path / "export") == []
    assert names(tmp_path) == ["backbone.pt", "export"]


def test_overwrite_replaces_an_export(weights, tmp_path):
    export_one(weights, tmp_path / "export")
    (tmp_path / "export" / "torchvision.pth").write_bytes(b"old")
    export_one(weights, tmp_path / "export", overwrite=True)
    assert names(tmp_path / "export") == ["report.json", "torchvision.pth"]
    assert (tmp_path / "export" / "torchvision.pth").stat().st_size > 1e6
    assert names(tmp_path) == ["backbone.pt", "export"]


def test_overwrite_deletes_nothing_but_exports(weights, tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    (home / "report.json").write_text("{}")
    with pytest.raises(UserError, match="not an export folder"):
        export_one(weights, home, overwrite=True)
    with pytest.raises(UserError, match="not an export folder"):
        export_one(weights, home / "thesis.tex", overwrite=True)
    assert (home / "thesis.tex").read_text() == "years of work"


def test_a_failed_overwrite_keeps_the_former_export(weights, tmp_path, monkeypatch):
    export_one(weights, tmp_path / "export")
    former = (tmp_path / "export" / "report.json").read_text()
    break_converter(monkeypatch)
    with pytest.raises(UserError):
        export_one(weights, tmp_path / "export", overwrite=True)
    assert (tmp_path / "export" / "report.json").read_text() == former
    assert names(tmp_path) == ["backbone.pt", "export"]


def test_a_rename_that_fails_brings_the_former_export_back(weights, tmp_path, monkeypatch):
    export_one(weights, tmp_path / "export")
    former = (tmp_path / "export" / "report.json").read_text()
    rename = Path.rename

    def fail_for_the_new_one(self, target):
        if self.name.endswith(".tmp"):
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_for_the_new_one)
    with pytest.raises(OSError, match="No space left"):
        export_one(weights, tmp_path / "export", overwrite=True)
    assert (tmp_path / "export" / "report.json").read_text() == former
    assert names(tmp_path) == ["backbone.pt", "export"]


def break_converter(monkeypatch):
    """Makes the converter lose a tensor on its way to the file."""

    def save(folder, source):
        CONVERTERS["torchvision"].save(folder, source)
        state = torch.load(folder / "torchvision.pth", weights_only=True)
        del state["layer3.0.conv1.weight"]
        torch.save(state, folder / "torchvision.pth")

    broken = dataclasses.replace(CONVERTERS["torchvision"], save=save)
    monkeypatch.setattr(bundle, "CONVERTERS", {**CONVERTERS, "torchvision": broken})


def test_a_conversion_that_fails_its_check_leaves_nothing(weights, tmp_path, monkeypatch):
    break_converter(monkeypatch)
    with pytest.raises(UserError, match=r"layer3\.0\.conv1\.weight"):
        export_one(weights, tmp_path / "export")
    assert names(tmp_path) == ["backbone.pt"]


def test_a_truncated_checkpoint_leaves_nothing(weights, tmp_path):
    content = weights.read_bytes()
    for length in (0, 100, len(content) // 2, len(content) - 1):
        weights.write_bytes(content[:length])
        with pytest.raises(UserError, match="truncated"):
            export_one(weights, tmp_path / "export")
        assert names(tmp_path) == ["backbone.pt"]


def test_a_folder_that_appears_meanwhile_is_left_alone(weights, tmp_path):
    def appear(line):
        (tmp_path / "export").mkdir()
        (tmp_path / "export" / "theirs").write_text("")

    with pytest.raises(UserError, match="meanwhile"):
        export_one(weights, tmp_path / "export", say=appear)
    assert names(tmp_path / "export") == ["theirs"]
    assert names(tmp_path) == ["backbone.pt", "export"]


@pytest.mark.parametrize("target", CONVERTERS)
def test_a_write_that_fails_keeps_its_reason_and_leaves_nothing(weights, target, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            export_backbone(weights, tmp_path / "export", targets=(target,))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno in MENDABLE
    assert names(tmp_path) == ["backbone.pt"]


def test_weights_that_are_not_numbers_are_refused(payload, tmp_path):
    broken = payload("resnet18")
    broken["trunk"]["layer1.0.bn1.running_var"][3] = float("nan")
    save_checkpoint(tmp_path / "backbone.pt", "backbone", broken)
    with pytest.raises(UserError, match=r"layer1\.0\.bn1\.running_var"):
        export_one(tmp_path / "backbone.pt", tmp_path / "export")


def test_a_target_that_refuses_does_so_before_anything_is_written(payload, tmp_path):
    save_checkpoint(tmp_path / "backbone.pt", "backbone", payload("resnet18", stem="small"))
    with pytest.raises(UserError, match="--to timm"):
        export_backbone(
            tmp_path / "backbone.pt", tmp_path / "export", targets=("timm", "detectron2")
        )
    assert names(tmp_path) == ["backbone.pt"]


def test_a_missing_parent_is_named(weights, tmp_path):
    with pytest.raises(UserError, match="nowhere is not a folder"):
        export_one(weights, tmp_path / "nowhere" / "export")
    with pytest.raises(UserError, match="is not a folder"):
        export_one(weights, weights / "export")


def test_a_folder_without_permission_raises_what_the_command_explains(payload):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "locked").mkdir(mode=0o555)
        save_checkpoint(folder / "backbone.pt", "backbone", payload("resnet18"))
        (folder / "backbone.pt").chmod(0o644)
        user = os.geteuid()
        if user == 0:
            os.seteuid(65534)  # root may write anywhere
        try:
            with pytest.raises(PermissionError) as caught:
                export_one(folder / "backbone.pt", folder / "locked" / "export")
        finally:
            os.seteuid(user)
        assert "locked" in str(caught.value.filename)
        assert names(folder / "locked") == []

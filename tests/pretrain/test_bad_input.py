"""Bad input to `pretrain/run.py`: one line with the fix, exit code 2, nothing written over."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from instdisc.runs.checkpoint import load_checkpoint
from pretrain.run import main

SMALL = [
    "--arch=resnet18", "--image-size=16", "--batch-size=8", "--epochs=1", "--num-negatives=5",
    "--workers=0", "--monitor-every=0", "--no-tensorboard", "--device=cpu",
]  # fmt: skip


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Runs the command, checks that it refused with one line, and returns the line."""
    try:
        code = main(list(argv))
    except SystemExit as stop:  # argparse's own errors
        code = int(stop.code or 0)
    error = capsys.readouterr().err
    assert code == 2, error
    assert error.count("\n") == 1, error
    assert "Traceback" not in error
    return error


def test_unknown_arch_and_senseless_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert "resnet50" in refused(capsys, "--arch", "resnet51")
    assert "--temperature" in refused(capsys, "--temperature", "0.001")
    assert "--bank-momentum" in refused(capsys, "--bank-momentum", "1")
    assert "first-batches:N" in refused(capsys, "--normalizer", "first-batches")
    assert "63" in refused(capsys, "--arch", "alexnet", "--image-size", "32")


def test_data_folder_missing_or_empty_or_with_one_image(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, image_tree: Path
) -> None:
    missing = tmp_path / "missing"
    assert "does not exist" in refused(capsys, *SMALL, "--data", str(missing))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no class folders" in refused(capsys, *SMALL, "--data", str(empty))
    one = tmp_path / "one" / "train" / "cat"
    one.mkdir(parents=True)
    shutil.copy(image_tree / "train" / "class0" / "0.png", one)
    assert "one training image" in refused(capsys, *SMALL, "--data", str(tmp_path / "one"))


def test_a_text_file_or_a_corrupt_jpeg_among_the_images(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, image_tree: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(image_tree, data)
    note = data / "train" / "class0" / "note.txt"
    note.write_text("not an image")
    assert "note.txt" in refused(capsys, *SMALL, "--data", str(data))
    note.unlink()
    (data / "train" / "class1" / "bad.jpg").write_bytes(b"\xff\xd8\xff\xe0" + b"junk" * 50)
    line = refused(capsys, *SMALL, "--data", str(data))
    assert "bad.jpg" in line
    assert "--skip-bad-images" in line
    assert not (tmp_path / "runs" / "pretrain").exists()


def test_a_larger_batch_than_images(capsys: pytest.CaptureFixture[str], image_tree: Path) -> None:
    data = ["--data", str(image_tree)]
    assert "24 images" in refused(capsys, *SMALL, *data, "--batch-size", "25")
    assert "multiple of 3" in refused(capsys, *SMALL, *data, "--accumulate", "3")


def test_more_noise_than_images_is_a_remark(
    capsys: pytest.CaptureFixture[str], image_tree: Path
) -> None:
    assert main([*SMALL, "--data", str(image_tree), "--num-negatives", "25"]) == 0
    assert "m is 25, more than the 24 images" in capsys.readouterr().out


def test_checkpoints_that_do_not_fit_are_left_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, image_tree: Path
) -> None:
    run = tmp_path / "run"
    argv = [*SMALL, "--data", str(image_tree), "--output", str(run)]
    assert main(argv) == 0
    capsys.readouterr()
    last = run / "last.pt"
    whole = last.read_bytes()

    assert "arch was resnet18, is resnet50" in refused(capsys, *argv, "--arch=resnet50")
    assert last.read_bytes() == whole
    other = tmp_path / "other"
    shutil.copytree(image_tree, other)
    (other / "train" / "class0" / "0.png").unlink()
    other_argv = [*SMALL, "--data", str(other), "--output", str(run)]
    assert "another list of images" in refused(capsys, *other_argv)
    assert last.read_bytes() == whole
    last.write_bytes(whole[: len(whole) // 2])
    assert "truncated" in refused(capsys, *argv)
    assert last.stat().st_size == len(whole) // 2
    assert "no such file" in refused(capsys, *argv, "--resume", str(tmp_path / "x.pt"))
    unrelated = tmp_path / "unrelated"
    unrelated.mkdir()
    (unrelated / "thesis.tex").touch()
    assert "not a run folder" in refused(
        capsys, *SMALL, "--data", str(image_tree), "--output", str(unrelated), "--overwrite"
    )
    assert (unrelated / "thesis.tex").exists()


def test_a_full_disk_while_saving_keeps_the_previous_checkpoint(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, image_tree: Path
) -> None:
    run = tmp_path / "run"
    argv = [*SMALL, "--data", str(image_tree), "--output", str(run)]
    assert main(argv) == 0
    capsys.readouterr()
    before = (run / "last.pt").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000_000, limits[1]))
        line = refused(capsys, *argv, "--epochs=2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "size limit" in line
    assert (run / "last.pt").read_bytes() == before
    assert not [name for name in os.listdir(run) if name.endswith(".tmp")]  # noqa: PTH208
    assert main([*argv, "--epochs=2"]) == 0
    assert load_checkpoint(run / "last.pt", "train")["step"] == 6


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_folder_without_permission(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, image_tree: Path
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    argv = [*SMALL, "--data", str(image_tree), "--output", str(locked / "run")]
    assert "permission" in refused(capsys, *argv)


def test_bfloat16_on_a_cpu_is_refused_where_its_gradients_are_wrong(
    capsys: pytest.CaptureFixture[str], image_tree: Path, tmp_path: Path
) -> None:
    argv = [*SMALL, "--data", str(image_tree), "--output", str(tmp_path / "run"), "--amp=bf16"]
    assert "layer4.0.conv1 sees a single pixel of 16-pixel images" in refused(capsys, *argv)
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="bfloat16 needs oneDNN")
def test_bfloat16_on_a_cpu_trains(image_tree: Path, tmp_path: Path, repo: Path) -> None:
    argv = [*SMALL, "--data", str(image_tree), "--output", str(tmp_path / "run"), "--amp=bf16"]
    subprocess.run(
        [sys.executable, str(repo / "pretrain" / "run.py"), *argv, "--image-size=32"],
        # Virtual machines that say they have AMX may die of it.
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
        check=True,
    )
    assert load_checkpoint(tmp_path / "run" / "last.pt", "train")["step"] == 3

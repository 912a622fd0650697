"""Training on images without classes, from a folder, a list or archives; a val/ without classes."""

import os
import shutil
import socket
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from instdisc.runs.checkpoint import load_checkpoint
from instdisc.runs.folders import read_jsonl
from pretrain.run import main

SMALL = [
    "--arch=resnet18", "--image-size=32", "--batch-size=64", "--epochs=1", "--num-negatives=32",
    "--workers=0", "--no-tensorboard", "--device=cpu",
]  # fmt: skip


def write_photographs(folder: Path, count: int) -> list[str]:
    """JPEGs of smooth colours, of several sizes."""
    names = []
    for number in range(count):
        rng = np.random.default_rng(number)
        small = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8))
        names.append(f"{number // 100}/img {number:03d}.jpg" if number % 3 else f"{number}.jpg")
        path = folder / names[-1]
        path.parent.mkdir(parents=True, exist_ok=True)
        small.resize((60 + number % 7, 48), Image.Resampling.BICUBIC).save(path, quality=90)
    return names


def train(data: Path, output: Path, *more: str) -> dict[str, torch.Tensor]:
    assert main([*SMALL, "--data", str(data), "--output", str(output), *more]) == 0
    return load_checkpoint(output / "last.pt", "train")


@pytest.mark.slow
def test_folder_list_and_archives_train_the_same_network(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "photos"
    names = write_photographs(folder, 300)
    listed = tmp_path / "photos" / "all.txt"
    listed.write_text("".join(f"{name}\n" for name in reversed(names)))
    shards = tmp_path / "shards"
    shards.mkdir()
    for number in range(3):
        with tarfile.open(shards / f"{number}.tar", "w") as tar:
            for name in names[number::3]:
                tar.add(folder / name, name)
    states = [
        train(data, tmp_path / f"run{number}")
        for number, data in enumerate((folder, listed, shards))
    ]
    assert "1 files of" in capsys.readouterr().out  # the list among the photographs
    for other in states[1:]:
        assert other["data_fingerprint"] == states[0]["data_fingerprint"]
        assert torch.equal(other["bank"], states[0]["bank"])
        for name, values in states[0]["model"].items():
            assert torch.equal(values, other["model"][name]), name
    measured = read_jsonl(tmp_path / "run0" / "metrics.jsonl")
    assert any("rankme" in row for row in measured)
    assert not any("knn_bank" in row for row in measured)
    # A run may go on with another container of the same images.
    train(shards, tmp_path / "run0", "--epochs=2")


def test_a_val_without_classes_is_told_at_the_start(
    tmp_path: Path, image_tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    shutil.copytree(image_tree / "train", data / "train")
    (data / "val").mkdir()
    for number, path in enumerate(sorted((image_tree / "val").glob("*/*"))):
        shutil.copy(path, data / "val" / f"{number}.png")
    train(data, tmp_path / "run", "--batch-size=8", "--num-negatives=4")
    out = capsys.readouterr().out
    told = out.index("has no class folders")
    assert told < out.index("ln n")
    assert "instdisc.images.arrange" in out
    measured = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert any("rankme" in row for row in measured)


def test_different_classes_end_a_run_before_it_trains(
    tmp_path: Path, image_tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    shutil.copytree(image_tree, data)
    (data / "val" / "class0").rename(data / "val" / "other")
    argv = [*SMALL, "--batch-size=8", "--num-negatives=4", "--data", str(data)]
    argv += ["--output", str(tmp_path / "run")]
    assert main(argv) == 2
    assert "different classes" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    (data / "val" / "other").rename(data / "val" / "class0")
    assert main([*argv, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.txt", b"", "is empty"),
        ("l.csv", b"gone.jpg\n", "do not exist: gone.jpg"),
        ("l.tar", b"junk" * 500, "is not taken"),
        ("l.zip", b"PK", "a list of them (.txt, .csv) or a .tar archive"),
    ],
)
def test_bad_containers_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main([*SMALL, "--data", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


WORKER = """
import sys
from pathlib import Path
from instdisc.images import sets
from pretrain.run import main

for name in ("build_set", "load_listing", "find_bad_images"):
    def told(*args, inner=getattr(sets, name), name=name, **options):
        print("called", name, flush=True)
        return inner(*args, **options)
    setattr(sets, name, told)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("good", [True, False])
def test_one_process_lists_for_all(tmp_path: Path, image_tree: Path, good: bool) -> None:
    data = tmp_path / "data"
    shutil.copytree(image_tree, data)
    if not good:
        (data / "train" / "class0" / "note.txt").write_text("no image")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    argv = [*SMALL, "--batch-size=8", "--num-negatives=4", "--data", str(data)]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, *argv, "--output", str(tmp_path / "run")],
            env={
                **os.environ,
                **{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    ends = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == ([0, 0] if good else [2, 2]), ends
    assert "called load_listing" in ends[0][0]
    assert "called" not in ends[1][0]
    if not good:
        assert all(err.count("\n") == 1 and "note.txt" in err for _, err in ends)

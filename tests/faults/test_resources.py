"""Memory, loader processes and disks that give out: one line, exit code 2, and nothing lost.

Limits, kills and full disks are real: rlimits in processes of their own, SIGKILL, a small tmpfs.
"""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from instdisc.errors import UserError
from instdisc.images.transforms import InputSpec
from instdisc.networks.backbones import Embedding, backbone_payload, build_backbone
from instdisc.runs.checkpoint import load_checkpoint, load_last, previous_of, save_checkpoint
from instdisc.training.seed import seeded
from pretrain.run import main as pretrain_main
from transfer.semisup import main as semisup_main

MIB = 2**20
PRETRAIN = [
    "--arch=resnet18", "--image-size=16", "--batch-size=8", "--num-negatives=5",
    "--monitor-every=0", "--no-tensorboard", "--device=cpu",
]  # fmt: skip
SEMISUP = [
    "--labeled=1", "--epochs=8", "--batch-size=8", "--lr-milestones=6", "--keep-checkpoint",
    "--device=cpu",
]  # fmt: skip


def only_line(text: str) -> str:
    """The one line that a refused command leaves on stderr."""
    assert text.count("\n") == 1, text
    assert "error: " in text
    return text


def address_space(pid: int | str = "self") -> int:
    """Bytes of address space that a process has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def fork(folder: Path, work: Callable[[], int]) -> int:
    """Runs `work` in a copy of this process, with its words in files; returns the process."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        for number, name in ((1, "stdout"), (2, "stderr")):
            descriptor = os.open(folder / name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            os.dup2(descriptor, number)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
        code = work()
    except BaseException:  # the child must not go on as if it were the test
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError, MemoryError):
            sys.stderr.flush()
        os._exit(code)


def ended(pid: int, folder: Path) -> tuple[int, str]:
    """Waits for a fork; its exit code, or minus the signal, and what it said on stderr."""
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), (folder / "stderr").read_text()


def under_limit(folder: Path, mib: int, work: Callable[[], int]) -> tuple[int, str]:
    """Runs `work` in a process that can get only so much memory beyond what it starts with."""

    def limited() -> int:
        most = address_space() + mib * MIB
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        return work()

    return ended(fork(folder, limited), folder)


def children(pid: int) -> list[int]:
    """Processes that a process has started and not outlived."""
    with contextlib.suppress(OSError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def loaders(pid: int) -> list[int]:
    """Loader processes: forks, with the command line of the process that they belong to."""

    def words(number: int) -> bytes:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{number}/cmdline").read_bytes()
        return b""

    return [each for each in children(pid) if words(each) == words(pid) != b""]


def kill_a_loader(command: list[str], saved: Callable[[], bool]) -> str:
    """Starts a command, kills one of its loaders when it has saved something; its last words."""
    command = [sys.executable, *command, "--workers=2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes)  # type: ignore[call-overload] # dict of Any
    try:
        while not (saved() and (found := loaders(process.pid))):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.005)
        os.kill(found[0], signal.SIGKILL)
        _, said = process.communicate(timeout=120)  # seconds; minutes would be a hang
    finally:
        process.kill()
    assert process.returncode == 2, said
    assert "a loader process died" in said
    assert "--workers" in said
    assert "the same command goes on" in said
    return only_line(said)


def weights_of(file: Path) -> dict[str, torch.Tensor]:
    return dict(load_checkpoint(file, "train")["model"])


def assert_same_weights(one: Path, other: Path) -> None:
    ours, theirs = weights_of(one), weights_of(other)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_pretraining_goes_on_after_a_loader_was_killed(
    tmp_path: Path, image_tree: Path, repo: Path
) -> None:
    argv = [*PRETRAIN, f"--data={image_tree}"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    script, last = str(repo / "pretrain" / "run.py"), killed / "last.pt"
    kill_a_loader([script, *argv, f"--output={killed}", "--epochs=2000"], last.exists)
    step = load_checkpoint(last, "train")["step"]
    assert not (killed / ".lock").exists()
    epochs = f"--epochs={step // 3 + 2}"  # the learning rate does not depend on it
    assert pretrain_main([*argv, f"--output={killed}", epochs, "--workers=1"]) == 0
    assert pretrain_main([*argv, f"--output={whole}", epochs, "--workers=0"]) == 0
    assert_same_weights(last, whole / "last.pt")


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["after a save", "during a save"])
def test_semisup_goes_on_after_a_loader_was_killed(
    tmp_path: Path, image_tree: Path, repo: Path, moment: str
) -> None:
    with seeded(0, "backbone"):
        model = Embedding(build_backbone("resnet18"), 8)
    weights = tmp_path / "weights" / "backbone.pt"
    facts = {"config": {"data": str(image_tree)}, "dataset": "images"}
    spec = InputSpec(size=16).to_dict()
    save_checkpoint(
        weights, "backbone", {**backbone_payload(model), "input": spec, "pretraining": facts}
    )
    argv = [*SEMISUP, f"--weights={weights}"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"

    def begun() -> bool:
        saving = moment == "after a save" or any(killed.glob("*/.last.pt.*.tmp"))
        return saving and any(killed.glob("*/last.pt"))

    command = [str(repo / "transfer" / "semisup.py"), *argv, f"--output={killed}"]
    kill_a_loader([*command, "--save-minutes=0"], begun)
    (last,) = killed.glob("*/last.pt")
    assert load_checkpoint(last, "train")["step"] < 24
    assert semisup_main([*argv, f"--output={killed}", "--workers=0"]) == 0
    assert semisup_main([*argv, f"--output={whole}", "--workers=0"]) == 0
    assert_same_weights(last, whole / last.relative_to(killed))


@pytest.mark.slow
def test_too_little_memory_for_a_step_is_one_line(tmp_path: Path, image_tree: Path) -> None:
    """Limits at which model, batch, activations or gradients are the first that do not fit."""
    argv = [*PRETRAIN, "--image-size=256", "--batch-size=24", "--epochs=1", "--workers=0"]
    found = {}
    for mib in (5, 40, 60, 120, 250, 400):
        run = [*argv, f"--data={image_tree}", f"--output={tmp_path / str(mib)}"]
        code, said = under_limit(tmp_path, mib, lambda run=run: pretrain_main(run))  # type: ignore[misc]
        found[mib] = (code, said)
        assert code == 2, found
        assert "out of memory" in only_line(said), found
        for remedy in ("--batch-size", "--accumulate", "--bank-dtype float16"):
            assert remedy in said
        assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("skip", ["--skip-bad-images", "--no-skip-bad-images"])
def test_too_little_memory_for_an_image_in_a_loader_names_it(
    tmp_path: Path, image_tree: Path, repo: Path, skip: str
) -> None:
    """It is not left out, either: which images are trained on must not depend on the memory."""
    data = tmp_path / "data"
    shutil.copytree(image_tree / "train", data / "train")
    Image.new("RGB", (5000, 5000)).save(data / "train" / "class0" / "vast.png", compress_level=1)
    argv = [*PRETRAIN, f"--data={data}", f"--output={tmp_path / 'run'}", skip]
    # No fork of this process: memory that it has kept from other tests could hold the image.
    command = [sys.executable, str(repo / "pretrain" / "run.py"), *argv]
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--epochs=2000", "--workers=1"], stdout=subprocess.DEVNULL, stderr=stderr
        )
    least: dict[int, int] = {}
    until = time.monotonic() + 120
    while process.poll() is None:
        if time.monotonic() > until:
            process.kill()
        for worker in loaders(process.pid):
            # It may have an image open just now, so the lowest value counts.
            with contextlib.suppress(OSError, IndexError):
                least[worker] = min(address_space(worker), least.get(worker, 2**62))
                most = least[worker] + 40 * MIB
                resource.prlimit(worker, resource.RLIMIT_AS, (most, most))
        time.sleep(0.01)
    code, said = process.returncode, (tmp_path / "stderr").read_text()
    assert code == 2, said
    assert "out of memory" in only_line(said)
    assert "vast.png" in said
    assert "--workers" in said


def test_a_checkpoint_for_which_there_is_no_memory_is_not_taken_for_a_damaged_one(
    tmp_path: Path,
) -> None:
    last = tmp_path / "last.pt"
    for size in (1, 64):  # the older one would fit
        save_checkpoint(last, "train", {"x": torch.zeros(size, MIB // 4)}, keep_previous=True)

    def load() -> int:
        try:
            load_last(last, "train")
        except UserError as error:
            sys.stderr.write(f"error: {error}\n")
            return 2
        return 0

    code, said = under_limit(tmp_path, 32, load)
    assert (code, "does not fit into memory" in only_line(said)) == (2, True), said
    assert last.exists()
    assert previous_of(last).exists()
    assert under_limit(tmp_path, 256, load) == (0, "")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, image_tree: Path) -> Path:
    """last.pt of three epochs with nothing in the way."""
    run = tmp_path_factory.mktemp("undisturbed")
    argv = [*PRETRAIN, f"--data={image_tree}", f"--output={run}", "--epochs=3", "--workers=0"]
    assert pretrain_main(argv) == 0
    return run / "last.pt"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 320 MiB: room for two checkpoints of resnet18 and the one being written."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=320m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no `mount` on this machine")
    if done.returncode:
        pytest.skip(f"mounting a tmpfs is refused here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("left", [200, 160, 0])
def test_a_disk_that_fills_up_keeps_the_checkpoint_and_the_run_goes_on(
    small_disk: Path,
    undisturbed: Path,
    image_tree: Path,
    capfd: pytest.CaptureFixture[str],
    left: int,
) -> None:
    """Room for the first save and not for the second's last.pt, or backbone.pt, or for any file."""
    run, filler = small_disk / "run", small_disk / "filler"
    argv = [*PRETRAIN, f"--data={image_tree}", "--epochs=3", "--workers=0"]
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        for _ in range(320 - left):
            file.write(bytes(MIB))
    assert pretrain_main([*argv, f"--output={run}"]) == 2
    line = only_line(capfd.readouterr().err)
    assert "the disk is full" in line
    if left:
        assert load_checkpoint(run / "last.pt", "train")["step"] == 3
        assert load_checkpoint(run / "backbone.pt", "backbone")
    assert not list(small_disk.rglob("*.tmp"))
    filler.unlink()
    assert pretrain_main([*argv, f"--output={run}"]) == 0
    assert_same_weights(run / "last.pt", undisturbed)

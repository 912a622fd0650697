"""Training end to end on tiny images: exact resume, accumulation, monitor, the run folder."""

import json
import os
import shutil
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from instdisc.cli import to_dict
from instdisc.errors import Interrupted, UserError
from instdisc.images.loading import build_loader
from instdisc.networks.weights import load_backbone
from instdisc.runs.checkpoint import load_checkpoint, save_checkpoint
from instdisc.runs.folders import read_jsonl
from instdisc.runs.row_files import load_all_rows
from instdisc.training import draws
from pretrain.bank import MemoryBank
from pretrain.config import PretrainConfig
from pretrain.session import Session
from pretrain.trainer import Trainer, pretrain


def config(data: Path, output: Path, **changes: Any) -> PretrainConfig:
    """Nine steps: 24 images, batches of 8, 3 epochs."""
    values = {
        "arch": "resnet18",
        "data": str(data),
        "output": output,
        "image_size": 16,
        "batch_size": 8,
        "epochs": 3,
        "lr_milestones": (2,),
        "num_negatives": 5,
        "proximal_weight": 0.5,
        "bank_momentum": 0.5,
        "num_neighbors": 4,
        "workers": 0,
        "log_every": 1,
        "monitor_every": 0,
        "tensorboard": False,
        "device": "cpu",
        **changes,
    }
    return PretrainConfig(**values)


def assert_same_run(one: Path, two: Path) -> None:
    a, b = (load_checkpoint(run / "last.pt", "train") for run in (one, two))
    for state, run in ((a, one), (b, two)):
        state["bank"] = load_all_rows(state["bank"], run / "last.pt")
    assert a["step"] == b["step"]
    for part in ("model", "bank", "optimizer", "criterion"):
        torch.testing.assert_close(a[part], b[part], rtol=0, atol=0)
    losses = [
        [(r["step"], r.get("loss")) for r in read_jsonl(run / "metrics.jsonl")]
        for run in (one, two)
    ]
    assert losses[0] == losses[1]


# Run by another interpreter: SIGKILL itself after a step, before anything more is written.
KILLED_AT = """
import json, os, signal, sys
from instdisc.cli import from_dict
from pretrain.config import PretrainConfig
from pretrain.trainer import pretrain
from pretrain.trainer import Trainer

inner = Trainer.train_step

def outer(self, batches):
    loss = inner(self, batches)
    if self.step == int(sys.argv[1]):
        self.session.writer.wait()  # what was saved before is written in the background
        os.kill(os.getpid(), signal.SIGKILL)
    return loss

Trainer.train_step = outer
pretrain(PretrainConfig(**from_dict(PretrainConfig, json.loads(sys.argv[2]))))
"""


@pytest.fixture(scope="module")
def whole_run(image_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "run"
    pretrain(config(image_tree, output))
    return output


@pytest.mark.parametrize(
    ("step", "save_minutes", "resumes_at"),
    [(2, 0.0, 1), (5, 10.0, 3), (8, 0.0, 7)],
    ids=["in the first epoch", "back to the epoch's start", "in the last epoch"],
)
@pytest.mark.slow
def test_a_killed_run_resumed_is_the_uninterrupted_run_bit_for_bit(
    image_tree: Path,
    tmp_path: Path,
    whole_run: Path,
    step: int,
    save_minutes: float,
    resumes_at: int,
) -> None:
    run = config(image_tree, tmp_path / "run", save_minutes=save_minutes)
    values = json.dumps(to_dict(run))
    child = subprocess.run([sys.executable, "-c", KILLED_AT, str(step), values], timeout=300)
    assert child.returncode == -signal.SIGKILL
    assert load_checkpoint(tmp_path / "run" / "last.pt", "train")["step"] == resumes_at
    pretrain(run)
    assert_same_run(whole_run, tmp_path / "run")


def test_workers_do_not_change_a_run(image_tree: Path, tmp_path: Path, whole_run: Path) -> None:
    pretrain(config(image_tree, tmp_path / "run", workers=2))
    assert_same_run(whole_run, tmp_path / "run")


def test_sigterm_saves_in_mid_epoch_and_the_same_command_goes_on(
    image_tree: Path, tmp_path: Path, whole_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Trainer.train_step

    def outer(self: Trainer, batches: Any) -> torch.Tensor:
        if self.step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return inner(self, batches)

    run = config(image_tree, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", outer)
        with pytest.raises(Interrupted, match="stopped after step 5"):
            pretrain(run)
    pretrain(run)
    assert_same_run(whole_run, tmp_path / "run")


@pytest.mark.slow  # loading the compiler takes seconds
def test_a_compiled_run_goes_on_without_the_compiler(
    image_tree: Path, tmp_path: Path, whole_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints are the same; with a backend that compiles nothing, bit for bit."""
    inner = torch.compile
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", lambda module: inner(module, backend="eager"))
        pretrain(config(image_tree, tmp_path / "run", epochs=1, compile=True))
    pretrain(config(image_tree, tmp_path / "run"))
    assert_same_run(whole_run, tmp_path / "run")


def test_a_finished_run_is_left_alone_and_can_be_made_longer(
    image_tree: Path, tmp_path: Path, whole_run: Path
) -> None:
    output = tmp_path / "run"
    shutil.copytree(whole_run, output)
    before = (output / "last.pt").stat().st_mtime_ns
    pretrain(config(image_tree, output))
    assert (output / "last.pt").stat().st_mtime_ns == before
    pretrain(config(image_tree, output, epochs=4))
    assert load_checkpoint(output / "last.pt", "train")["step"] == 12


def test_a_loaded_checkpoint_is_not_kept_in_memory(
    image_tree: Path, tmp_path: Path, whole_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "run"
    shutil.copytree(whole_run, output)
    loaded: list[weakref.ref[torch.Tensor]] = []
    find, step = Session.find_checkpoint, Trainer.train_step

    def remember(self: Session) -> dict[str, Any] | None:
        state = find(self)
        assert state is not None
        loaded.append(weakref.ref(state["bank"]))
        return state

    def look(self: Trainer, batches: Any) -> torch.Tensor:
        assert loaded[0]() is None
        return step(self, batches)

    monkeypatch.setattr(Session, "find_checkpoint", remember)
    monkeypatch.setattr(Trainer, "train_step", look)
    pretrain(config(image_tree, output, epochs=4))
    assert load_checkpoint(output / "last.pt", "train")["step"] == 12


def test_processes_that_see_different_checkpoints_do_not_begin(
    image_tree: Path, whole_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gather(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows, rows - 3])

    monkeypatch.setattr("pretrain.session.dist.all_gather_rows", gather)
    with pytest.raises(UserError, match=r"steps \[9, 6\].*a disk that they share"):
        pretrain(config(image_tree, whole_run, epochs=4))


def test_another_run_in_the_folder_is_refused_and_kept(
    image_tree: Path, tmp_path: Path, whole_run: Path
) -> None:
    output = tmp_path / "run"
    shutil.copytree(whole_run, output)
    before = (output / "last.pt").read_bytes()
    with pytest.raises(UserError, match=r"temperature was 0.07, is 0.1.*--overwrite"):
        pretrain(config(image_tree, output, temperature=0.1))
    with pytest.raises(UserError, match=r"holds a run"):
        pretrain(config(image_tree, output, resume="never"))
    other = tmp_path / "images"
    shutil.copytree(image_tree, other)
    (other / "train" / "class0" / "0.png").rename(other / "train" / "class0" / "99.png")
    with pytest.raises(UserError, match="another list of images"):
        pretrain(config(other, output))
    assert (output / "last.pt").read_bytes() == before
    pretrain(config(image_tree, output, temperature=0.1, overwrite=True, epochs=1))
    assert load_checkpoint(output / "last.pt", "train")["config"]["temperature"] == 0.1


def test_accumulation_gives_the_gradient_of_the_whole_batch(
    image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With batch norm frozen, four micro-batches of two are one batch of eight."""
    monkeypatch.setattr(
        torch.nn.BatchNorm2d,
        "train",
        lambda self, mode=True: torch.nn.Module.train(self, False),
    )
    for name, accumulate in (("one", 1), ("four", 4)):
        run = config(
            image_tree, tmp_path / name, accumulate=accumulate, epochs=1, normalizer="fixed:50"
        )
        pretrain(run)
    rows = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("one", "four")]
    for a, b in zip(*rows, strict=True):
        assert a.get("loss", 0.0) == pytest.approx(b.get("loss", 0.0), rel=1e-4)


@pytest.mark.parametrize("objective", ["parametric", "softmax", "sampled-softmax"])
def test_every_objective_trains_and_the_monitor_reports(
    image_tree: Path, tmp_path: Path, objective: str
) -> None:
    run = config(
        image_tree, tmp_path / "run", objective=objective, epochs=1, monitor_every=1, amp="off"
    )
    pretrain(run)
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert (rows[0]["step"], rows[0]["epoch"]) == (0, 0)  # before training
    for row in (rows[0], rows[-1]):
        assert 0 <= row["knn_bank"] <= 100
        assert 0 <= row["knn_recomputed"] <= 100
        assert 1 <= row["rankme"] <= 24
        assert -1 <= row["mean_cosine"] <= 1
    assert all(torch.isfinite(torch.tensor(r["loss"])) for r in rows if "loss" in r)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_placement_of_one_process_trains_the_same_run(
    image_tree: Path, tmp_path: Path, whole_run: Path, dtype: str
) -> None:
    """And a run that changes its placement in the middle goes on as if nothing had happened."""
    first = tmp_path / "replicated"
    pretrain(config(image_tree, first, bank_dtype=dtype))
    moved = tmp_path / "moved"
    for epochs, placement in ((1, "sharded"), (2, "cpu"), (3, "sharded")):
        run = config(image_tree, moved, bank_dtype=dtype, bank_placement=placement, epochs=epochs)
        pretrain(run)
        assert len(list((moved / "last.rows").iterdir())) == 1  # of last.pt or of the one before
    assert_same_run(first, moved)
    assert str(load_checkpoint(first / "last.pt", "train")["bank"].dtype) == f"torch.{dtype}"
    if dtype == "float32":
        assert_same_run(first, whole_run)


def test_a_checkpoint_older_than_an_option_goes_on_with_its_default(
    image_tree: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    pretrain(config(image_tree, output, epochs=1))
    state = load_checkpoint(output / "last.pt", "train")
    for name in ("bank_dtype", "bank_placement"):
        del state["config"][name]
    save_checkpoint(output / "last.pt", "train", state)
    with pytest.raises(UserError, match="bank_dtype was float32, is float16"):
        pretrain(config(image_tree, output, epochs=2, bank_dtype="float16"))
    pretrain(config(image_tree, output, epochs=2))
    assert load_checkpoint(output / "last.pt", "train")["step"] == 6


@pytest.mark.slow
def test_a_run_by_counters_resumes_exactly_and_is_not_mixed_with_sequences(
    image_tree: Path, tmp_path: Path, whole_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "COUNTED_FROM", 24)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pretrain(config(image_tree, whole, epochs=2))
    for epochs in (1, 2):
        pretrain(config(image_tree, parts, epochs=epochs))
    assert_same_run(whole, parts)
    state = load_checkpoint(parts / "last.pt", "train")
    assert state["draws"] == "counter"
    before = load_checkpoint(whole_run / "last.pt", "train")
    assert not torch.equal(state["bank"], before["bank"])
    # A checkpoint from before there was a choice.
    del before["draws"]
    save_checkpoint(parts / "last.pt", "train", before)
    with pytest.raises(UserError, match=r"by sequence, .* by counter: go on"):
        pretrain(config(image_tree, parts, epochs=4))
    monkeypatch.setattr(draws, "COUNTED_FROM", 25)
    pretrain(config(image_tree, parts, epochs=4))
    assert load_checkpoint(parts / "last.pt", "train")["draws"] == "sequence"


@pytest.mark.slow
def test_damaged_rows_of_a_sharded_bank_are_those_of_the_save_before(
    image_tree: Path, tmp_path: Path, whole_run: Path
) -> None:
    output = tmp_path / "run"
    pretrain(config(image_tree, output, epochs=2, bank_placement="sharded"))
    last, kept = output / "last.pt", tmp_path / "kept"
    shutil.copytree(output, kept)
    state = load_checkpoint(last, "train")
    (named,) = (output / "last.rows" / each["name"] for each in state["bank"]["files"])
    content = bytearray(named.read_bytes())
    content[1000] ^= 1
    named.write_bytes(content)
    pretrain(config(image_tree, output, bank_placement="sharded"))
    assert (output / "last.pt.damaged").exists()
    assert_same_run(output, whole_run)
    # Nothing is moved where the older one is no better, or a file was named.
    for file in (kept / "last.rows").iterdir():
        file.write_bytes(b"short")
    before = sorted(p.name for p in kept.rglob("*"))
    for resume in ("auto", str(kept / "last.pt")):
        with pytest.raises(UserError, match=r"gone or of another size: keep last\.rows/ beside"):
            pretrain(config(image_tree, kept, resume=resume))
    assert sorted(p.name for p in kept.rglob("*")) == before


PARTS = {"data", "forward", "objective", "backward", "optimizer", "bank"}


def test_a_run_says_where_its_time_goes(whole_run: Path) -> None:
    rows = read_jsonl(whole_run / "metrics.jsonl")
    for prefix, wanted in (("time_", "loss"), ("epoch_time_", "epoch_loss")):
        found = [row for row in rows if wanted in row]
        assert found
        for row in found:
            shares = {k.removeprefix(prefix): v for k, v in row.items() if k.startswith(prefix)}
            assert shares.keys() == PARTS
            assert sum(shares.values()) == pytest.approx(100)
            assert all(share > 0 for share in shares.values())
    lines = (whole_run / "log.txt").read_text().splitlines()
    epochs = [line for line in lines if " epoch 3/3 " in line]
    assert len(epochs) == 1
    assert all(f"{part} " in epochs[0] for part in PARTS)


def test_a_run_folder_holds_what_it_should(whole_run: Path, image_tree: Path) -> None:
    names = {"config.json", "log.txt", "metrics.jsonl", "last.pt", "backbone.pt"}
    assert names <= {p.name for p in whole_run.iterdir()}
    assert json.loads((whole_run / "config.json").read_text())["seed"] == 0
    state = load_checkpoint(whole_run / "last.pt", "train")
    torch.testing.assert_close(state["bank"].norm(dim=1), torch.ones(24))
    backbone = load_backbone(whole_run)
    assert torch.equal(
        backbone.trunk.state_dict()["conv1.weight"],
        state["model"]["backbone.trunk.conv1.weight"].contiguous(),
    )


def test_an_unreadable_image_is_skipped_on_request_and_its_row_stays(
    image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "images"
    shutil.copytree(image_tree, data)
    bad = data / "train" / "class1" / "3.png"
    bad.write_bytes(bad.read_bytes()[:100])
    with pytest.raises(UserError, match=r"3.png.*--skip-bad-images"):
        pretrain(config(data, tmp_path / "run", epochs=1))
    pretrain(config(data, tmp_path / "left_out", epochs=1, skip_bad_images=True))
    assert "3.png" in (tmp_path / "left_out" / "bad_images.txt").read_text()
    assert len(load_checkpoint(tmp_path / "left_out" / "last.pt", "train")["bank"]) == 23
    # Past the scan, training itself must notice.
    monkeypatch.setattr("pretrain.session.find_bad_images", lambda images: [])
    with pytest.raises(UserError, match=r"3.png is not a readable image"):
        pretrain(config(data, tmp_path / "run", epochs=1))
    pretrain(config(data, tmp_path / "run2", epochs=1, skip_bad_images=True, monitor_every=1))
    assert "3.png" in (tmp_path / "run2" / "bad_images.txt").read_text()
    bank = load_checkpoint(tmp_path / "run2" / "last.pt", "train")["bank"]
    unchanged = (bank == MemoryBank(24, 128, momentum=0.5, seed=0).vectors).all(dim=1)
    assert unchanged.nonzero().flatten().tolist() == [11]


def test_a_loss_that_is_no_number_stops_the_run(image_tree: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the loss is (nan|inf) at step .*lower --lr"):
        pretrain(config(image_tree, tmp_path / "run", lr=1e30, epochs=3))


STEPS = {
    "nce": {},
    "nce shared": {"negatives": "shared"},
    "nce ema": {"normalizer": "ema", "accumulate": 2},
    "nce exact": {"normalizer": "exact"},
    "softmax": {"objective": "softmax"},
    "sampled-softmax": {"objective": "sampled-softmax"},
    "parametric": {"objective": "parametric"},
    "leaves out": {"on_nan": ("skip", "1")},
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_waits_for_no_device(
    image_tree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    host_syncs: Any,
    name: str,
) -> None:
    """Three whole turns of the loop, between a step that logs and the end of the epoch."""
    inner, syncs = Trainer.train_step, host_syncs()

    def outer(self: Trainer, batches: Any) -> torch.Tensor:
        if self.step == 2:
            syncs.__enter__()
        elif self.step == 5:
            syncs.__exit__(None, None, None)
        return inner(self, batches)

    monkeypatch.setattr(Trainer, "train_step", outer)
    loader = "pretrain.trainer.build_loader"  # which is the host's own work
    monkeypatch.setattr(loader, lambda *args, **kwargs: list(build_loader(*args, **kwargs)))
    values = {"epochs": 1, "batch_size": 4, "log_every": 99, **STEPS[name]}
    pretrain(config(image_tree, tmp_path / "run", **values))
    # Leaving a batch out needs the loss before the step is taken.
    assert syncs.found == (["tolist"] * 3 if name == "leaves out" else [])

"""On a real Slurm of two nodes: studies, preemption, failures. Minutes, so all of it is slow."""

import functools
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from instdisc.images.transforms import InputSpec
from instdisc.networks.backbones import Embedding, backbone_payload, build_backbone
from instdisc.runs.checkpoint import load_checkpoint, save_checkpoint
from slurm import progress, status, submit
from slurm.jobs import read_status

pytestmark = pytest.mark.slow

# Images of 64 pixels: steps that are long enough to be stopped between two of them.
PRETRAIN = shlex.split(
    "--arch resnet18 --data demo --train-fraction 0.05 --batch-size 16 --epochs 5 --log-every 1 "
    "--no-tensorboard --monitor-every 0 --image-size 64"
)
SEMISUP = shlex.split(
    "--data demo --init pretrained --labeled 0.1 --batch-size 16 --epochs 2 --log-every 1 "
    "--keep-checkpoint --workers 1"
)


def wait_for(condition: Any, seconds: float, what: str) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.1)
    pytest.fail(f"{what}: not within {seconds:.0f} seconds")


class User:
    """Somebody at the login node, with a runs folder."""

    def __init__(self, cluster: Any, runs: Path) -> None:
        self.cluster, self.runs = cluster, runs
        self.jobs = runs / "slurm"

    def submit(self, *argv: str) -> None:
        assert submit.main([str(word) for word in argv]) == 0

    def job_id(self, name: str) -> str:
        return json.loads((self.jobs / name / "submission.json").read_text())["job_id"]

    def rows(self, run: str) -> int:
        files = (self.runs / run).rglob("metrics.jsonl")
        return sum(len(file.read_text().splitlines()) for file in files)

    def statuses(self) -> dict[str, progress.JobStatus]:
        return {each.name: each for each in progress.read_statuses(self.jobs)}

    def wait(self, name: str, *states: str, seconds: float = 400) -> progress.JobStatus:
        def found() -> progress.JobStatus | None:
            each = self.statuses()[name]
            if each.state in ("failed", "stopped") and each.state not in states:
                pytest.fail(f"{each}\n{self.logs()}")
            return each if each.state in states else None

        return wait_for(found, seconds, f"{name} {states}")

    def logs(self) -> str:
        files = sorted(self.jobs.glob("submissions/*/*_log.*"))
        return "\n".join(f"== {file.name}\n{file.read_text()[-2000:]}" for file in files)


@pytest.fixture
def user(cluster: Any, tmp_path: Path, demo_data: Path) -> Iterator[User]:
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / "demo-data").symlink_to(demo_data)
    yield User(cluster, runs)
    subprocess.run(["scancel", "--user=root"])  # so that a test that fails is alone in failing


@pytest.fixture(scope="session")
def demo_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded images, made once for all tests."""
    folder = tmp_path_factory.mktemp("demo") / "demo-data"
    folder.mkdir()
    return folder


def write_backbone(path: Path) -> Path:
    """A network for small images; at 224 pixels a step takes seconds."""
    payload = {
        **backbone_payload(Embedding(build_backbone("resnet18"))),
        "input": InputSpec(64, crop_ratio=1.0).to_dict(),
        "pretraining": {},
    }
    save_checkpoint(path, "backbone", payload)
    return path


def tensors(path: Path, kind: str = "train") -> dict[str, torch.Tensor]:
    state = load_checkpoint(path, kind)
    return {**state["model"], "bank": state.get("bank", torch.zeros(1))}


def assert_same_weights(first: Path, second: Path) -> None:
    one, other = tensors(first), tensors(second)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def preempt_twice(user: User, by: str, begun: Any, further: Any) -> None:
    """Takes its nodes from the job `disturbed` by a signal, then by a requeue; it comes back."""
    job = user.job_id("disturbed")
    wait_for(begun, 240, "a few steps")
    subprocess.run(["scancel", f"--signal={by}", job], check=True)
    wait_for(lambda: user.statuses()["disturbed"].attempts == 2, 240, "a second attempt")
    wait_for(further, 240, "more steps")
    subprocess.run(["scontrol", "requeue", job], check=True)
    assert user.wait("disturbed", "done").attempts == 3
    assert user.wait("calm", "done").attempts == 1
    attempts = read_status(user.jobs / "disturbed")["attempts"]
    assert [each["outcome"] for each in attempts] == ["interrupted", "interrupted", "done"]


def test_a_preempted_pretraining_comes_back_and_ends_the_same(user: User) -> None:
    for name in ("calm", "disturbed"):
        user.submit("--nodes", "2", "--name", name, "pretrain", *PRETRAIN,
                    "--output", str(user.runs / name))  # fmt: skip
    steps = functools.partial(user.rows, "disturbed")
    preempt_twice(user, "USR2", lambda: steps() >= 3, lambda: steps() >= 10)
    assert_same_weights(user.runs / "calm" / "last.pt", user.runs / "disturbed" / "last.pt")


def test_a_preempted_fine_tuning_comes_back_and_ends_the_same(user: User) -> None:
    weights = write_backbone(user.runs / "random" / "backbone.pt")
    for name in ("calm", "disturbed"):
        user.submit("--name", name, "semisup", *SEMISUP, "--weights", str(weights),
                    "--output", str(user.runs / name))  # fmt: skip
    # SIGTERM is what preemption sends, and it reaches the loader's processes too.
    steps = functools.partial(user.rows, "disturbed")
    preempt_twice(user, "TERM", lambda: steps() >= 4, lambda: steps() >= 12)
    (calm,) = (user.runs / "calm").glob("*/last.pt")
    (disturbed,) = (user.runs / "disturbed").glob("*/last.pt")
    assert_same_weights(calm, disturbed)


def test_a_killed_process_fails_the_job_and_submitting_again_goes_on(user: User) -> None:
    flags = ["--nodes", "2", "--name", "victim", "pretrain", *PRETRAIN, "--save-minutes", "0"]
    flags += ["--output", str(user.runs / "victim")]
    user.submit(*flags)
    wait_for(lambda: user.rows("victim") >= 3, 240, "three steps")
    index = next(user.jobs.glob("submissions/*/index.json"))
    found = subprocess.run(
        ["pgrep", "-f", f"slurm.attempt run {index}"], capture_output=True, text=True
    )
    pids = [int(pid) for pid in found.stdout.split()]
    ranks = {pid: _rank(pid) for pid in pids}
    (second,) = [pid for pid, rank in ranks.items() if rank == "1"]
    os.kill(second, signal.SIGKILL)
    killed = time.monotonic()
    failed = user.wait("victim", "failed", seconds=60)
    assert time.monotonic() - killed < 60
    assert "process 1 of 2 was killed" in failed.detail
    assert user.cluster.wait_state(user.job_id("victim"), "FAILED", seconds=30) == "FAILED"
    user.submit(*flags)
    user.wait("victim", "done")
    log = (user.runs / "victim" / "log.txt").read_text()
    assert "going on after step" in log


def test_a_job_whose_node_vanishes_is_requeued_and_ends_the_same(user: User) -> None:
    """First the node of its second process, then the one that runs its batch script too."""
    flags = ["pretrain", *PRETRAIN, "--epochs", "3", "--save-minutes", "0", "--output"]
    user.submit("--nodes", "2", "--name", "disturbed", *flags, str(user.runs / "disturbed"))
    job = user.job_id("disturbed")
    for node, rows in (("n2", 2), ("n1", 8)):
        wait_for(lambda rows=rows: user.rows("disturbed") >= rows, 240, f"{rows} steps")
        try:
            user.cluster.lose_node(node, _processes_on(user, node))
            wait_for(lambda: user.cluster.state(job) != "RUNNING", 120, "the loss to be noticed")
        finally:
            user.cluster.start_node(node)
    # A node that is back may still end what it had of the job, and with it the next attempt.
    assert user.wait("disturbed", "done").attempts >= 3
    assert "rank 1 of 2 (process" in user.logs()
    user.submit("--nodes", "2", "--name", "calm", *flags, str(user.runs / "calm"))
    assert user.wait("calm", "done").attempts == 1
    assert_same_weights(user.runs / "calm" / "last.pt", user.runs / "disturbed" / "last.pt")


def _processes_on(user: User, node: str) -> list[int]:
    """Processes of jobs on a node, and the daemons that started them."""
    found = []
    for pid in user.cluster.left_over():
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"SLURMD_NODENAME={node}".encode() in variables:
            found += [pid, int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])]
    return sorted(set(found) - {1, os.getpid()}, reverse=True)


def _rank(pid: int) -> str | None:
    """Rank of a process that srun started; srun itself has none."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    values = dict(word.partition("=")[::2] for word in variables)
    return values.get("SLURM_PROCID") if "SLURM_LOCALID" in values else None


def test_a_job_that_fails_says_so_and_its_dependants_do_not_start(
    user: User, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "images"
    empty.mkdir()  # there when it is checked, and no data set when it runs
    user.submit("study", "embedding", "--data", str(empty), "--skip", "report")
    names = [f"imagenet-resnet18{suffix}-seed0" for suffix in ("-dim32", "-dim64", "", "-dim256")]
    for name in names:
        assert str(empty) in user.wait(name, "failed").detail
    for name in names:
        assert user.wait(f"{name}-knn", "stopped").attempts == 0
        assert not (user.runs / "studies" / "seed0" / name.removesuffix("-seed0") / "knn").exists()
    # Four pretrainings as an array at the site's limit, and the readouts as their counterparts.
    assert {user.job_id(name).partition("_")[2] for name in names} == {"0", "1", "2", "3"}
    assert user.cluster.state(user.job_id(names[0])) == "FAILED"
    capsys.readouterr()
    assert status.main(["--jobs", str(user.jobs)]) == 0
    shown = capsys.readouterr().out
    assert "4 failed" in shown
    assert "4 stopped" in shown


def test_an_array_larger_than_the_limit_is_cut(
    user: User, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    held_jobs = tmp_path / "hold.toml"
    held_jobs.write_text("sbatch = {hold = true}\n")
    user.submit("--resources", str(held_jobs), "study", "table1", "--cifar", str(images),
                "--skip", "report")  # fmt: skip
    ids = {user.job_id(f"cifar10-{row}-seed0") for row in ("parametric", "nce-1", "softmax")}
    arrays = {job_id.partition("_")[0] for job_id in ids}
    assert len(arrays) == 2
    held = subprocess.run(["squeue", "-h", "-r", "-o", "%i"], capture_output=True, text=True)
    assert len(held.stdout.split()) == 20
    subprocess.run(["scancel", *held.stdout.split()], check=True)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--partition", "nowhere"], "nothing was queued"),
        (["--nodes", "3"], "nothing was queued"),
    ],
)
def test_what_slurm_refuses_is_one_line_and_nothing_is_queued(
    user: User, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit.main([*flags, "study", "demo"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    queue = subprocess.run(["squeue", "-h", "-t", "PD,R"], capture_output=True, text=True).stdout
    assert queue == ""


def test_names_and_arguments_are_only_text(user: User, tmp_path: Path) -> None:
    bait = tmp_path / "bait"
    name = f"$(touch {bait}) `touch {bait}`; touch {bait} #'\""
    output = user.runs / name.replace("/", "_")
    user.submit("--name", name, "pretrain", *PRETRAIN, "--output", str(output), "--epochs", "1")
    assert user.wait(name, "done").name == name
    assert (output / "backbone.pt").exists()
    assert not bait.exists()
    listed = subprocess.run(["scontrol", "show", "job"], capture_output=True, text=True).stdout
    assert "touch" in listed


DETECT = shlex.split(
    "--cfg faster_r18 --pictures 0 SOLVER.IMS_PER_BATCH 2 SOLVER.MAX_ITER 30 "
    "SOLVER.CHECKPOINT_PERIOD 3 MODEL.RPN.BATCH_SIZE_PER_IMAGE 16 "
    "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE 16 INPUT.MIN_SIZE_TRAIN (64,) INPUT.MIN_SIZE_TEST 64 "
    "TEST.DETECTIONS_PER_IMAGE 5 MODEL.RPN.POST_NMS_TOPK_TEST 20"
)


def test_a_preempted_detection_comes_back_and_ends_the_same(user: User) -> None:
    weights = write_backbone(user.runs / "random" / "backbone.pt")
    for name in ("calm", "disturbed"):
        user.submit("--name", name, "detect", *DETECT[:4], "--weights", str(weights),
                    "--output", str(user.runs / name), *DETECT[4:])  # fmt: skip
    disturbed = user.runs / "disturbed"

    def iteration() -> int:
        # Detectron2 writes its numbers every twenty iterations only.
        names = [file.stem for file in disturbed.glob("trial-0/model_0*.pth")]
        return max((int(name.removeprefix("model_")) for name in names), default=0)

    preempt_twice(user, "USR2", lambda: iteration() >= 2, lambda: iteration() >= 11)
    assert "going on with iteration" in (disturbed / "log.txt").read_text()
    first, second = (
        torch.load(user.runs / name / "trial-0" / "model_final.pth", weights_only=True)["model"]
        for name in ("calm", "disturbed")
    )
    assert all(torch.equal(value, second[key]) for key, value in first.items())


def test_a_study_on_two_nodes_end_to_end(user: User, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--nodes", "2", "study", "demo", "--scale", "quick"]
    user.submit(*command)
    first = "demo-resnet18-seed0"
    names = [first, *(f"{first}-{task}" for task in ("export", "knn", "semisup", "detect"))]
    for name in [*names, "report"]:
        user.wait(name, "done")
    run = user.runs / "studies" / "seed0" / "demo-resnet18"
    for log in (run, run / "detect"):
        assert "2 process(es) on cpu" in (log / "log.txt").read_text()
    assert (run / "export" / "detectron2.pkl").exists()
    rows = [json.loads(line) for line in (user.runs / "results.jsonl").read_text().splitlines()]
    assert {row["task"] for row in rows} == {"knn", "semisup", "detect"}
    assert {row["dataset"] for row in rows} == {"demo"}
    assert (user.runs / "report" / "report.html").exists()
    # Dependants began when what they need was there.
    attempts = {name: read_status(user.jobs / name)["attempts"][0] for name in [*names, "report"]}
    assert all(attempts[name]["started"] >= attempts[first]["ended"] for name in names[1:])
    assert attempts["report"]["started"] >= max(attempts[name]["ended"] for name in names)
    capsys.readouterr()
    user.submit(*command)
    assert "nothing to do: 6 jobs: 6 done" in capsys.readouterr().out


def test_a_study_with_a_job_that_fails_ends_with_a_report_that_names_it(
    user: User, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--nodes", "2", "study", "demo", "--scale", "quick", "--skip", "detect", "--flags",
               "pretrain=--log-every 1 --epochs 4"]  # fmt: skip
    bad, first = "--no-such-flag", "demo-resnet18-seed0"
    user.submit("--no-check", *command, f"semisup={bad}")
    # A job that is requeued has not ended: the report still waits for it.
    wait_for(lambda: user.rows("studies/seed0/demo-resnet18") >= 3, 240, "three steps")
    subprocess.run(["scancel", "--signal=USR2", user.job_id(first)], check=True)
    assert bad in user.wait(f"{first}-semisup", "failed").detail
    user.wait("report", "done")
    done = (first, f"{first}-export", f"{first}-knn")
    assert {user.statuses()[name].state for name in done} == {"done"}
    ends = {name: read_status(user.jobs / name)["attempts"] for name in (*done, "report")}
    assert len(ends[first]) == 2
    assert ends["report"][0]["started"] >= max(ends[name][-1]["ended"] for name in done)
    page = (user.runs / "report" / "report.html").read_text("utf-8")
    assert f"these jobs failed or were not run: {first}-semisup." in page
    assert "knn" in page
    capsys.readouterr()
    user.submit("--dry-run", *command)
    assert "5 jobs: 3 done, 2 to run" in capsys.readouterr().out


def test_all_studies_end_with_a_report_whatever_fails(user: User, tmp_path: Path) -> None:
    empty = tmp_path / "images"
    empty.mkdir()
    where = [f"--{name}={empty}" for name in ("data", "cifar", "places", "voc-root")]
    user.submit("--tasks", "2", "study", "all", *where, "--archs", "alexnet")
    user.wait("report", "done", seconds=1200)  # twenty jobs start, two processes each
    others = {name: each for name, each in user.statuses().items() if name != "report"}
    failed = {name for name, each in others.items() if each.attempts}
    # What started has failed, all of it, and what depends on it did not start.
    assert {"proposals", "cifar10-softmax-seed0", "imagenet-resnet18-dim32-seed0"} <= failed
    assert {others[name].state for name in failed} == {"failed"}
    assert {others[name].state for name in set(others) - failed} == {"stopped"}
    page = (user.runs / "report" / "report.html").read_text("utf-8")
    assert all(name in page for name in others)

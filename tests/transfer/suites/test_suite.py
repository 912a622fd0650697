"""The suite: what it plans, what it skips, how it goes on after failures and stops on signals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from instdisc.errors import EXIT_INTERRUPTED, UserError
from instdisc.names import STOP_SIGNALS
from instdisc.runs.results import read_results
from transfer.suite import main
from transfer.suites import suite
from transfer.suites.settings import TASKS, SuiteConfig
from transfer.suites.suite import Part, plan


@pytest.fixture
def network(tmp_path: Path) -> Path:
    """Something with the name of a backbone and a config beside it; nothing opens it here."""
    folder = tmp_path / "runs" / "pretrain" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"arch": "resnet50"}')
    (folder / "backbone.pt").write_bytes(b"weights")
    return folder


class Fake:
    """Stands for the processes: ends each task with the next of its exit codes, 0 if none."""

    def __init__(self) -> None:
        self.codes: dict[str, list[int]] = {}
        self.ran: list[str] = []

    def run(self, runner: object, command: list[str], keep: object = ()) -> int:
        task = command[3].removeprefix("transfer.")
        self.ran.append(task)
        left = self.codes.get(task, [])
        return left.pop(0) if left else 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """No process is started."""
    fake = Fake()
    monkeypatch.setattr(suite.Runner, "run", lambda *given, **more: fake.run(*given, **more))
    return fake


def flag(part: Part, name: str) -> str:
    return part.flags[part.flags.index(name) + 1]


def test_all_tasks_of_all_networks_cheap_ones_first(network: Path) -> None:
    config = SuiteConfig(
        weights=(str(network), "random:resnet18:2"), data="images", voc_root="devkit", workers=0
    )
    parts = plan(config)
    assert [(part.task, part.network.label) for part in parts] == [
        (task, name) for task in TASKS for name in ("mine", "random:resnet18:2")
    ]
    assert TASKS == ("knn", "retrieve", "fewshot", "voc_svm", "linear", "semisup", "detect")
    knn, voc, semisup, detect, detect_random = (parts[n] for n in (0, 6, 10, 12, 13))
    assert flag(knn, "--weights") == str(network / "backbone.pt")
    assert flag(knn, "--data") == "images"
    assert knn.volatile == ("--device", "auto", "--workers", "0")
    assert flag(semisup, "--labeled") == "0.01"
    assert flag(voc, "--voc-root") == "devkit"
    assert "--data" not in voc.flags
    assert voc.flags[-1] == "--low-shot"
    assert flag(detect, "--cfg") == "faster_r50"
    assert flag(detect_random, "--cfg") == "faster_r18"
    assert flag(detect_random, "--init") == "scratch"
    assert "--weights" not in detect_random.flags


def test_a_network_without_a_detector_is_left_out_with_a_reason(
    capsys: pytest.CaptureFixture[str], fake: Fake
) -> None:
    assert main(["--weights", "timm:resnet10t", "--tasks", "detect", "--no-report"]) == 0
    assert "no detector for timm:resnet10t" in capsys.readouterr().out
    assert main(["--weights", "random:timm:resnet10t", "--tasks", "detect", "--no-report"]) == 0
    assert "no detector for random:timm:resnet10t" in capsys.readouterr().out
    assert fake.ran == []


def test_the_newest_run_is_the_default(network: Path) -> None:
    assert {part.network.label for part in plan(SuiteConfig())} == {"mine"}


def test_failures_do_not_stop_it_and_are_named_and_repeated(
    network: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.codes["retrieve"] = [2]
    assert main(["--weights", str(network), "--no-report"]) == 1
    shown = capsys.readouterr().out
    assert "FAILED: retrieve of mine (exit code 2)" in shown
    assert fake.ran == list(TASKS)
    fake.ran.clear()
    assert main(["--weights", str(network), "--no-report", "-j", "3"]) == 0
    assert fake.ran == ["retrieve"]
    fake.ran.clear()
    assert main(["--weights", str(network), "--no-report", "--tasks", "knn", "--again"]) == 0
    assert fake.ran == ["knn"]


@pytest.mark.parametrize("change", ["weights", "flags", "environment"])
def test_what_changes_the_result_is_run_again(
    change: str, network: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--weights", str(network), "--no-report", "--tasks", "knn"]
    assert main(argv) == 0
    if change == "weights":
        (network / "backbone.pt").write_bytes(b"other weights")
    elif change == "flags":
        argv += ["--extra", "knn --k 20"]
    else:
        monkeypatch.setenv("INSTDISC_DATA", "elsewhere")
    fake.ran.clear()
    assert main(argv) == 0
    assert fake.ran == ["knn"]


def test_a_stopped_task_stops_the_suite_and_is_no_finished_part(
    network: Path, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.codes["retrieve"] = [EXIT_INTERRUPTED]
    assert main(["--weights", str(network), "--no-report"]) == EXIT_INTERRUPTED
    assert "retrieve of mine" in capsys.readouterr().err
    assert fake.ran == ["knn", "retrieve"]
    fake.ran.clear()
    assert main(["--weights", str(network), "--no-report"]) == 0
    assert fake.ran == list(TASKS[1:])


SUITE = """
import sys
from transfer import suite
from transfer.suites import suite as suite_task
child = "import os, time; print('child', os.getpid(), flush=True); time.sleep(60)"
sleep = [sys.executable, "-c", child]
suite_task.Part.command = property(lambda part: sleep)
sys.exit(suite.main(["--weights", sys.argv[1], "--tasks", "knn", "--no-report"]))
"""


def start_suite(network: Path) -> subprocess.Popen[str]:
    """The suite in a process, with a task that sleeps for a minute."""
    command, pipe = [sys.executable, "-c", SUITE, str(network)], subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env={**os.environ})


def read_until(process: subprocess.Popen[str], words: str) -> str:
    """The first line of its output that has these words."""
    assert process.stdout is not None
    return next(line for line in process.stdout if words in line)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_to_the_suite_reaches_the_task(network: Path, number: int) -> None:
    with start_suite(network) as process:
        read_until(process, "child ")
        started = time.monotonic()
        process.send_signal(number)
        assert process.wait(30) == EXIT_INTERRUPTED
        assert time.monotonic() - started < 20


def test_the_task_of_a_killed_suite_is_waited_for(network: Path) -> None:
    """It goes on, and may hold its run folder: a second process of it would be refused."""
    with start_suite(network) as killed:
        left = int(read_until(killed, "child ").split()[1])
        killed.kill()
        with start_suite(network) as stopped:
            read_until(stopped, "waiting for its end")
            stopped.terminate()
            assert stopped.wait(30) == EXIT_INTERRUPTED
        with start_suite(network) as last:
            read_until(last, "waiting for its end")
            os.kill(left, signal.SIGKILL)
            read_until(last, "child ")
            last.terminate()
            assert last.wait(30) == EXIT_INTERRUPTED


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--weights", "nowhere.pt"], "no such run or file"),
        (["--extra", "dance --fast"], "begin with one of"),
        (["--extra", "knn 'x"], "check its quotes"),
        (["--weights", "random:alexnet", "random:alexnet"], "name each one once"),
        (["--trials", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_is_refused(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert words in capsys.readouterr().err


def test_records_say_what_ran(network: Path, fake: Fake) -> None:
    main(["--weights", str(network), "--no-report", "--tasks", "knn"])
    (record,) = (network.parents[1] / "suite" / "mine").glob("knn-*.json")
    kept = json.loads(record.read_text())
    assert (kept["task"], kept["exit_code"]) == ("knn", 0)


def test_arguments_are_those_of_the_commands(network: Path) -> None:
    """What the suite would type is what each command's own parser takes."""
    from instdisc.cli import build_parser
    from transfer.detection.settings import DetectConfig
    from transfer.finetuning.settings import SemisupConfig
    from transfer.nearest.settings import FewshotConfig, KnnConfig, RetrieveConfig
    from transfer.probing.settings import LinearConfig, VocSvmConfig

    types = {
        "knn": KnnConfig, "retrieve": RetrieveConfig, "linear": LinearConfig,
        "semisup": SemisupConfig, "detect": DetectConfig, "fewshot": FewshotConfig,
        "voc_svm": VocSvmConfig,
    }  # fmt: skip
    config = SuiteConfig(weights=(str(network),), data="x", voc_root="y", workers=1, device="cpu")
    for part in plan(config):
        parser = build_parser(types[part.task])
        given = vars(parser.parse_args([*part.volatile, *part.flags]))
        assert given["device"] == "cpu"


@pytest.mark.slow
def test_two_tasks_for_real(image_tree: Path, tmp_path: Path) -> None:
    argv = ["--weights", "random:resnet18", "--tasks", "knn", "retrieve", "--data"]
    assert main([*argv, str(image_tree), "-j", "0", "--device", "cpu"]) == 0
    assert {row.task for row in read_results()} == {"knn", "retrieve"}
    assert (tmp_path / "runs" / "report" / "report.html").exists()


def test_a_missing_arch_is_read_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(b"no checkpoint")
    with pytest.raises(UserError):
        suite.find_network(str(tmp_path / "x.pt"))


def test_coco_is_a_second_detection(network: Path) -> None:
    config = SuiteConfig(
        weights=(str(network), "random:vgg16"), tasks=("detect",), voc_root="v", coco_root="c"
    )
    voc, voc_random, coco, none = plan(config)
    assert (flag(voc, "--cfg"), flag(voc, "--voc-root")) == ("faster_r50", "v")
    assert (flag(coco, "--cfg"), flag(coco, "--coco-root")) == ("coco/mask_r50_c4_2x", "c")
    assert "--voc-root" not in coco.flags
    assert voc.record != coco.record
    assert flag(voc, "--output") != flag(coco, "--output")
    assert "vgg16" in (none.skipped or "")
    assert not voc_random.skipped

"""The login node's side, without a Slurm: what is refused, what is shown, what is not imported."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from slurm import submit
from slurm.jobs import read_submission, write_status
from slurm.resources import load_resources
from slurm.tasks import TASKS

HEAVY = ("torch", "torchvision", "timm", "detectron2", "numpy", "sklearn", "matplotlib")
SBATCH = """\
#!/bin/sh
case "$1" in --test-only) exit 0;; esac
echo "$@" >> {log}
n=$(wc -l < {log})
if [ "$n" -gt {accepted} ]; then echo "sbatch: error: quota is used up" >&2; exit 1; fi
echo "Submitted batch job $((100 + n))"
"""


def write_program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs with the names of Slurm's, for what a real one cannot be made to do."""
    programs = tmp_path / "bin"
    log = tmp_path / "sbatch.log"
    write_program(programs, "sbatch", SBATCH.format(log=log, accepted=2))
    write_program(programs, "scontrol", "#!/bin/sh\necho 'MaxArraySize = 4'\n")
    write_program(programs, "squeue", "#!/bin/sh\n")
    write_program(programs, "srun", "#!/bin/sh\n")
    write_program(programs, "scancel", f'#!/bin/sh\necho "$@" >> {tmp_path}/scancel.log\n')
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return tmp_path


@pytest.fixture
def no_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--dry-run", "pretrain", "--arch", "resnet50"],
        ["--dry-run", "semisup", "--labeled", "0.01"],
        ["--dry-run", "detect", "--cfg", "faster_r50"],
        ["--dry-run", "proposals", "make", "--split", "test"],
        ["--dry-run", "study", "demo"],
        ["pretrain", "--help"],
    ],
)
def test_help_and_dry_run_import_nothing_heavy(argv: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\nfrom slurm import submit\n"
        "try:\n    code = submit.main(sys.argv[1:])\n"
        "except SystemExit as end:\n    code = end.code\n"
        f"loaded = [name for name in {HEAVY} if name in sys.modules]\n"
        "assert not loaded, loaded\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not (tmp_path / "runs").exists(), "a look leaves nothing behind"


def test_dry_run_shows_script_and_command(
    no_slurm: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    flags = ["--nodes", "2", "--gpus", "8", "--partition", "gpu", "--time", "24h", "--cpus", "6"]
    assert submit.main([*flags, "--mem", "64G", "--dry-run", "pretrain", "--arch", "resnet50"]) == 0
    shown = capsys.readouterr().out
    assert "would run: python pretrain/run.py --arch resnet50" in shown
    for line in ("nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "partition=gpu", "time=1440"):
        assert f"#SBATCH --{line}\n" in shown
    for line in ("signal=USR2@120", "cpus-per-task=6", "mem=64G", "requeue"):
        assert f"#SBATCH --{line}\n" in shown
    assert "--kill-on-bad-exit=1" in shown
    assert list(tmp_path.iterdir()) == []


def test_a_site_is_asked_for_nothing_by_default(
    no_slurm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    submit.main(["--dry-run", "knn"])
    shown = capsys.readouterr().out
    for word in ("--time", "--partition", "--mem", "--wckey", "--gpus", "--account"):
        assert f"#SBATCH {word}" not in shown


def test_a_name_is_quoted_in_the_script(no_slurm: None, capsys: pytest.CaptureFixture[str]) -> None:
    submit.main(["--dry-run", "--name", "$(touch x)", "knn"])
    assert "#SBATCH --job-name='$(touch x)'\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name a task"),
        (["fly"], "no task 'fly'"),
        (["study"], "name one of table1"),
        (["study", "table9"], "no study 'table9'"),
        (["--nodes", "0", "knn"], "--nodes must be at least 1"),
        (["--nodes", "2", "export"], "export is one process"),
        (["--time", "soon", "knn"], "--time soon"),
        (["--name", "a\nb", "knn"], "line break"),
        (["--parallel", "0", "knn"], "--parallel"),
        (["--cluster", "local", "--nodes", "2", "knn"], "one machine"),
        (["--resources", "none.toml", "knn"], "no such file"),
        # The command's own checks.
        (["pretrain", "--arch", "resnet51"], "invalid choice"),
        (["pretrain", "--lr", "-1"], "--lr must be positive"),
        (["pretrain", "--data", "nowhere"], "does not exist"),
        (["semisup", "--labeled", "5"], "write 0.01 for 1%"),
        (["detect", "--cfg", "nowhere.yaml"], "no such file"),
        (["study", "places", "--data", "."], "--places DIR"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_queued(
    fake_slurm: Path,
    argv: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(fake_slurm)
    try:
        code = submit.main(argv)
    except SystemExit as end:
        code = int(str(end.code))
    assert code == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert not (fake_slurm / "sbatch.log").exists()


def test_without_slurm_it_says_what_to_do(
    no_slurm: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit.main(["knn"]) == 2
    error = capsys.readouterr().err
    assert "scontrol is not on this machine" in error
    assert "--cluster local" in error


def test_a_job_folder_that_cannot_be_written_is_found_before_anything_is_queued(
    fake_slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (fake_slurm / "file").write_text("")
    for folder in (fake_slurm / "file" / "jobs", Path("/proc/jobs")):
        assert submit.main(["--jobs", str(folder), "knn"]) == 2
        assert "cannot be written" in capsys.readouterr().err
    assert not (fake_slurm / "sbatch.log").exists()


def test_a_folder_that_slurm_would_rename_is_refused(
    fake_slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit.main(["--jobs", str(fake_slurm / "%j"), "knn"]) == 2
    assert "has a % in its name" in capsys.readouterr().err


def test_a_study_that_is_refused_half_way_is_withdrawn(
    fake_slurm: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "cifar").mkdir()
    assert submit.main(["study", "table1", "--cifar", str(tmp_path / "cifar")]) == 2
    assert "quota is used up" in capsys.readouterr().err
    cancelled = (fake_slurm / "scancel.log").read_text().split()
    assert cancelled == ["101", "102"]


def test_submissions_are_cut_to_the_sites_limit(fake_slurm: Path, tmp_path: Path) -> None:
    write_program(
        tmp_path / "bin", "sbatch", SBATCH.format(log=tmp_path / "sbatch.log", accepted=99)
    )
    (tmp_path / "cifar").mkdir()
    argv = ["study", "table1", "--cifar", str(tmp_path / "cifar"), "--skip", "report"]
    assert submit.main(argv) == 0
    jobs = Path(os.environ["INSTDISC_RUNS"]) / "slurm"
    found = [read_submission(folder.parent)["job_id"] for folder in jobs.glob("*/job.json")]
    sizes: dict[str, int] = {}
    for job_id in found:
        array = job_id.partition("_")[0]
        sizes[array] = sizes.get(array, 0) + 1
    # Pretrainings 4 + 2; readouts of the first four correspond to them; the last run has four
    # readouts, two of them of its untrained network, so those of the last two runs do not.
    assert sorted(sizes.values()) == [1, 1, 1, 1, 2, 2, 4, 4, 4]
    assert len(set(found)) == 20
    scripts = [path.read_text() for path in jobs.glob("submissions/*/*_submission.sh")]
    assert sum("aftercorr" in text for text in scripts) == 2


def test_what_is_in_the_queue_is_not_submitted_twice(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "sbatch.log"
    write_program(tmp_path / "bin", "sbatch", SBATCH.format(log=log, accepted=99))
    command = ["study", "demo", "--skip", "report", "detect"]
    assert submit.main(command) == 0
    first = len(log.read_text().splitlines())
    jobs = Path(os.environ["INSTDISC_RUNS"]) / "slurm"
    ids = [json.loads(path.read_text())["job_id"] for path in jobs.glob("*/submission.json")]
    lines = "".join(f"{job_id}|PENDING|Priority|0:00|\n" for job_id in ids[1:])
    (tmp_path / "queue").write_text(lines)
    write_program(tmp_path / "bin", "squeue", f"#!/bin/sh\ncat {tmp_path}/queue\n")
    capsys.readouterr()
    assert submit.main(command) == 0
    assert "4 jobs: 3 queued, 1 to run" in capsys.readouterr().out
    assert len(log.read_text().splitlines()) == first + 1


@pytest.mark.parametrize(
    ("own", "in_queue", "said"),
    [
        ("done", "COMPLETING", "nothing to do: 1 job: 1 done"),
        ("done", "RUNNING", "nothing to do: 1 job: 1 done"),  # its batch script has not ended yet
        ("failed", "COMPLETING", "submitted 102"),
        ("failed", "PENDING", "nothing to do: 1 job: 1 queued"),  # somebody has requeued it
        ("running", "COMPLETING", "nothing to do: 1 job: 1 queued"),
    ],
)
def test_a_job_that_is_leaving_the_queue_has_ended(
    fake_slurm: Path, capsys: pytest.CaptureFixture[str], own: str, in_queue: str, said: str
) -> None:
    command = ["--name", "one", "pretrain", "--data", "demo"]
    assert submit.main(command) == 0
    folder = Path(os.environ["INSTDISC_RUNS"]) / "slurm" / "one"
    write_status(folder, {"state": own, "attempts": [{"number": 0}]})
    line = f"{read_submission(folder)['job_id']}|{in_queue}|None|0:12|n1"
    write_program(fake_slurm / "bin", "squeue", f"#!/bin/sh\necho '{line}'\n")
    capsys.readouterr()
    assert submit.main(command) == 0
    assert said in capsys.readouterr().out


def test_resources_can_differ_between_the_tasks_of_a_study(
    no_slurm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "slurm.toml"
    file.write_text("gpus = 8\n[pretrain]\nnodes = 4\n[knn]\ngpus = 1\n")
    argv = ["--resources", str(file), "--dry-run", "study", "demo"]
    assert submit.main(argv) == 0
    shown = capsys.readouterr().out
    assert "pretrain  4 nodes x 8 GPUs" in shown
    assert "knn       1 node x 1 GPU" in shown
    assert "semisup   1 node x 8 GPUs" in shown
    assert "export    1 node x 1 GPU\n" in shown


def test_dry_run_says_cores_and_workers_of_each_process(
    no_slurm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--dry-run", "--nodes", "2", "--gpus", "8"]
    assert submit.main([*flags, "pretrain", "--arch", "resnet50", "--workers", "9"]) == 0
    shown = capsys.readouterr().out
    assert "pretrain  each process: 10 cores, 9 loader workers\n" in shown
    assert "#SBATCH --cpus-per-task=10\n" in shown
    assert "--cpus-per-task=10 " in shown.partition("srun ")[2]
    assert submit.main([*flags, "pretrain"]) == 0  # embedded images have no loader workers
    assert "each process: 4 cores, 0 loader workers\n" in capsys.readouterr().out
    assert submit.main([*flags, "--cpus", "3", "--no-check", "pretrain", "--data", "/far"]) == 0
    assert "each process: 3 cores, 4 loader workers\n" in capsys.readouterr().out
    assert submit.main(["--dry-run", "--tasks", "2", "pretrain"]) == 0
    assert "each process: cores are left to Slurm, 0 loader workers" in capsys.readouterr().out
    study = ["study", "detection", "--data", str(tmp_path), "--voc-root", str(tmp_path)]
    assert submit.main(["--dry-run", "--gpus", "8", *study]) == 0
    shown = capsys.readouterr().out
    assert "detect    each process: 5 cores, 4 loader workers\n" in shown
    assert "proposals each process: 32 cores\n" in shown  # those of eight processes


def test_the_script_that_is_submitted_is_the_one_that_is_shown(
    fake_slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cifar").mkdir()
    file = tmp_path / "site.toml"
    file.write_text('gpus = 2\npython = ["run in", "python"]\nsrun = ["--mpi=a b"]\n')
    skip = ["--skip", "knn", "linear", "report"]
    for command in (
        ["--name", "one", "pretrain"],
        ["study", "ablations", "--cifar", str(tmp_path / "cifar"), *skip],
    ):
        argv = ["--resources", str(file), *command]
        capsys.readouterr()
        assert submit.main(["--dry-run", *argv]) == 0
        shown = capsys.readouterr().out.partition("#!/bin/bash")[2].strip()
        assert "'--mpi=a b' 'run in' python -u -m slurm.attempt run " in shown
        before = {*tmp_path.rglob("*_submission.sh")}
        assert submit.main(argv) == 0
        (script,) = {*tmp_path.rglob("*_submission.sh")} - before
        shown = shown.replace("submissions/dry-run", f"submissions/{script.parent.name}")
        assert script.read_text().partition("#!/bin/bash")[2].strip() == shown


# The sites of docs/slurm.md, in its order: what each of them makes of one command.
SITES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "plain": (
        ("--account=vision", "--partition=gpu", "--nodes=4", "--ntasks-per-node=8", "--time=1440",
         "--gpus-per-node=8", "--cpus-per-task=8", "--mail-type=FAIL"),
        ("--cpus-per-task=8",),
        ("module load cuda",),
    ),
    "gres": (
        ("--partition=batch", "--nodes=1", "--ntasks-per-node=4", "--gres=gpu:v100:4", "--time=720",
         "--cpus-per-task=8", "--mem=180G"),
        ("--cpus-per-task=8",),
        (),
    ),
    "container": (
        ("--partition=gpu", "--ntasks-per-node=8", "--gpus-per-task=1", "--cpus-per-task=12"),
        ("--cpus-per-task=12", "--container-image=/images/instdisc.sqsh",
         "--container-mounts=/data,/scratch", "--mpi=none", "python"),
        (),
    ),
}  # fmt: skip


def examples(repo: Path) -> list[str]:
    text = (repo / "docs" / "slurm.md").read_text(encoding="utf-8")
    return re.findall(r"```toml\n(.*?)```", text, re.DOTALL)


def dry_run(capsys: pytest.CaptureFixture[str], file: Path, *words: str) -> list[str]:
    assert submit.main(["--dry-run", "--resources", str(file), *words]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("site", SITES)
def test_a_documented_site_has_the_documented_lines(
    no_slurm: None, repo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], site: str
) -> None:
    assert len(examples(repo)) == len(SITES)
    file = tmp_path / "slurm.toml"
    file.write_text(examples(repo)[list(SITES).index(site)])
    options, arguments, setup = SITES[site]
    lines = dry_run(capsys, file, "pretrain", "--workers", "7")
    assert {f"#SBATCH {option}" for option in options} <= set(lines)
    asks = [line for line in lines if re.match(r"#SBATCH --(gres|gpus)", line)]
    assert len(asks) == 1
    (srun,) = [line for line in lines if line.startswith("srun ")]
    words = shlex.split(srun)
    own = words[words.index("--open-mode=append") + 1 : words.index("-u")]
    assert own == [*arguments, *([] if "python" in arguments else [sys.executable])]
    assert set(setup) <= set(lines)
    (begin,) = [line for line in lines if "slurm.attempt begin" in line]
    assert sys.executable in begin


def test_the_documented_site_without_gpus_for_proposals(
    no_slurm: None, repo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "slurm.toml"
    file.write_text(examples(repo)[1])
    lines = dry_run(capsys, file, "proposals", "make", "--split", "trainval", "test")
    asked = {"partition=cpu", "cpus-per-task=32", "mem=64G", "ntasks-per-node=1"}
    assert {f"#SBATCH --{option}" for option in asked} <= set(lines)
    assert not [line for line in lines if "gres" in line]


@pytest.mark.parametrize("words", [("export", "--weights", "random:resnet18"), ("report",)])
def test_a_command_of_one_process_takes_one_gpu_of_the_sites_file(
    no_slurm: None, repo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:  # fmt: skip
    file = tmp_path / "slurm.toml"
    file.write_text(examples(repo)[0])
    lines = dry_run(capsys, file, *words)
    assert {"#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=1"} <= set(lines)


def test_every_line_of_the_table_of_sites_is_read(repo: Path, tmp_path: Path) -> None:
    text = (repo / "docs" / "slurm.md").read_text(encoding="utf-8")
    table = text.partition("| what differs |")[2].partition("\n\n")[0]
    lines = [line for line in re.findall(r"`([^`]+)`", table) if " = " in line]
    assert len(lines) > 15
    file = tmp_path / "slurm.toml"
    for line in lines:
        file.write_text(line)
        load_resources({}, "pretrain", TASKS, file)

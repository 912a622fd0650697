from pathlib import Path
from typing import Any

import pytest

from instdisc.errors import UserError
from slurm.resources import Resources, load_resources, parse_minutes

TASKS = ("pretrain", "knn")


@pytest.fixture(autouse=True)
def _nobodys_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("90m", 90), ("24h", 1440), ("2d", 2880), ("1d12h", 2160), ("2h30m", 150),
     ("1-02:03:04", 1564), ("00:10:00", 10)],
)  # fmt: skip
def test_times(text: str, minutes: int) -> None:
    assert parse_minutes(text) == minutes


@pytest.mark.parametrize("text", ["", "soon", "0", "0h", "1.5h", "24 h", "-1", "10:00"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(UserError, match="--time"):
        parse_minutes(text)


def test_flags_win_over_the_task_over_the_folder_over_the_home(tmp_path: Path) -> None:
    home = tmp_path / "home" / "instdisc"
    home.mkdir(parents=True)
    (home / "slurm.toml").write_text('partition = "home"\naccount = "mine"\ncpus = 1\n')
    (tmp_path / "slurm.toml").write_text('partition = "here"\n[pretrain]\ncpus = 8\nnodes = 2\n')
    found = load_resources({"nodes": 4}, "pretrain", TASKS)
    assert (found.partition, found.account, found.cpus, found.nodes) == ("here", "mine", 8, 4)
    other = load_resources({}, "knn", TASKS)
    assert (other.partition, other.cpus, other.nodes) == ("here", 1, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partion = 'gpu'", "unknown key partion"),
        ("nodes = '2'", "wrong type"),
        ("nodes = true", "wrong type"),
        ("setup = 'module load x'", "wrong type"),
        ("srun = '--mpi=none'", "wrong type"),
        ("python = [3]", "wrong type"),
        ("nodes = ", "not TOML"),
        ("[knn]\ngpu = 1", "unknown key gpu"),
    ],
)
def test_a_file_with_a_mistake_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "slurm.toml").write_text(text)
    with pytest.raises(UserError, match=rf"slurm.toml.*{message}"):
        load_resources({}, "knn", TASKS)


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        load_resources({}, "knn", TASKS, tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nodes": 0}, "--nodes"),
        ({"gpus": -1}, "--gpus"),
        ({"gpus": 2, "tasks": 2}, "leave --tasks out"),
        ({"mem": "lots"}, "--mem"),
        ({"time": "2m", "signal_delay": 120}, "told to stop as it starts"),
        ({"partition": "a\nrm -r b"}, "line break"),
        ({"sbatch": {"comment": "a\nb"}}, "line break"),
        ({"sbatch": {"a\nb": 1}}, "line break"),
        ({"srun": ("a\nb",)}, "line break"),
        ({"python": ()}, "name a command"),
        ({"gpu_request": "gpu"}, "gres=gpu"),
        ({"gpu_request": "gres=gpu:{count}"}, "gres=gpu"),
    ],
)
def test_values_that_slurm_or_the_script_could_not_take(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        Resources(**values)


def test_processes() -> None:
    assert Resources(nodes=2, gpus=8).num_processes == 16
    assert Resources(nodes=2, tasks=3).num_processes == 6
    alone = Resources(nodes=2, gpus=8, partition="gpu").for_one_process()
    assert (alone.num_processes, alone.gpus, alone.partition) == (1, 1, "gpu")


def test_nothing_is_asked_for_that_was_not_given() -> None:
    options = Resources().sbatch_options()
    given = {name for name, value in options.items() if value is not None}
    assert given == {"nodes", "ntasks_per_node", "signal_delay_s", "additional_parameters"}
    assert options["time"] is None


def test_cores_are_asked_for_where_there_are_gpus_and_no_number_was_given() -> None:
    assert Resources(gpus=8).with_cores(5).cpus == 5
    assert Resources(gpus=8, cpus=2).with_cores(5).cpus == 2
    assert Resources(tasks=2).with_cores(5).cpus is None


@pytest.mark.parametrize(
    ("request_", "name", "value"),
    [
        ("gpus-per-node={gpus}", "gpus-per-node", "4"),
        ("gres=gpu:a100:{gpus}", "gres", "gpu:a100:4"),
        ("gpus-per-task=1", "gpus-per-task", "1"),
    ],
)
def test_gpus_are_asked_for_as_the_site_wants_it(request_: str, name: str, value: str) -> None:
    wanted = Resources(gpus=4, gpu_request=request_)
    assert wanted.sbatch_options()["additional_parameters"][name] == value
    none = Resources(gpu_request=request_).sbatch_options()
    assert name not in none["additional_parameters"]

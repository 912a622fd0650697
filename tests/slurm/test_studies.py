"""Studies: which jobs, what they share, and that every command would accept its arguments."""

import collections
from pathlib import Path

import pytest

from instdisc.errors import UserError
from pretrain.config import PretrainConfig
from slurm.jobs import Job
from slurm.resources import Resources
from slurm.studies import (
    BUILDERS,
    StudyConfig,
    build_study,
    count_states,
    describe_cost,
    draw_tree,
    estimate_hours,
)
from slurm.tasks import TASKS, check_arguments, run_folder


@pytest.fixture
def config(tmp_path: Path) -> StudyConfig:
    folder = tmp_path / "images"
    folder.mkdir()
    (tmp_path / "r50.pth").write_text("")
    return StudyConfig(
        data=str(folder),
        cifar=str(folder),
        places=str(folder),
        supervised=(f"resnet50={tmp_path / 'r50.pth'}",),
    )


def counts(jobs: list[Job]) -> dict[str, int]:
    return dict(collections.Counter(job.task for job in jobs if job.task != "report"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("table1", {"pretrain": 6, "knn": 6, "linear": 6}),
        ("ablations", {"pretrain": 3, "knn": 3, "linear": 3}),
        ("table2", {"pretrain": 4, "knn": 5, "linear": 5}),
        ("places", {"pretrain": 4, "knn": 4, "linear": 4}),
        ("embedding", {"pretrain": 4, "knn": 4}),
        ("data-size", {"pretrain": 5, "knn": 5}),
        ("semisup", {"pretrain": 1, "semisup": 10}),
        ("detection", {"pretrain": 3, "export": 3, "detect": 7}),
        ("demo", {"pretrain": 1, "export": 1, "knn": 1, "semisup": 1, "detect": 1}),
        # 6 for table1, 2 ablations, 4 networks, 3 other embeddings, 4 other parts of the images.
        ("all", {"pretrain": 19, "export": 3, "knn": 24, "linear": 17, "semisup": 10, "detect": 7}),
    ],
)
def test_jobs_of_a_study(config: StudyConfig, name: str, expected: dict[str, int]) -> None:
    assert counts(build_study(name, config)) == expected


@pytest.mark.parametrize("name", [*BUILDERS, "all"])
def test_commands_accept_their_arguments(config: StudyConfig, name: str) -> None:
    for job in build_study(name, config):
        if job.task != "report":
            found = check_arguments(job.task, job.argv)
            assert str(run_folder(job.task, found)) == job.run


@pytest.mark.parametrize("name", [*BUILDERS, "all"])
def test_parents_come_first_and_readouts_read_their_parent(config: StudyConfig, name: str) -> None:
    seen: dict[str, Job] = {}
    for job in build_study(name, config):
        assert set(job.after) <= set(seen)
        if job.after and job.task != "report":
            parent = seen[job.after[0]]
            assert job.argv[job.argv.index("--weights") + 1] == parent.run
        seen[job.name] = job


def test_no_two_jobs_write_to_one_folder(config: StudyConfig) -> None:
    runs = [job.run for job in build_study("all", config)]
    assert len(set(runs)) == len(runs)


def test_table1_is_the_papers_rows(config: StudyConfig) -> None:
    runs = [job for job in build_study("table1", config) if job.task == "pretrain"]
    configs = [check_arguments("pretrain", job.argv) for job in runs]
    rows = [(c.objective, c.num_negatives if c.objective == "nce" else None) for c in configs]
    assert rows == [
        ("parametric", None),
        ("nce", 1),
        ("nce", 10),
        ("nce", 512),
        ("nce", 4096),
        ("softmax", None),
    ]
    assert {c.epochs for c in configs} == {PretrainConfig.epochs}


def test_table1_small_has_two_seeds_and_enough_images(config: StudyConfig) -> None:
    import dataclasses

    jobs = build_study("table1", dataclasses.replace(config, scale="small"))
    assert counts(jobs) == {"pretrain": 12, "knn": 12, "linear": 12}
    for job in jobs:
        if job.task == "pretrain":
            found = check_arguments("pretrain", job.argv)
            assert found.train_fraction * 50_000 > 4096  # as many negatives as the largest row has
        if job.task == "linear":
            assert check_arguments("linear", job.argv).stage == ("embedding",)
    # Results are grouped by the folder's last part: the seeds of a row must share it.
    names = collections.Counter(Path(job.run).name for job in jobs if job.task == "pretrain")
    assert set(names.values()) == {2}


def test_ablations_change_one_thing_of_their_row_of_table1(config: StudyConfig) -> None:
    runs = [job for job in build_study("ablations", config) if job.task == "pretrain"]
    base, *others = [vars(check_arguments("pretrain", job.argv)) for job in runs]
    changes = [
        {key: each[key] for key in each if each[key] != base[key] and key != "output"}
        for each in others
    ]
    assert changes == [{"proximal_weight": 1.0}, {"negatives": "shared"}]
    # The row itself is run once for both studies.
    assert runs[0].name in {job.name for job in build_study("table1", config)}


def test_what_is_skipped_is_not_waited_for(config: StudyConfig) -> None:
    import dataclasses

    jobs = build_study("demo", dataclasses.replace(config, skip=("export", "report")))
    assert {job.task for job in jobs} == {"pretrain", "knn", "semisup", "detect"}
    assert all(job.after in ((), ("demo-resnet18-seed0",)) for job in jobs)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seeds": 0}, "--seeds"),
        ({"skip": ("pretrain",)}, "--skip pretrain"),
        ({"supervised": ("r50.pth",)}, "ARCH=FILE"),
    ],
)
def test_bad_values(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        StudyConfig(**values)  # type: ignore[arg-type] # wrong on purpose


def test_unknown_study_and_missing_data(config: StudyConfig) -> None:
    with pytest.raises(UserError, match="no study 'table9': choose one of table1"):
        build_study("table9", config)
    with pytest.raises(UserError, match="--places DIR"):
        build_study("places", StudyConfig())


def test_the_tree_has_every_job_below_what_it_waits_for(config: StudyConfig) -> None:
    jobs = build_study("table1", config)
    states = dict.fromkeys((job.name for job in jobs), "to run")
    lines = draw_tree(jobs, states)
    assert len(lines) == len(jobs)
    depth = {line.split()[1]: len(line) - len(line.lstrip()) for line in lines}
    assert depth["cifar10-softmax-seed0-knn"] > depth["cifar10-softmax-seed0"]
    assert count_states(states) == f"{len(jobs)} jobs: {len(jobs)} to run"


def test_the_estimate_follows_the_work(config: StudyConfig) -> None:
    jobs = [job for job in build_study("data-size", config) if job.task == "pretrain"]
    one, eight = Resources(gpus=1), Resources(gpus=8)
    hours = [estimate_hours(job, one) for job in sorted(jobs, key=lambda job: job.images)]
    assert hours[-1] == pytest.approx(10 * hours[2])
    assert estimate_hours(jobs[-1], eight) == pytest.approx(estimate_hours(jobs[-1], one) / 8)
    assert "of a GPU" in describe_cost(jobs, {"pretrain": one})


def test_every_task_of_the_list_is_a_command() -> None:
    for name, task in TASKS.items():
        if task.exists:
            with pytest.raises(SystemExit) as stop:
                check_arguments(name, ["--help"])
            assert stop.value.code == 0

"""Studies: which jobs, what they share, and that every command would accept its arguments."""

import collections
import dataclasses
import json
from pathlib import Path

import pytest

from instdisc.errors import UserError
from instdisc.names import DETECTORS
from pretrain.config import PretrainConfig
from slurm.jobs import Job
from slurm.resources import Resources
from slurm.studies import BUILDERS, StudyConfig, build_study
from slurm.submission import count_states, describe_cost, draw_tree, estimate_hours
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
        ("table1", {"pretrain": 6, "knn": 7, "linear": 7}),  # one of each untrained
        ("ablations", {"pretrain": 3, "knn": 3, "linear": 3}),
        ("table2", {"pretrain": 4, "knn": 5, "linear": 5}),
        ("places", {"pretrain": 4, "knn": 4, "linear": 4}),
        ("embedding", {"pretrain": 4, "knn": 4}),
        ("data-size", {"pretrain": 5, "knn": 5}),
        ("semisup", {"pretrain": 1, "semisup": 10}),
        ("detection", {"pretrain": 3, "export": 3, "detect": 7}),
        ("photographs", {"pretrain": 1, "knn": 2, "retrieve": 2, "linear": 2, "semisup": 1}),
        (
            "transfer",
            {
                **{"pretrain": 4, "export": 4, "knn": 4, "retrieve": 4, "detect": 4},
                **{"linear": 12, "semisup": 12, "fewshot": 4, "voc_svm": 4},
            },
        ),
        ("demo", {"pretrain": 1, "export": 1, "knn": 1, "semisup": 1, "detect": 1}),
        # 6 for table1, 2 ablations, 4 networks, 3 other embeddings, 4 other parts of the images.
        ("all", {"pretrain": 19, "export": 3, "knn": 25, "linear": 18, "semisup": 10, "detect": 7}),
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


@pytest.mark.parametrize(
    ("name", "rows", "seeds"),
    [("table1", 9, 2), ("ablations", 10, 2), ("embedding", 8, 2), ("data-size", 10, 2)],
)
def test_all_of_cifar_on_cpus(config: StudyConfig, name: str, rows: int, seeds: int) -> None:
    jobs = build_study(name, dataclasses.replace(config, scale="cpu"))
    read_out = rows + (seeds if name == "table1" else 0)  # its untrained network for each seed
    assert counts(jobs) == {"pretrain": rows, "knn": read_out, "linear": read_out}
    assert len({job.argv[job.argv.index("--seed") + 1] for job in jobs if job.argv}) == seeds
    for job in jobs:
        if job.task == "pretrain":
            found = check_arguments("pretrain", job.argv)
            assert isinstance(found, PretrainConfig)
            # What makes a row is not overruled by what makes the scale.
            few = found.objective == "nce" and found.num_negatives < 512
            assert found.negatives == ("per-image" if few or "per-image" in job.name else "shared")
            assert found.epochs == (20 if name == "table1" else 10)
            assert found.train_fraction == 1 or "part" in job.name


def test_coco_is_for_the_networks_that_have_a_detector(config: StudyConfig) -> None:
    jobs = build_study("transfer", dataclasses.replace(config, coco_root=config.data))
    found = [job for job in jobs if "--coco-root" in job.argv]
    assert {job.arch for job in found} == {"resnet18", "resnet50"}
    for job in found:
        check_arguments("detect", job.argv)


def test_photographs_are_detected_by_three_networks(config: StudyConfig, tmp_path: Path) -> None:
    voc = dataclasses.replace(config, voc_root=str(tmp_path / "images"))
    jobs = [job for job in build_study("photographs", voc) if job.task == "detect"]
    inits = [job.argv[job.argv.index("--init") + 1] for job in jobs if "--init" in job.argv]
    assert len(jobs) == 3
    assert [init.partition(":")[0] for init in inits] == ["scratch", "supervised"]
    for job in jobs:
        check_arguments("detect", job.argv)


@pytest.mark.parametrize("name", [*BUILDERS, "all"])
def test_parents_come_first_and_readouts_read_their_parent(config: StudyConfig, name: str) -> None:
    seen: dict[str, Job] = {}
    for job in build_study(name, config):
        assert set(job.after) <= set(seen)
        if job.after and job.task != "report":
            parent = seen[job.after[0]]
            weights = job.argv[job.argv.index("--weights") + 1]
            assert weights.removeprefix("untrained:") == parent.run
        seen[job.name] = job


def test_no_two_jobs_write_to_one_folder(config: StudyConfig) -> None:
    runs = [job.run for job in build_study("all", config)]
    assert len(set(runs)) == len(runs)


def test_transfer_runs_every_task_for_networks_that_were_named(
    config: StudyConfig, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "pretrain" / "mine"
    run.mkdir(parents=True)
    (run / "config.json").write_text(json.dumps({"arch": "resnet18"}))
    file = tmp_path / "other" / "backbone.pt"
    file.parent.mkdir()
    file.write_bytes(b"")
    networks = (str(run), f"vgg16={file}", "random:alexnet:3", "timm:vit_small_patch16_224")
    jobs = build_study("transfer", dataclasses.replace(config, weights=networks))
    # Nothing is pretrained or exported, and no detector has been written for a ViT.
    tasks = {"knn": 4, "retrieve": 4, "linear": 12, "semisup": 12, "detect": 3}
    tasks |= {"fewshot": 4, "voc_svm": 4}
    assert counts(jobs) == tasks
    found: dict[str, set[str]] = {}
    for job in jobs:
        if job.task == "report":
            continue
        parsed = check_arguments(job.task, job.argv)
        found.setdefault(parsed.weights, set()).add(job.arch)
        if job.task == "detect":
            assert str(parsed.cfg) == DETECTORS[job.arch]
        elif job.task != "voc_svm":  # whose images are VOC's
            assert parsed.data == config.data
    assert found == {
        str(run): {"resnet18"},
        str(file): {"vgg16"},
        "random:alexnet:3": {"alexnet"},
        "timm:vit_small_patch16_224": {"timm:vit_small_patch16_224"},
    }
    assert len({job.run for job in jobs}) == len({job.name for job in jobs}) == len(jobs)
    recipes = {check_arguments("linear", job.argv).recipe for job in jobs if job.task == "linear"}
    assert recipes == {"paper", "moco", "vissl"}
    resources = {task: Resources(gpus=1) for task in TASKS}
    assert "hours of a GPU" in describe_cost(jobs, resources)


def test_jobs_that_the_papers_studies_have_too_are_the_same(config: StudyConfig) -> None:
    shared = {job.name: job for job in build_study("all", config) if job.task != "report"}
    both = [job for job in build_study("transfer", config) if job.name in shared]
    assert all(job == shared[job.name] for job in both)
    assert {job.task for job in both} == {
        "pretrain",
        "export",
        "knn",
        "linear",
        "semisup",
        "detect",
    }


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
    jobs = build_study("table1", dataclasses.replace(config, scale="small"))
    assert counts(jobs) == {"pretrain": 12, "knn": 14, "linear": 14}
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
    jobs = build_study("demo", dataclasses.replace(config, skip=("export", "report")))
    assert {job.task for job in jobs} == {"pretrain", "knn", "semisup", "detect"}
    assert all(job.after in ((), ("demo-resnet18-seed0",)) for job in jobs)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seeds": 0}, "--seeds"),
        ({"skip": ("pretrain",)}, "--skip pretrain"),
        ({"supervised": ("r50.pth",)}, "ARCH=FILE"),
        ({"flags": ("fly=--amp bf16",)}, "--flags fly"),
        ({"flags": ("pretrain",)}, "in quotes"),
        ({"flags": ("pretrain=--data 'a",)}, "in quotes"),
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
    with pytest.raises(UserError, match=r"such as resnet50=a\.pt"):
        build_study("transfer", dataclasses.replace(config, weights=("a.pt",)))


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
    four = [
        Job(name=str(n), task="pretrain", argv=(), run="", arch="resnet18", images=1e6)
        for n in range(4)
    ]
    hours = estimate_hours(four[0], one)
    ends = {
        parallel: describe_cost(four, {"pretrain": one}, parallel).split(", ")[1]
        for parallel in (None, 4, 2, 1)
    }
    assert ends[None] == ends[4]
    assert ends[4].startswith(f"{60 * hours:.0f} minutes from end to end")
    assert ends[2].startswith(f"{120 * hours:.0f} minutes ")
    assert ends[1].startswith(f"{240 * hours:.0f} minutes ")


def test_every_task_of_the_list_is_a_command() -> None:
    for name in TASKS:
        with pytest.raises(SystemExit) as stop:
            check_arguments(name, ["--help"])
        assert stop.value.code == 0


def test_fast_rcnn_waits_for_the_proposals_which_are_made_once(
    config: StudyConfig, tmp_path: Path
) -> None:
    study = dataclasses.replace(config, voc_root=str(tmp_path), seeds=2)
    jobs = build_study("detection", study)
    (made,) = [job for job in jobs if job.task == "proposals"]
    found = check_arguments("proposals", made.argv)
    assert (found.action, found.split, found.voc_root) == ("make", ("trainval", "test"), tmp_path)
    assert str(run_folder("proposals", found)) == made.run
    detectors = [job for job in jobs if job.task == "detect"]
    assert len(detectors) == 14
    for job in detectors:
        detect = check_arguments("detect", job.argv)
        assert not detect.make_proposals
        assert (made.name in job.after) == detect.cfg.name.startswith("fast_")


def test_embedded_images_need_no_job_for_proposals(
    config: StudyConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    demo = dataclasses.replace(config, voc_root="demo")
    assert "proposals" not in counts(build_study("detection", demo))
    monkeypatch.setenv("DETECTRON2_DATASETS", "datasets")
    assert counts(build_study("detection", config))["proposals"] == 1


def test_more_flags_reach_every_job_of_their_task_and_no_other(config: StudyConfig) -> None:
    flags = ("pretrain=--amp bf16 --workers 12", "linear=--workers 3", "pretrain=--lr 0.5")
    for job in build_study("table2", dataclasses.replace(config, flags=flags)):
        found = check_arguments(job.task, job.argv)
        if job.task == "pretrain":
            assert (found.amp, found.workers, found.lr) == ("bf16", 12, 0.5)
        elif job.task != "report":
            assert found.workers == {"linear": 3, "knn": 4}[job.task]


def test_only_the_report_starts_after_failures(config: StudyConfig) -> None:
    jobs = build_study("all", config)
    (report,) = [job for job in jobs if job.failed_flag]
    assert report.task == "report"
    assert set(report.after) == {job.name for job in jobs} - {"report"}
    found = check_arguments("report", [*report.argv, report.failed_flag, "a", "b"])
    assert found.missing == ("a", "b")

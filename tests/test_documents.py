"""Tables of the documents are those of docs/results/, and what is computed there is right."""

import importlib.util
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from instdisc.cli import build_parser
from instdisc.export.settings import ExportConfig
from instdisc.importers.settings import ImportConfig
from pretrain.config import PretrainConfig
from slurm.studies import BUILDERS, StudyConfig
from transfer.detection.settings import DetectConfig
from transfer.finetuning.settings import SemisupConfig
from transfer.nearest.settings import EmbedConfig, FewshotConfig, RetrieveConfig
from transfer.probing.settings import VocSvmConfig
from transfer.reporting import paper_numbers as paper
from transfer.reporting.benchmarks import BENCHMARKS
from transfer.reporting.settings import ReportConfig
from transfer.suites.settings import SuiteConfig

REPO = Path(__file__).resolve().parents[1]
RESULTS = [path.stem for path in sorted(REPO.glob("docs/results/*.json"))]


def load_script(name: str) -> ModuleType:
    """A script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, REPO / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    return load_script("tables")


def test_tables_are_up_to_date(tables: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--check"]) == 0, capsys.readouterr()


@pytest.mark.parametrize("name", RESULTS)
def test_every_table_is_shown(name: str, tables: ModuleType) -> None:
    """A table that no document shows is one that nobody reads."""
    texts = [path.read_text("utf-8") for each in tables.DOCUMENTS for path in REPO.glob(each)]
    shown = {
        match["name"] for t in texts for match in tables.TABLE.finditer(t) if match["file"] == name
    }
    assert shown == set(
        json.loads((REPO / f"docs/results/{name}.json").read_text("utf-8"))["tables"]
    )


STORED: dict[str, Any] = {
    "tables": {
        "demo": {"missing": "-", "columns": {"arch": "{arch}", "kNN": "{knn.1:.1f}", "s": "{s}"}},
        "few": {
            "rows": "demo",
            "where": {"arch": "b"},
            "transpose": True,
            "columns": {"": "{arch}", "n": "{n:,}"},
        },
        "typo": {"rows": "demo", "columns": {"kNN": "{knm}"}},
        "nowhere": {"columns": {"kNN": "{knn}"}},
    },
    "demo": [{"arch": "a", "knn": {"1": 35.56}, "s": [1.0, 3.0]}, {"arch": "b", "n": 5000}],
}


@pytest.fixture
def document(tmp_path: Path) -> Path:
    """README.md of a repository with one file of results."""
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "results" / "r.json").write_text(json.dumps(STORED))
    path = tmp_path / "README.md"
    path.write_text("before\n\n<!-- table: r demo -->\nold\n<!-- end -->\n\nafter 35.5\n")
    return path


def test_a_table_is_written_and_the_rest_is_left_alone(tables: ModuleType, document: Path) -> None:
    assert tables.main([], repo=document.parent) == 0
    assert document.read_text() == (
        "before\n\n<!-- table: r demo -->\n\n"
        "| arch | kNN | s |\n| --- | --- | --- |\n| a | 35.6 | 2.00 ± 1.41 (n=2) |\n| b | - | - |\n"
        "\n<!-- end -->\n\nafter 35.5\n"
    )
    assert tables.main(["--check"], repo=document.parent) == 0
    assert tables.make_table(STORED, "few") == "|  | b |\n| --- | --- |\n| n | 5,000 |\n"


@pytest.mark.parametrize("changed", ["document", "results"])
def test_a_changed_number_fails_the_check(
    changed: str, tables: ModuleType, document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tables.main([], repo=document.parent) == 0
    path = document if changed == "document" else document.parent / "docs/results/r.json"
    old, new = ("35.6", "36.6") if changed == "document" else ("35.56", "36.56")
    path.write_text(path.read_text().replace(old, new))
    before = document.read_text()
    capsys.readouterr()
    assert tables.main(["--check"], repo=document.parent) == 1
    assert capsys.readouterr().out == (
        "README.md: tables differ from docs/results: run python docs/tables.py\n"
    )
    assert document.read_text() == before
    assert tables.main([], repo=document.parent) == 0
    assert tables.main(["--check"], repo=document.parent) == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("<!-- table: r typo -->\n<!-- end -->", "no row has a value for 'kNN'"),
        ("<!-- table: r nowhere -->\n<!-- end -->", "nowhere"),
        ("<!-- table: r none -->\n<!-- end -->", "none"),
        ("<!-- table: none demo -->\n<!-- end -->", "none.json"),
        ("<!-- table: r demo -->\n", "no partner"),
        ("<!-- end -->\n", "no partner"),
        ("<!-- table: r -->\n<!-- end -->", "no partner"),
    ],
)
def test_a_wrong_marker_is_told(
    text: str, said: str, tables: ModuleType, document: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document.write_text(text)
    assert tables.main([], repo=document.parent) == 1
    assert said in capsys.readouterr().err
    assert document.read_text() == text


def write_run(runs: Path, name: str, seed: int, *, epochs_done: int, knn: float) -> None:
    """A pretraining of two epochs as a study leaves it, and a row measured of it."""
    folder = runs / "studies" / f"seed{seed}" / name
    folder.mkdir(parents=True)
    argv = ["pretrain/run.py", "--data", "/disk/cifar-10-batches-bin", "--seed", str(seed)]
    provenance = {"argv": argv, "git": "abc", "python": "3.13.0", "versions": {"torch": "2.14.1"}}
    (folder / "provenance.json").write_text(json.dumps(provenance))
    (folder / "config.json").write_text(json.dumps({"seed": seed, "epochs": 2}))
    rows = [{"step": 0, "epoch": 0.0, "knn_recomputed": 25.0, "rankme": 9.0}]
    for epoch in range(1, epochs_done + 1):
        rows.append({"step": epoch, "epoch": float(epoch), "epoch_loss": 10.0 - epoch - seed})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (runs / "results.jsonl").open("a") as file:
        for task, value in (("knn", knn), ("knn-untrained", 25.0)):
            details = {"folder": f"studies/seed{seed}/{name}/{task}"}
            row = {"task": "knn", "metric": "top1", "value": value, "details": details}
            file.write(json.dumps(row) + "\n")


def test_a_study_in_parts_is_collected(tmp_path: Path) -> None:
    collect = load_script("collect")
    first, second, file = tmp_path / "first", tmp_path / "second", tmp_path / "t.json"
    stored: dict[str, Any] = {"what": "kept", "tables": {}}
    stored["rows"] = [{"name": "untrained"}, {"name": "nce-1", "m": 1}, {"name": "nce-10"}]
    stored["pairs"] = [
        {"lower": "untrained", "upper": "nce-1", "metric": "knn_top1"},
        {"lower": "nce-1", "upper": "nce-10", "metric": "knn_top1"},
    ]
    file.write_text(json.dumps(stored))
    write_run(first, "nce-1", 0, epochs_done=2, knn=40.0)
    write_run(first, "nce-10", 0, epochs_done=1, knn=45.0)  # stopped, and measured too early
    write_run(first, "other", 0, epochs_done=2, knn=1.0)
    assert collect.main([str(first), str(file), "--match", "nce"]) == 0
    write_run(second, "nce-1", 1, epochs_done=2, knn=42.0)  # another machine
    assert collect.main([str(second), str(file)]) == 0
    write_run(tmp_path / "third", "nce-1", 1, epochs_done=1, knn=9.0)  # begun again, not finished
    assert collect.main([str(tmp_path / "third"), str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["what"] == "kept"
    assert [(run["name"], run["seed"], run["finished"]) for run in found["runs"]] == [
        ("nce-1", 0, True),
        ("nce-1", 1, True),
        ("nce-10", 0, False),
    ]
    assert found["rows"] == [
        {"name": "untrained", "knn_top1": [25.0, 25.0, 25.0]},
        {"name": "nce-1", "m": 1, "knn_top1": [40.0, 42.0], "last_loss": [8.0, 7.0]},
        {"name": "nce-10"},
    ]
    above, not_yet = found["pairs"]
    assert (above["difference"], above["spread"], above["verdict"]) == (16.0, 2.0, "in order")
    assert "difference" not in not_yet
    run = found["runs"][1]
    assert run["command"] == "python pretrain/run.py --data cifar-10-batches-bin --seed 1"
    assert run["knn"] == {"0": 25.0}
    assert run["loss"] == {"1": 8.0, "2": 7.0}
    assert run["versions"] == {"python": "3.13.0", "torch": "2.14.1"}


def test_what_was_measured_of_each_network_is_collected(tmp_path: Path) -> None:
    rows = [
        ("semisup", "top1", "labeled=0.1 recipe=paper", "photographs", 1, 61.0),
        ("semisup", "top1", "labeled=0.1 recipe=paper", "photographs", 0, 60.0),
        ("semisup", "top1", "labeled=0.1 recipe=paper", "scratch", 0, 40.0),
        ("semisup", "top1", "labeled=0.01 recipe=paper", "photographs", 0, 20.0),
        ("semisup", "top5", "labeled=0.1 recipe=paper", "photographs", 0, 90.0),
        ("knn", "top1", "k=200", "untrained:photographs", 0, 25.0),
    ]
    names = ("task", "metric", "protocol", "weights", "seed", "value")
    lines = [json.dumps({**dict(zip(names, row, strict=True)), "details": {}}) for row in rows]
    (tmp_path / "results.jsonl").write_text("\n".join(lines) + "\n")
    asked = [
        {"task": "semisup", "metric": "top1", "protocol": "labeled=0.1"},
        {"task": "knn", "metric": "top1"},
        {"task": "detect", "metric": "ap50"},
    ]
    file = tmp_path / "t.json"
    file.write_text(json.dumps({"measured": asked}))
    assert load_script("collect").main([str(tmp_path), str(file)]) == 0
    assert json.loads(file.read_text())["measured"] == [
        {**asked[0], "photographs": [60.0, 61.0], "scratch": [40.0]},
        {**asked[1], "untrained": [25.0]},
        asked[2],
    ]


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """(script, arguments) of every line in the code blocks of a document that runs one."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S):
        if language:
            continue
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for number, word in enumerate(words):
                if word.endswith(".py"):
                    yield word, words[number + 1 :]


def test_commands_of_the_page_are_those_of_the_suite() -> None:
    types = {
        "pretrain/run.py": PretrainConfig,
        "transfer/suite.py": SuiteConfig,
        "transfer/report.py": ReportConfig,
        "transfer/semisup.py": SemisupConfig,
        "transfer/detect.py": DetectConfig,
        "transfer/voc_svm.py": VocSvmConfig,
        "transfer/fewshot.py": FewshotConfig,
        "slurm/submit.py": StudyConfig,
    }
    found = list(commands((REPO / "docs/reproduce.md").read_text("utf-8")))
    assert {script for script, _ in found} == set(types)
    for script, argv in found:
        if script == "slurm/submit.py":
            name, *argv = argv[argv.index("study") + 1 :]
            assert name in BUILDERS
        build_parser(types[script]).parse_args(argv)


def test_commands_for_the_three_readers_are_those_of_the_suite() -> None:
    types = {
        "pretrain/run.py": PretrainConfig,
        "pretrain/export.py": ExportConfig,
        "pretrain/import_weights.py": ImportConfig,
        "transfer/retrieve.py": RetrieveConfig,
        "transfer/embed.py": EmbedConfig,
        "transfer/suite.py": SuiteConfig,
        "transfer/report.py": ReportConfig,
        "transfer/detect.py": DetectConfig,
    }
    text = (REPO / "docs/getting-started.md").read_text("utf-8")
    found = [pair for pair in commands(text) if not pair[0].startswith("slurm/")]
    assert {script for script, _ in found} == set(types)
    for script, argv in found:
        build_parser(types[script]).parse_args(argv)


def test_the_comparison_repeats_what_was_published_and_measured() -> None:
    rows = json.loads((REPO / "docs/results/comparison.json").read_text("utf-8"))["comparison"]
    table1 = json.loads((REPO / "docs/results/table1-cpu.json").read_text("utf-8"))["rows"]
    measured = [row.get("knn_top1") for row in table1]
    published = {
        f"{value:.2f}"
        for row in (
            *(*paper.TABLE1, *paper.TABLE2, *paper.TABLE6, *paper.IMAGENET_ANCHORS),
            *(row for benchmark in BENCHMARKS for row in benchmark.published),
        )
        for value in row.values.values()
    }
    for row in rows:
        assert row.get("here") in (None, *measured)
        for number in re.findall(r"\d+\.\d+", f"{row['paper']} {row['reruns']}"):
            assert f"{float(number):.2f}" in published


def test_defaults_of_the_pretraining_table_are_those_of_the_code() -> None:
    section = (REPO / "docs/protocols.md").read_text("utf-8").split("\n## ")[1]
    assert section.startswith("Pretraining")
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")]
    spans = " ".join(span for row in rows for span in re.findall(r"`([^`]*)`", row))
    shown = re.findall(r"--([a-z-]+) (\d[\d.e-]*)", spans)
    assert len(shown) > 5
    for flag, value in shown:
        assert getattr(PretrainConfig(), flag.replace("-", "_")) == float(value), flag


def test_costs_follow_from_their_inputs() -> None:
    stored = json.loads((REPO / "docs/results/costs.json").read_text("utf-8"))
    given: dict[str, Any] = {name: each["value"] for name, each in stored["inputs"].items()}
    assert all(each["source"] for each in stored["inputs"].values())
    hours = {row["name"]: row["hours"] for row in stored["gpu-hours"]}
    images = given["imagenet_train"]
    share = given["forward_units_here"] / given["forward_units_moco"]
    unit = given["moco_gpus"] * given["moco_hours"] * share / given["gflops"]["resnet50"]
    full = {arch: unit * gflops for arch, gflops in given["gflops"].items()}
    forward = {arch: value / 200 / 3 for arch, value in full.items()}
    per_image = given["detector_gpus"] * given["detector_seconds"] / given["detector_batch"] / 3600
    parts = sum(given["semisup_fractions"]) * given["semisup_epochs"]
    expected = {
        **{f"pretrain_{arch}": value for arch, value in full.items()},
        "pretrain_all_four": sum(full.values()),
        "cifar_six": 6 * unit * given["gflops_cifar_resnet18"] * 50_000 / images,
        "table4_more": 3 * full["resnet18"],
        "table5_more": sum(given["table5_fractions"]) * full["resnet18"],
        "forward_imagenet_all_four": sum(forward.values()) * (1 + given["imagenet_val"] / images),
        "forward_places_all_four": sum(forward.values()) * given["places_images"] / images,
        "semisup_resnet50": parts / 200 * full["resnet50"],
        "detect_resnet50": given["detector_iterations"] * 2 * per_image,
        "detect_resnet50_0712": given["detector_iterations_0712"] * 16 * per_image,
    }
    assert hours == pytest.approx(expected, abs=1e-3)
    numbers_of_an_image = given["probe_numbers"] * given["probe_stages"]
    disk = images * numbers_of_an_image * given["probe_bytes"] / 1e9
    assert stored["disk"][0]["gb"] == pytest.approx(disk, abs=1e-3)


def plan(given: dict[str, float], images: int, gpus: int, batch: int) -> dict[str, float]:
    """The formulas of docs/performance.md."""
    bank, ring = 4 * images * given["dimensions"], 2 * (gpus - 1) / gpus
    network = batch / gpus / given["network_images_per_second"]
    softmax = batch * bank / gpus / given["flops"]
    softmax += (
        given["softmax_passes_bytes"] * batch * images / gpus / given["memory_bytes_per_second"]
    )
    sampled = ring * 2 * given["sampled_negatives"] * given["dimensions"]
    alone, both = (images / batch * step for step in (network, network + softmax))
    counted = images >= given["counted_from"]
    bits = int(given["counted_bits" if counted else "generator_bits"])
    return {
        **{"images": images, "gpus": gpus, "batch": batch},
        "bank_float32_gb": bank / 1e9,
        "bank_float16_gb": bank / 2 / 1e9,
        "shard_float16_gb": bank / 2 / gpus / 1e9,
        "network_ms": network * 1e3,
        "softmax_ms": softmax * 1e3,
        "shared_noise_mb": ring * 2 * given["num_negatives"] * given["dimensions"] / 1e6,
        "sampled_mb": sampled / 1e6,
        "sampled_ms": sampled / given["network_bytes_per_second"] * 1e3,
        "images_per_second": gpus * given["network_images_per_second"],
        "epoch_network_hours": alone / 3600,
        "epoch_softmax_hours": both / 3600,
        "permutation_gb": 0.0 if counted else 8 * images / 1e9,
        "noise_uneven": 1 / (2**bits // images),
    }


def test_plans_follow_from_their_inputs() -> None:
    stored = json.loads((REPO / "docs/results/plans.json").read_text("utf-8"))
    given = {name: each["value"] for name, each in stored["inputs"].items()}
    assert all(each["source"] for each in stored["inputs"].values())
    assert len(stored["plans"]) == 3
    for row in stored["plans"]:
        expected = plan(given, row["images"], row["gpus"], row["batch"])
        name = row.pop("name")
        assert row == pytest.approx(expected, rel=1e-3), name
        assert row["shard_float16_gb"] < given["gpu_memory_gb"]
    gradients = 4 * given["resnet50_parameters"] / 1e6
    assert stored["gradients_resnet50_mb"] == pytest.approx(gradients, rel=1e-3)

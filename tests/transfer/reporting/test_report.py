"""The report: tables by hand, protocols apart, the demo apart, names as text."""

import csv
import html.parser
import importlib.util
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from instdisc.runs.results import Result, append_results, results_file
from transfer.report import main
from transfer.reporting import paper_numbers
from transfer.reporting.benchmarks import BENCHMARKS
from transfer.reporting.grids import DASH, Grid, show_rows
from transfer.reporting.page import render_report
from transfer.reporting.rows import collect
from transfer.reporting.tables import Tables
from transfer.reporting.text import to_csv


def load_data() -> ModuleType:
    """The made-up rows; tests have no packages, so the file is loaded by its path."""
    spec = importlib.util.spec_from_file_location(
        "report_data", Path(__file__).with_name("report_data.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


DATA = load_data()
make_row: Callable[..., Result] = DATA.make_row


def build(rows: list[Result]) -> dict[str, Grid]:
    return {grid.slug: grid for grid in Tables(collect(rows)).build()}


def cells(grid: Grid, label: str, kind: str | None = None) -> tuple[str, ...]:
    """The cells of the first row of that label; of that kind, at or behind it."""
    rows = show_rows(grid)
    start = next(i for i, row in enumerate(rows) if row.label == label)
    return next(row.cells for row in rows[start:] if kind in (None, row.kind))


# Tables by hand.


def test_table1_has_mean_std_count_and_difference() -> None:
    rows = []
    for seed, value in ((0, 70.0), (1, 72.0)):
        facts = {"dataset": "cifar10", "objective": "nce", "num_negatives": 4096, "seed": seed}
        rows.append(make_row(dataset="cifar10", facts=facts, value=value, weights=f"s{seed}"))
    grid = build(rows)["table1-1"]
    # kNN: mean 71, std sqrt(2), paper 80.4; nothing for the SVM.
    assert cells(grid, "NCE, m = 4096") == (
        *("70.2", DASH, DASH),
        *("80.4", "71.00 ± 1.41 (n=2)", "-9.4"),
    )
    assert cells(grid, "NCE, m = 1") == ("44.3", DASH, DASH, "42.5", DASH, DASH)
    assert len(grid.lines) == 6


def test_the_latest_row_of_a_repetition_counts() -> None:
    rows = [make_row(value=1.0), make_row(value=30.0), make_row(value=32.0, seed=1)]
    grid = build(rows)["table2"]
    assert cells(grid, "this method, resnet18", "measured")[-1] == "31.00 ± 1.41 (n=2)"
    assert cells(grid, "this method, resnet18", "difference")[-1] == "-10.0"


def test_networks_find_their_published_rows_and_only_those() -> None:
    rows = [
        make_row(arch="alexnet", weights="random:alexnet", value=3.0),
        make_row(arch="alexnet", weights="random:alexnet:1", value=4.0),
        make_row(arch="alexnet", weights="data-init:alexnet", value=5.0),
        make_row(arch="timm:x", weights="timm:x", value=70.0, details={"pretraining": {}}),
        make_row(arch="resnet50", value=45.0),
    ]
    grid = build(rows)["table2"]
    assert cells(grid, "Random, alexnet", "measured")[-1] == "3.50 ± 0.71 (n=2)"
    assert cells(grid, "Data-Init, alexnet", "measured")[-1] == "5.00 (n=1)"
    assert cells(grid, "Data-Init, alexnet", "difference")[-1] == DASH  # the paper has no kNN there
    assert cells(grid, "this method, resnet50", "difference")[-1] == "-1.5"
    assert cells(grid, "this method, vgg16", "absent") == (DASH,) * 6
    assert cells(grid, "timm:x") == (*(DASH,) * 5, "70.00 (n=1)")
    assert [row.kind for row in show_rows(grid)].count("difference") == 3


def test_untrained_networks_are_random_ones_of_their_runs_settings() -> None:
    rows = []
    for dim in (32, 128):
        rows.append(make_row(arch="alexnet", weights=f"d{dim}", facts={"embedding_dim": dim}))
        rows.append(
            make_row(
                arch="alexnet",
                weights=f"untrained:d{dim}",
                value=dim / 16,
                details={"pretraining": {}},
            )
        )
    grids = build(rows)
    assert cells(grids["table2"], "Random, alexnet", "measured")[-1] == "8.00 (n=1)"
    ablation = next(grid for slug, grid in grids.items() if slug.startswith("table4-"))
    assert sum(len(line.measured) for line in ablation.lines) == 2  # the trained ones


def test_ablations_do_not_pass_for_the_method() -> None:
    rows = [make_row(facts={"embedding_dim": dim}, value=dim / 8) for dim in (32, 128)]
    rows += [make_row(facts={"train_fraction": 0.1}, value=20.0)]
    grids = build(rows)
    knn = cells(grids["table2"], "this method, resnet18", "measured")[-1]
    assert knn == "16.00 (n=1)"
    assert cells(grids["table4-1"], "32") == ("34.0", "4.00 (n=1)", "-30.0")
    assert cells(grids["table4-1"], "64") == ("38.8", DASH, DASH)
    assert cells(grids["table5-1"], "10%") == ("23.1", "20.00 (n=1)", "-3.1")
    assert cells(grids["table5-1"], "100%") == ("41.0", "16.00 (n=1)", "-25.0")


def test_with_nothing_measured_every_table_of_the_paper_is_there() -> None:
    grids = build([])
    papers = {"table1", "table2", "table3", "table4", "table5", "table6-alexnet"}
    assert papers | {benchmark.slug for benchmark in BENCHMARKS} <= set(grids)
    assert not any(grid.has_measurements for grid in grids.values())
    assert cells(grids["table4"], "128") == ("41.0", DASH, DASH)


def test_every_measurement_is_shown_once() -> None:
    rows = DATA.study_rows()
    entries = collect(rows)
    shown = [id(value) for grid in Tables(entries).build() for value in grid.measurements]
    assert {id(entry.measured) for entry in entries} == set(shown)
    # Tables 2, 4 and 5 share ResNet-18 with 128 dimensions and all images.
    assert len(shown) - len(set(shown)) == 2


# What must not mix.


def protocols_of(rows: list[Result]) -> dict[tuple[str, str], set[str]]:
    """(grid, column) -> protocols whose numbers stand in it, told by values that name them."""
    numbers = {round(row.value, 2): row.protocol for row in rows}
    found: dict[tuple[str, str], set[str]] = {}
    for slug, grid in build(rows).items():
        for line in grid.lines:
            for network in line.measured:
                for column, measured in network.values.items():
                    protocol = numbers[round(measured.mean, 2)]
                    found.setdefault((slug, column), set()).add(protocol)
    return found


def test_protocols_never_share_a_column() -> None:
    families = ["k=200 tau=0.07 embedding", "k=20 tau=0.07 embedding", "k=200 tau=0.07 backbone"]
    rows = [make_row(protocol=family, value=10.0 + i) for i, family in enumerate(families)]
    solvers = ["sgd", "liblinear", "sgd loss=softmax"]
    for number, solver in enumerate(solvers):
        protocol = f"stage=conv3 solver={solver}"
        rows.append(make_row(task="linear", protocol=protocol, value=20.0 + number))
    for number, recipe in enumerate(("paper", "swav-1")):
        rows.append(
            make_row(
                task="semisup",
                protocol=f"labeled=0.01 subset=random recipe={recipe}",
                value=30.0 + number,
                details={"fraction": 0.01, "num_labeled": 12_812},
            )
        )
    found = protocols_of(rows)
    assert {protocol for each in found.values() for protocol in each} == {
        row.protocol for row in rows
    }
    assert all(len(each) == 1 for each in found.values()), found


def test_voc07_and_0712_never_share_a_table() -> None:
    common: dict[str, Any] = {"task": "detect", "arch": "resnet50", "metric": "ap50_area"}
    rows = [
        make_row(protocol=f"faster_r50, {DATA.VOC07}", value=60.0, dataset=DATA.VOC07,
                 details={"num_train": 5011, "num_test": 4952}, **common),
        make_row(protocol=f"faster_r50, {DATA.VOC0712}", value=80.0, dataset=DATA.VOC0712,
                 details={"num_train": 16551, "num_test": 4952}, **common),
    ]  # fmt: skip
    grids = build(rows)
    assert cells(grids["table6-resnet50"], "this method, resnet50", "measured")[1] == "60.00 (n=1)"
    for grid in grids.values():
        text = json.dumps([row.cells for row in show_rows(grid)])
        assert not ("60.00" in text and "80.00" in text)
        assert not ("65.4" in text and "80.03" in text)


def test_measurements_stand_below_what_others_published_of_their_protocol() -> None:
    common: dict[str, Any] = {"task": "linear", "arch": "resnet50"}
    rows = []
    for recipe, value in (("openselfsup", 55.0), ("vissl", 44.0)):
        rows += [
            make_row(protocol=f"stage=conv{n} recipe={recipe}", value=value, **common)
            for n in range(1, 6)
        ]
    rows.append(make_row(protocol="stage=backbone recipe=moco", value=57.0, **common))
    common |= {"task": "voc_svm", "metric": "ap_envelope"}
    sizes = {"num_train": 5011, "num_test": 4952}
    for stage, value in ((5, 70.0), (4, 66.0)):
        rows.append(make_row(protocol=f"stage=conv{stage}", value=value, details=sizes, **common))
        protocol = f"stage=conv{stage} k=16"
        rows.append(make_row(protocol=protocol, value=value - 20, details=sizes, **common))
    grids = build(rows)
    assert not grids["table2"].has_measurements  # the paper's are SVMs
    stages, other = grids["imagenet-stages"], grids["imagenet-stages-2"]
    assert cells(stages, "NPID, resnet50") == ("14.28", "31.20", "40.68", "54.46", "56.61")
    assert cells(stages, "NPID, resnet50", "measured") == ("55.00 (n=1)",) * 5
    assert cells(stages, "NPID, resnet50", "difference")[-1] == "-1.6"
    assert "difference" not in {row.kind for row in show_rows(other)}  # another protocol
    assert "recipe=vissl" in other.protocols["conv5"]
    assert cells(grids["imagenet-pooled"], "NPID, resnet50", "difference") == ("+0.4",)
    svm = grids["voc07-svm"]
    assert cells(svm, "NPID, resnet50", "difference")[:6] == ("-4.5", *[DASH] * 4, "-9.0")
    assert "resnet50, NCE: conv5" in svm.notes[0]
    (rest,) = [grid for slug, grid in grids.items() if slug.startswith("other-voc")]
    assert {measured.mean for measured in rest.measurements} == {66.0, 46.0}


def test_a_part_of_voc_is_not_compared_with_the_paper() -> None:
    row = make_row(task="detect", arch="resnet50", metric="ap50_11point", value=60.0,
                   protocol=f"faster_r50, {DATA.VOC07}", dataset=DATA.VOC07,
                   details={"num_train": 400, "num_test": 300})  # fmt: skip
    grids = build([row])
    assert not grids["table6-resnet50"].has_measurements
    assert any(grid.has_measurements for grid in grids.values())


def test_other_data_of_a_benchmarks_name_is_not_the_benchmark() -> None:
    small = make_row(details={"num_train": 13_000, "num_classes": 100}, value=77.0)
    grids = build([small])
    assert not grids["table2"].has_measurements
    (other,) = [grid for slug, grid in grids.items() if slug.startswith("other-")]
    assert "13,000 training images, 100 classes" in other.title


def test_two_image_lists_of_one_benchmark_are_not_averaged() -> None:
    rows = [make_row(value=40.0), make_row(value=50.0, seed=1, data_fingerprint="z" * 64)]
    rows.append(make_row(value=40.0, metric="top5"))
    grids = build(rows)
    assert cells(grids["table2"], "this method, resnet18", "measured")[-1] == "40.00 (n=1)"


def test_demo_rows_stand_in_demo_tables_only() -> None:
    rows = [*DATA.demo_rows(), make_row(value=33.0, facts={"dataset": "demo"})]
    grids = build(rows)
    assert not any(g.has_measurements for g in grids.values() if not g.is_demo)
    demo = [grid for grid in grids.values() if grid.is_demo]
    assert demo
    assert not any(line.published for grid in demo for line in grid.lines)
    shown = "".join(cell for g in demo for row in show_rows(g) for cell in row.cells)
    for value in ("14.50", "66.60", "61.25", "9.87", "12.50", "33.00"):
        assert value in shown


def test_shortened_detectors_are_another_protocol() -> None:
    common: dict[str, Any] = {
        "task": "detect", "arch": "resnet50", "metric": "ap50_11point", "dataset": DATA.VOC07,
        "protocol": f"faster_r50, {DATA.VOC07}",
    }  # fmt: skip
    sizes = {"num_train": 5011, "num_test": 4952}
    rows = [
        make_row(value=60.0, details={**sizes, "iterations": 150_000}, **common),
        make_row(value=20.0, seed=1, details={**sizes, "iterations": 100}, **common),
    ]
    grids = [g for slug, g in build(rows).items() if slug.startswith("table6-resnet50")]
    assert len(grids) == 2
    means = {cells(grid, "this method, resnet50", "measured")[0] for grid in grids}
    assert means == {"60.00 (n=1)", "20.00 (n=1)"}


# Files.


def test_csv_has_numbers_as_numbers() -> None:
    grid = build([make_row(value=40.0), make_row(value=42.0, seed=1)])["table2"]
    rows = list(csv.DictReader(io.StringIO(to_csv(grid))))
    (ours,) = [row for row in rows if row["mean"]]
    assert float(ours["mean"]) == 41.0
    assert float(ours["std"]) == pytest.approx(2**0.5)
    assert (ours["n"], float(ours["published"]), float(ours["difference"])) == ("2", 41.0, 0.0)
    assert ours["protocol"] == "k=200 tau=0.07 embedding"
    printed = sum(len(row.values) for row in paper_numbers.TABLE2)
    assert len(rows) == printed


@pytest.mark.slow
def test_report_writes_page_markdown_tables_and_figures(tmp_path: Path) -> None:
    append_results(DATA.study_rows())
    DATA.write_runs(tmp_path / "runs")
    folder = tmp_path / "runs" / "report"
    keep = folder / "tables" / "mine.csv"
    keep.parent.mkdir(parents=True)
    keep.write_text("not the report's")
    assert main([]) == 0
    page, text = (folder / "report.html").read_text("utf-8"), (folder / "report.md").read_text()
    figures = sorted(path.name for path in (folder / "figures").iterdir())
    assert figures == [
        *("consistency-demo.png", "consistency.png", "detections.jpg", "map.png"),
        "precision-recall-1.png",
        *("pretraining-demo.png", "pretraining.png", "proximal-1.png", "retrieval-demo.png"),
        *("retrieval.png", "semisup-1.png"),  # the demo has one fraction: no curve
    ]
    for name in re.findall(r"\]\((figures/[^)]+)\)", text):
        assert (folder / name).exists()
    # Nothing of the demo before its heading, in either file.
    for whole in (page, text):
        before, _, after = whole.rpartition("Demo: embedded images")
        assert "66.60" not in before
        assert "66.60" in after
    assert "Not drawn: there is no fine-tuning" in text
    results_file().unlink()
    shutil.rmtree(tmp_path / "runs" / "pretrain")
    assert main([]) == 0
    assert not (folder / "figures" / "consistency.png").exists()
    assert keep.read_text() == "not the report's"


def test_check_and_repair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check"]) == 2
    assert "does not exist" in capsys.readouterr().err
    append_results([make_row(), make_row(seed=1)])
    assert main(["--check"]) == 0
    assert "2 rows, all sound" in capsys.readouterr().out
    whole = results_file().read_bytes()
    results_file().write_bytes(whole[:-30])
    assert main(["--check"]) == 2
    assert "line 2: cut short" in capsys.readouterr().err
    assert main([]) == 2  # nor is a report written of a part of the rows
    assert main(["--repair", "--check"]) == 0
    assert "1 rows, all sound" in capsys.readouterr().out
    assert main([]) == 0


# Names are text.

NASTY = (
    *("<img src=x onerror=alert(1)>", '"><script>alert(2)</script>', "a|b `c` $d$ [e](f)"),
    "]]><!-- é 犬 -->\n## heading",
)


class Outline(html.parser.HTMLParser):
    """Tags and text of a page, read as a browser would."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_every_name_is_text_and_nothing_else(tmp_path: Path) -> None:
    rows = []
    for number, name in enumerate(NASTY):
        rows.append(
            make_row(
                weights=name,
                arch=name,
                dataset=name,
                protocol=name,
                value=float(number),
                metric=name.replace("\n", " "),
                details={"pretraining": {}},
            )
        )
        rows.append(
            make_row(weights=name, arch=name, dataset=name, details={"pretraining": {}})
        )  # on the scorecard too
        folder = tmp_path / "runs" / "pretrain" / f"$x{number} <b>"
        folder.mkdir(parents=True)
        config = {"objective": name, "data": "real", "seed": 0}
        (folder / "config.json").write_text(json.dumps(config))
        points = [{"step": i, "epoch": float(i), "loss": 1.0} for i in range(3)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(p) + "\n" for p in points))
    append_results(rows)
    assert main([]) == 0
    folder = tmp_path / "runs" / "report"
    page = (folder / "report.html").read_text("utf-8")
    outline = Outline(page)
    assert outline.tags == {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "dl", "div"),
        *("dt", "dd", "nav", "ul", "li", "a", "section", "table", "thead", "tbody", "tr", "th"),
        *("td", "small", "figure", "picture", "source", "img", "figcaption", "details", "summary"),
        *("span", "b", "header", "main", "footer", "label", "input", "button", "output", "script"),
    }
    assert page.count("<script") == 1
    assert not {name for name in outline.attributes if name.startswith("on")}
    for name in NASTY:
        assert name in outline.text
    text = (folder / "report.md").read_text("utf-8")
    assert not re.search(r"(?<!\\)<(img|script|b)", text)
    assert "\n## heading" not in text
    assert "default-src 'none'" in page
    links = re.compile(
        rf'<a href="({"|".join(map(re.escape, paper_numbers.ADDRESSES.values()))})">'
    )
    assert not re.search(r"https?:|url\(|@import|<link", links.sub("", page))


def test_an_empty_report_says_so() -> None:
    page = render_report("T", [], "nothing", [])
    assert '<p class="warning">nothing</p>' in page


def test_the_report_names_the_jobs_that_failed(tmp_path: Path) -> None:
    assert main(["--no-figures", "--missing", "run-a", "<b>"]) == 0
    folder = tmp_path / "runs" / "report"
    assert "these jobs failed or were not run: run-a, &lt;b&gt;." in (
        folder / "report.html"
    ).read_text("utf-8")
    assert "run-a" in (folder / "report.md").read_text("utf-8")


def test_rows_of_a_real_task_reach_the_report(tiny_network: Path, image_tree: Path) -> None:
    from instdisc.runs.results import read_results
    from transfer.knn import main as knn

    assert knn(["--k", "5", "-j", "0", "--device", "cpu"]) == 0
    row = read_results()[0]
    assert row.details["folder"] == "knn/tiny"
    assert row.details["device"] == "cpu"
    assert row.details["pretraining"] == {"dataset": image_tree.name}
    (entry,) = collect([row])
    assert (entry.family, entry.network.label) == ("k=5 tau=0.07 embedding", "tiny")
    assert f"{image_tree.name} (24 training images, 3 classes" in entry.data


def test_what_a_run_may_change_does_not_make_it_another_pretraining() -> None:
    from instdisc.cli import volatile_fields
    from pretrain.config import PretrainConfig
    from transfer.suites.settings import FIELDS_WITHOUT_EFFECT

    # The length is volatile, since a run may go on, and decisive: longer is another network.
    assert set(FIELDS_WITHOUT_EFFECT) == volatile_fields(PretrainConfig) - {"epochs"}

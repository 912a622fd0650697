"""The scorecard: which numbers, beside which untrained network, and never demo beside real."""

import csv
import io
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from instdisc.runs.results import Result, append_results
from transfer.report import main
from transfer.reporting.rows import collect
from transfer.reporting.scorecard import SHADES, Scorecard, build_scorecard
from transfer.reporting.tables import Tables
from transfer.reporting.text import card_to_csv, card_to_text

DATA: dict[str, Any] = runpy.run_path(str(Path(__file__).with_name("report_data.py")))
make_row: Callable[..., Result] = DATA["make_row"]
UNTRAINED: dict[str, Any] = {"weights": "untrained:run", "details": {"pretraining": {}}}


def build(rows: list[Result], *, is_demo: bool = False) -> Scorecard:
    entries = collect(rows)
    card = build_scorecard(entries, Tables(entries).build(), is_demo=is_demo)
    assert card is not None
    return card


def shown(card: Scorecard) -> dict[str, dict[str, str]]:
    """Label -> heading -> `number [gain]`, with a star for what is bold."""
    return {
        row.label: {
            column.head: f"{cell}{'*' * cell.is_best}"
            + (f" [{cell.gain:+.1f}]" if cell.gain is not None else "")
            for column, cell in zip(card.columns, row.cells, strict=True)
            if cell is not None
        }
        for row in card.rows
    }


def semisup(weights: str, value: float, **changes: Any) -> list[Result]:
    details = {"fraction": 0.01, "num_labeled": 12_812}
    protocol = "labeled=0.01 subset=random recipe=paper"
    return [
        make_row(task="semisup", protocol=protocol, weights=weights, metric=metric, value=v,
                 details=details, **changes)
        for metric, v in (("top1", value), ("top5", value + 20))
    ]  # fmt: skip


def detect(weights: str, value: float, **changes: Any) -> list[Result]:
    details = {"iterations": 150_000, "num_train": 5011, "num_test": 4952}
    return [
        make_row(task="detect", protocol=f"faster_r50, {DATA['VOC07']}", weights=weights,
                 metric=metric, value=value - number, dataset=DATA["VOC07"], details=details,
                 **changes)
        for number, metric in enumerate(("ap50_11point", "ap50_area", "ap", "ap75"))
    ]  # fmt: skip


def test_a_top5_that_is_always_right_is_left_out() -> None:
    heads = [column.head for column in build(semisup("a", 80.0) + semisup("b", 80.0)).columns]
    assert heads == ["1% labels top-1"]
    heads = [column.head for column in build(semisup("a", 80.0) + semisup("b", 60.0)).columns]
    assert heads == ["1% labels top-1", "1% labels top-5"]


def test_each_task_shows_its_headline_number() -> None:
    rows = [make_row(protocol=f"k={k} tau=0.07 embedding", value=40.0 + k) for k in (1, 20, 200)]
    rows += [make_row(metric="top5", value=90.0)]
    rows += [
        make_row(task="retrieve", protocol="k=10 embedding", metric="precision_at_10", value=33.0)
    ]
    for stage in range(1, 6):
        protocol = f"stage=conv{stage} solver=sgd"
        rows.append(make_row(task="linear", protocol=protocol, value=60.0 - stage))
    rows += semisup("run", 30.0) + detect("run", 55.0)
    card = build(rows)
    assert shown(card) == {
        "resnet18, NCE": {
            "kNN top-1": "240.0",
            "retrieval P@10": "33.0",
            "linear conv5 top-1": "55.0",
            "1% labels top-1": "30.0",
            "1% labels top-5": "50.0",
            "detection AP50": "55.0",
        }
    }
    assert card.data_spans == [("ImageNet", 5), ("VOC2007", 1)]
    assert "k=200 tau=0.07 embedding" in card.columns[0].protocol
    assert "150000 iterations" in card.columns[-1].protocol


def test_tasks_that_are_not_known_have_a_column_for_each_number() -> None:
    rows = [make_row(), make_row(task="depth", protocol="a=1", metric="delta_1", value=12.0)]
    rows += [make_row(task="depth", protocol="a=2", metric="delta_1", value=13.0)]
    sizes = {"num_train": 5011, "num_test": 4952}
    for stage in (4, 5):
        for shots, value in (("", 70.0), (" k=1", 20.0), (" k=96", 60.0)):
            rows.append(make_row(task="voc_svm", protocol=f"stage=conv{stage}{shots}", value=value,
                                 metric="ap_envelope", details=sizes))  # fmt: skip
    for shots in (1, 5, 20):
        rows.append(make_row(task="fewshot", protocol=f"5-way {shots}-shot queries=15 backbone",
                             value=50.0 + shots))  # fmt: skip
    (found,) = shown(build(rows)).values()
    assert found == {
        "kNN top-1": "40.0",
        "depth delta 1 (a=1)": "12.0",
        "depth delta 1 (a=2)": "13.0",
        "5-shot top-1": "55.0",
        "SVM conv5 mAP": "70.0",
        "SVM conv5 k=96 mAP": "60.0",
    }


def test_the_variant_of_most_networks_stands_for_a_protocol() -> None:
    rows = [make_row(value=40.0), make_row(protocol="k=5 tau=0.07 embedding", value=30.0)]
    rows += [make_row(protocol="k=5 tau=0.07 embedding", weights="timm:x", arch="timm:x",
                      value=50.0, details={"pretraining": {}})]  # fmt: skip
    rows += [make_row(task="linear", protocol=f"stage=conv{stage} solver=sgd", value=60.0 - stage)
             for stage in (1, 2, 3)]  # fmt: skip
    assert shown(build(rows)) == {
        "resnet18, NCE": {"kNN top-1": "30.0", "linear conv1 top-1": "59.0"},
        "timm:x": {"kNN top-1": "50.0*"},
    }


def test_untrained_and_scratch_are_one_row_and_the_base_of_all_differences() -> None:
    rows = [make_row(value=41.0), make_row(value=43.0, seed=1)]
    rows += [make_row(value=25.8, **UNTRAINED)]
    rows += semisup("run", 30.0) + semisup("scratch", 12.5)
    rows += detect("run", 50.0) + detect("supervised:r18.pth", 60.0) + detect("scratch", 20.0)
    assert shown(build(rows)) == {
        "resnet18, NCE": {
            "kNN top-1": "42.0 ± 1.4 (n=2)* [+16.2]",
            "1% labels top-1": "30.0* [+17.5]",
            "1% labels top-5": "50.0* [+17.5]",
            "detection AP50": "50.0 [+30.0]",
        },
        "resnet18, untrained / from scratch": {
            "kNN top-1": "25.8",
            "1% labels top-1": "12.5",
            "1% labels top-5": "32.5",
            "detection AP50": "20.0",
        },
        "resnet18, supervised:r18.pth": {"detection AP50": "60.0* [+40.0]"},
    }


def test_a_network_is_compared_with_what_it_may_have_started_from() -> None:
    rows = []
    for dim, value in ((32, 30.0), (128, 40.0)):
        name, facts = f"d{dim}", {"embedding_dim": dim}
        rows.append(make_row(weights=name, facts=facts, value=value))
        rows.append(make_row(value=value / 4, **UNTRAINED | {"weights": f"untrained:{name}"}))
    rows += semisup("d32", 50.0, facts={"embedding_dim": 32}) + semisup("scratch", 10.0)
    rows.append(make_row(arch="resnet50", value=60.0))
    found = shown(build(rows))
    assert {label: cells["kNN top-1"] for label, cells in found.items()} == {
        "resnet18, NCE (32-d)": "30.0 [+22.5]",
        "resnet18, NCE": "40.0 [+30.0]",
        "resnet18, untrained (untrained:d32) / from scratch": "7.5",
        "resnet18, untrained (untrained:d128)": "10.0",
        "resnet50, NCE": "60.0*",  # no ResNet-50 was measured untrained
    }
    assert found["resnet18, NCE (32-d)"]["1% labels top-1"] == "50.0* [+40.0]"


def test_untrained_networks_of_several_seeds_are_repetitions() -> None:
    rows = []
    for seed in (0, 1):
        rows.append(make_row(weights=f"s{seed}", facts={"seed": seed}, value=40.0 + seed))
        rows.append(make_row(value=10.0 + seed, **UNTRAINED | {"weights": f"untrained:s{seed}"}))
    found = shown(build(rows))
    assert found["resnet18, untrained"] == {"kNN top-1": "10.5 ± 0.7 (n=2)"}
    assert found["resnet18, NCE"] == {"kNN top-1": "40.5 ± 0.7 (n=2)* [+30.0]"}


def test_two_untrained_numbers_of_one_column_keep_their_rows() -> None:
    rows = [make_row(value=40.0), make_row(value=10.0, **UNTRAINED)]
    rows.append(make_row(value=8.0, **UNTRAINED | {"weights": "random:resnet18"}))
    card = build(rows)
    assert [row.cells[0].measured.mean for row in card.rows if row.cells[0]] == [40.0, 10.0, 8.0]
    assert card.rows[0].cells[0] is not None
    assert card.rows[0].cells[0].gain == 30.0  # the exact start before any other


def test_rows_are_ordered_and_cells_shaded() -> None:
    rows = [
        make_row(value=70.0, weights="supervised:x.pth"),
        make_row(value=50.0, weights="imported", details={"pretraining": {}}),
        make_row(value=20.0, weights="data-init:resnet18"),
        make_row(value=10.0, weights="random:resnet18"),
        make_row(value=40.0),
        make_row(value=30.0, arch="alexnet"),
    ]
    card = build(rows)
    cells = [row.cells[0] for row in card.rows]
    assert [cell.measured.mean for cell in cells if cell] == [30.0, 40.0, 10.0, 20.0, 50.0, 70.0]
    shades = [cell.shade for cell in cells if cell]
    assert shades == [2, 3, 1, 2, 4, SHADES]
    assert [cell.is_best for cell in cells if cell] == [False] * 5 + [True]


def test_demo_and_real_are_never_in_one_card() -> None:
    rows = [
        make_row(value=40.0),
        *DATA["demo_rows"](),
        make_row(value=33.0, facts={"dataset": "demo"}),
    ]
    real, demo = build(rows), build(rows, is_demo=True)
    assert (real.slug, demo.slug) == ("scorecard", "scorecard-demo")
    assert [*shown(real).values()] == [{"kNN top-1": "40.0"}]
    values = {cell.measured.mean for row in demo.rows for cell in row.cells if cell}
    assert values == {14.5, 61.25, 9.87, 12.5, 33.0}
    entries = collect([make_row()])
    assert build_scorecard(entries, Tables(entries).build(), is_demo=True) is None


def test_equal_headings_are_told_apart_by_what_differs() -> None:
    rows = [make_row(task="linear", protocol=f"stage=conv5 solver=sgd{more}", value=50.0)
            for more in ("", " loss=softmax")]  # fmt: skip
    rows += [make_row(details={"num_train": count, "num_classes": 10}) for count in (20, 30)]
    heads = [column.head for column in build(rows).columns]
    assert len({*heads}) == 4
    assert {"linear conv5 top-1", "linear conv5 top-1 (loss=softmax)"} <= {*heads}


def test_labels_are_short_distinct_and_explained() -> None:
    rows = [make_row(weights=f"t{n}", facts={"temperature": t}) for n, t in enumerate((0.05, 0.07))]
    rows += [make_row(weights="b1", facts={"batch_size": size}) for size in (8, 9)]
    card = build(rows)
    labels = [row.label for row in card.rows]
    assert labels[0] == "resnet18, NCE (tau 0.05)"
    assert len({*labels}) == 4
    assert "temperature 0.05" in card.rows[0].settings
    assert "batch size 256" in card.rows[0].settings


def test_headings_lead_to_the_table_that_has_the_number() -> None:
    entries = collect(DATA["study_rows"]())
    grids = Tables(entries).build()
    for is_demo in (False, True):
        card = build_scorecard(entries, grids, is_demo=is_demo)
        assert card is not None
        for number, column in enumerate(card.columns):
            (grid,) = [grid for grid in grids if grid.slug == column.anchor]
            inside = set(map(id, grid.measurements))
            assert inside & {id(c.measured) for r in card.rows if (c := r.cells[number])}


def test_terminal_shows_all_numbers_within_its_width() -> None:
    card = build(DATA["study_rows"]())
    for width in (80, 200):
        text = card_to_text(card, width)
        assert max(map(len, text.splitlines()[1:])) <= width
        for row in card.rows:
            assert row.label in text
            assert all(cell.number in text for cell in row.cells if cell)
    assert re.search(r"^resnet50, supervised:r50.pth +74\.5 \+53\.5\*", text, re.MULTILINE)
    name = "\x1b[31mred"
    other = build([make_row(weights=name, arch=name, details={"pretraining": {}})])
    assert "\x1b" not in card_to_text(other, 80)


def test_csv_has_numbers_as_numbers() -> None:
    rows = [make_row(value=41.0), make_row(value=43.0, seed=1), make_row(value=25.75, **UNTRAINED)]
    ours, start = csv.DictReader(io.StringIO(card_to_csv(build(rows))))
    assert (ours["network"], ours["data"], ours["column"]) == (
        *("resnet18, NCE", "ImageNet", "kNN top-1"),
    )
    assert [float(ours[name]) for name in ("mean", "n", "untrained", "difference")] == [
        *(42.0, 2.0, 25.75, 16.25),
    ]
    assert float(ours["std"]) == pytest.approx(2**0.5)
    assert (start["mean"], start["std"], start["difference"]) == ("25.75", "", "")


def test_report_begins_with_the_scorecard_and_ends_with_what_was_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    append_results(DATA["study_rows"]())
    assert main(["--no-figures"]) == 0
    folder = tmp_path / "runs" / "report"
    page, text = ((folder / name).read_text("utf-8") for name in ("report.html", "report.md"))
    headings = [
        *("Measured", "The paper's tables", "Also measured", "Demo: embedded images"),
        "Published, not measured here",
    ]
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == headings
    found = re.findall(r"<h2[^>]*>([^<]*)<", page)
    cards = ["Scorecard", "Scorecard: embedded demo images "]
    assert [heading.replace("&#39;", "'") for heading in found] == [*cards, *headings[1:]]
    folded = page.partition("<details id=")[2]
    assert not folded.startswith(" open")
    assert 'id="table6-vgg16"' in folded
    assert 'id="table2"' not in folded
    assert page.index('id="scorecard"') < page.index('id="scorecard-demo"')
    assert page.index('<span class="badge">demo</span>') > page.index('id="scorecard-demo"')
    for anchor in re.findall(r'href="#([^"]*)"', page):
        assert f'id="{anchor}"' in page
    tables = {path.name for path in (folder / "tables").iterdir()}
    assert {"scorecard.csv", "scorecard-demo.csv"} <= tables
    said = capsys.readouterr().out
    assert said.index("Scorecard (") < said.index("Scorecard: embedded demo images (")
    page_name = folder / "report.html"
    assert f"\nreport: {page_name}\nopen it: " in said
    assert said.splitlines()[-1].endswith(str(page_name))


def test_compare_prints_the_scorecard_of_some_networks_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    networks = (("a", 0.05, 41.0), ("b", 0.1, 43.5), ("c", 0.2, 99.0))
    rows = [make_row(weights=n, facts={"temperature": tau}, value=v) for n, tau, v in networks]
    rows.append(make_row(value=25.0, **UNTRAINED | {"weights": "untrained:a"}))
    append_results(rows)
    assert main(["--compare", "runs/pretrain/a", "elsewhere/b/backbone.pt"]) == 0
    said = capsys.readouterr().out
    for text in ("resnet18, NCE (tau 0.05)", "41.0 +16.0", "43.5 +18.5*", "resnet18, untrained"):
        assert text in said
    assert "99.0" not in said
    assert not (tmp_path / "runs" / "report").exists()
    assert main(["--compare", "a", "d"]) == 2
    assert "no row is of d: measure it first; there are a, b, c" in capsys.readouterr().err

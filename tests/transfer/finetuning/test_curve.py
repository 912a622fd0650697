"""The semi-supervised figure: which rows make which line."""

from pathlib import Path
from typing import Any

from instdisc.runs.results import Result
from transfer.finetuning.curve import curve_points, draw_curve


def row(weights: str, fraction: float, seed: int, value: float, **changes: Any) -> Result:
    fields: dict[str, Any] = {
        "task": "semisup",
        "protocol": f"labeled={fraction}",
        "arch": "tiny",
        "weights": weights,
        "weights_hash": "h",
        "dataset": "d",
        "data_fingerprint": "f",
        "metric": "top5",
        "value": value,
        "seed": seed,
        "config_hash": "c",
        "details": {"curve": "x", "fraction": fraction},
        "provenance": {},
    }
    return Result(**{**fields, **changes})


def test_the_curve_takes_what_belongs_together(tmp_path: Path) -> None:
    like = row("ours", 0.1, 0, 60.0)
    rows = [
        row("ours", 0.1, 0, 11.0, weights_hash="older"),
        row("ours", 0.1, 0, 60.0),
        row("ours", 0.1, 1, 64.0),
        row("ours", 0.01, 0, 30.0),
        row("scratch", 0.01, 0, 10.0, weights_hash="seed 0"),
        row("scratch", 0.01, 1, 14.0, weights_hash="seed 1"),
        row("ours", 0.2, 0, 99.0, data_fingerprint="other"),
        row("ours", 0.2, 0, 99.0, arch="other"),
        row("ours", 0.2, 0, 99.0, metric="top1"),
        row("ours", 0.2, 0, 99.0, details={"curve": "other recipe", "fraction": 0.2}),
        row("ours", 0.2, 0, 99.0, task="knn", details={}),
    ]
    lines = {
        name: [(fraction, summary.mean, summary.count) for fraction, summary in points]
        for name, points in curve_points(rows, like, "top5").items()
    }
    assert lines == {
        "ours": [(0.01, 30.0, 1), (0.1, 62.0, 2)],
        "scratch": [(0.01, 12.0, 2)],
    }
    files = draw_curve(rows, like, tmp_path)
    assert [file.name for file in files] == ["curve.png", "curve.svg"]
    drawing = files[1].read_text()
    for text in ("ours", "scratch", "1%", "10%", "top-5 accuracy (%)", "std over 2 trials"):
        assert f"{text}<" in drawing, text
    assert "20%<" not in drawing

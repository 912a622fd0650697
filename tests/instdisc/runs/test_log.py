"""metrics.jsonl survives a resume without repeated or lost rows."""

from pathlib import Path

from instdisc.runs.folders import read_jsonl
from instdisc.runs.log import MetricsLog, StepBar


def test_rows_after_the_checkpoint_are_dropped_on_resume(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, step=0, tensorboard=False)
    for step in (1, 2, 3):
        log.write(step, loss=float(step))
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed in mid-line
    log = MetricsLog(tmp_path, step=2, tensorboard=False)
    log.write(3, loss=30.0)
    log.close()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_other_processes_write_nothing(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, step=0, enabled=False)
    log.write(1, loss=1.0)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_events_are_written(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, step=0, tensorboard=True)
    log.write(1, loss=1.0, note="text is not a scalar")
    log.close()
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_the_rate_counts_only_this_process() -> None:
    bar = StepBar(100, 90, batch_size=10, enabled=False)
    bar.started -= 5.0
    bar.advance(1.0, 0.91)
    assert 1.5 < bar.images_per_second < 2.0
    bar.close()

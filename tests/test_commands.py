"""Every command asks nothing of torch until its arguments are right."""

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[1]
SCRIPTS = sorted(
    target.partition(":")[0].replace(".", "/") + ".py"
    for target in tomllib.loads((REPO / "pyproject.toml").read_text("utf-8"))["project"][
        "scripts"
    ].values()
)
HEAVY = {
    *("torch", "torchvision", "timm", "detectron2", "fvcore", "submitit", "tensorboard"),
    *("numpy", "scipy", "sklearn", "matplotlib", "cv2", "PIL", "yaml", "tqdm"),
}


def run(
    script: str, *argv: str, options: tuple[str, ...] = ()
) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONUTF8": "1"}
    return subprocess.run(
        [sys.executable, *options, str(REPO / script), *argv],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_imports_nothing_heavy_and_is_quick(script: str) -> None:
    shown = run(script, "--help", options=("-X", "importtime"))
    assert shown.returncode == 0, shown.stderr
    imported = {line.rpartition("|")[2].strip() for line in shown.stderr.splitlines()}
    assert {"argparse", "instdisc.cli"} <= imported
    assert not HEAVY & {name.partition(".")[0] for name in imported}
    started = time.perf_counter()
    assert run(script, "--help").stdout == shown.stdout
    seconds = time.perf_counter() - started
    sys.stdout.write(f"{script} --help: {seconds:.2f} s\n")
    assert seconds < 2, "0.1 to 0.3 s is usual; a loaded machine takes longer"


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_unknown_flag_is_one_line_and_code_2(script: str) -> None:
    refused = run(script, "--no-such-flag", "1")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "error: unrecognized arguments: --no-such-flag" in refused.stderr

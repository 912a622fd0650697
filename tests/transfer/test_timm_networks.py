"""Every task with timm's networks, from a backbone.pt of small images."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from instdisc.images.transforms import InputSpec
from instdisc.networks.backbones import Embedding, backbone_payload, build_any
from instdisc.runs.checkpoint import save_checkpoint
from instdisc.runs.results import read_results
from instdisc.training.seed import seeded
from transfer.embed import main as embed
from transfer.knn import main as knn
from transfer.linear import main as linear
from transfer.report import main as report
from transfer.retrieve import main as retrieve
from transfer.semisup import main as semisup

NETWORKS = (
    *("resnet18", "resnet50d", "convnext_tiny", "swin_tiny_patch4_window7_224"),
    *("mobilenetv3_large_100", "vit_small_patch16_224", "efficientnet_b0"),
)
SMALL = ("test_convnext", "test_vit2")


@pytest.fixture
def network(tmp_path: Path) -> Callable[[str], Path]:
    """Writes a checkpoint of random weights that wants 32 pixels."""

    def make(name: str) -> Path:
        with seeded(0, "test"):
            model = Embedding(build_any(f"timm:{name}", size=32), 8)
        payload = {
            **backbone_payload(model),
            "input": InputSpec(size=32, interpolation="bicubic").to_dict(),
            "pretraining": {},
        }
        file = tmp_path / f"{name}.pt"
        save_checkpoint(file, "backbone", payload)
        return file

    return make


@pytest.mark.parametrize(
    "name", [*SMALL, *(pytest.param(name, marks=pytest.mark.slow) for name in NETWORKS)]
)
def test_every_task_takes_a_timm_network(
    name: str, network: Callable[[str], Path], image_tree: Path, tmp_path: Path
) -> None:
    common = ["--weights", str(network(name)), "--data", str(image_tree)]
    common += ["--device", "cpu", "-j", "0"]
    stages = build_any(f"timm:{name}", size=32).stage_names
    assert knn([*common, "--features", "embedding", "backbone", stages[-1], "-k", "3"]) == 0
    assert retrieve([*common, "--features", stages[0]]) == 0
    assert linear([*common, "--cost", "1", "--epochs", "2", "-b", "8"]) == 0
    options = ["--labeled", "0.5", "--init", "pretrained", "scratch", "--epochs", "1", "-b", "8"]
    assert semisup([*common, *options]) == 0
    assert embed([*common, "--features", stages[1], "--output", str(tmp_path / "out")]) == 0
    rows = read_results()
    found = {row.details["stage"] for row in rows if row.task == "linear"}
    assert found == set(stages)
    assert {row.arch for row in rows} == {f"timm:{name}"}
    assert {row.task for row in rows} == {"knn", "retrieve", "linear", "semisup"}
    table = np.load(tmp_path / "out" / f"{image_tree.name}-{stages[1]}.npy")
    assert table.shape[0] == 24 + 6
    assert report([]) == 0
    page = (tmp_path / "runs" / "report" / "report.html").read_text("utf-8")
    assert all(stage in page for stage in stages)


def test_a_stage_that_the_network_lacks_is_one_line(
    network: Callable[[str], Path], image_tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--weights", str(network("test_vit2")), "--data", str(image_tree)]
    common += ["--device", "cpu", "-j", "0"]
    for command, flag in ((knn, "--features"), (linear, "--stage"), (embed, "--features")):
        assert command([*common, flag, "conv3"]) == 2
        said = capsys.readouterr().err.splitlines()[-1]
        assert "has no conv3: choose from embedding, backbone, block2, block4" in said
    with pytest.raises(SystemExit):
        knn([*common, "--features", "stageX"])

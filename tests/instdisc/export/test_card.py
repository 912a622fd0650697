"""The model card: data, recipe, and the rows of this very network, as the hub reads them."""

import dataclasses

import pytest
import yaml

from instdisc.export.bundle import export_backbone
from instdisc.networks.weights import open_weights
from instdisc.runs.checkpoint import save_checkpoint
from instdisc.runs.results import Result, append_results


@pytest.fixture
def weights(payload, tmp_path):
    path = tmp_path / "backbone.pt"
    config = {"objective": "nce", "temperature": 0.07, "num_negatives": 4096}
    known = {"config": config, "dataset": "a|b: [c]", "data_fingerprint": "f" * 64, "epoch": 2.0}
    save_checkpoint(path, "backbone", {**payload("resnet18"), "pretraining": known})
    return path


def test_the_card_has_recipe_data_and_the_rows_of_these_weights(weights, tmp_path):
    row = Result(task="knn", protocol="k=200 tau=0.07 embedding", arch="resnet18", weights="run",
                 weights_hash=open_weights(weights).hash, dataset="a|b", data_fingerprint="f" * 64,
                 metric="top1", value=41.0, seed=0, config_hash="c" * 64)  # fmt: skip
    other = dataclasses.replace(row, weights_hash="0" * 64, value=77.7)
    append_results([row, dataclasses.replace(row, seed=1, value=43.0), other])
    export_backbone(weights, tmp_path / "export", targets=("timm",))
    card = (tmp_path / "export" / "timm" / "README.md").read_text("utf-8")
    _, head, body = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "timm",
        "pipeline_tag": "image-feature-extraction",
        "license": "unknown",
        "tags": ["timm", "image-feature-extraction", "instance-discrimination"],
        "datasets": ["a|b: [c]"],
    }
    assert "| knn | a\\|b | k=200 tau=0.07 embedding | top1 | 42.00 ± 1.41 (n=2) |" in body
    assert "77.7" not in body
    assert "| num negatives | 4096 |" in body
    assert "(1, 512)" in body
    assert "import instdisc" not in body  # timm knows ResNet-18


def test_without_rows_the_card_says_how_to_get_them(weights, tmp_path):
    export_backbone(weights, tmp_path / "export", targets=("timm",))
    card = (tmp_path / "export" / "timm" / "README.md").read_text("utf-8")
    assert "None yet: measure with `transfer/suite.py`" in card

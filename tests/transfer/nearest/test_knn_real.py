"""kNN of two published networks on ImageNet photos, against what is known of them."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from instdisc.importers.api import import_checkpoint
from instdisc.neighbors.vote import classify, top_k_accuracy
from instdisc.runs.checkpoint import save_checkpoint
from instdisc.runs.results import read_results
from transfer.knn import main

# Top-1 with 20 neighbours on 500 training and 250 validation images, from their README.
NETWORKS = {
    "resnet18": ("resnet18_trunk_imagenet_fp16.pth", 97.0),
    "alexnet": ("alexnet_features_imagenet.pth", 84.0),
}
KS = (10, 20, 100, 200)


@pytest.fixture
def photos(shared_data: Path, tmp_path: Path) -> Path:
    """The first 50 training and 25 validation images of each class."""
    for split, count in (("train", 50), ("val", 25)):
        for folder in sorted((shared_data / "imagenette-mini" / split).iterdir()):
            target = tmp_path / "photos" / split / folder.name
            target.mkdir(parents=True)
            for image in sorted(folder.iterdir())[:count]:
                (target / image.name).symlink_to(image)
    return tmp_path / "photos"


def measure(weights: str, photos: Path) -> dict[int, float]:
    """Top-1 by k with the backbone's features."""
    command = ["--weights", weights, "--data", str(photos), "--features", "backbone"]
    ks = [str(k) for k in KS]
    assert main([*command, "--k", *ks, "--precision", "float32", "-j", "0"]) == 0
    rows = [row for row in read_results() if row.metric == "top1"][-len(KS) :]
    return {int(row.protocol.split()[0].removeprefix("k=")): row.value for row in rows}


def stored_tables() -> dict[int, torch.Tensor]:
    """What the store holds, by number of images."""
    tables = {}
    for entry in (Path(os.environ["INSTDISC_RUNS"]) / "features").glob("*/entry.json"):
        rows = np.load(entry.parent / "features.npy")
        tables[json.loads(entry.read_text("utf-8"))["num_images"]] = torch.from_numpy(rows)
    return tables


@pytest.mark.slow
@pytest.mark.parametrize("arch", NETWORKS)
def test_published_network(arch: str, shared_data: Path, photos: Path, tmp_path: Path) -> None:
    file, expected = NETWORKS[arch]
    report = import_checkpoint(
        shared_data / "weights" / file, format="torchvision", allow_missing_fc=True
    )
    weights = tmp_path / "imported" / "backbone.pt"
    save_checkpoint(weights, "backbone", report.payload)
    found = measure(str(weights), photos)
    assert found[20] == pytest.approx(expected, abs=3)

    # Half the bytes, the same accuracy: less than 0.1 points of 250 images is not one of them.
    tables = stored_tables()
    train, val = np.repeat(np.arange(10), 50), torch.arange(10).repeat_interleave(25)
    halves = classify(
        tables[250].half(),
        tables[500].half(),
        torch.from_numpy(train),
        num_classes=10,
        num_neighbors=KS,
        temperature=0.07,
    )
    for k in KS:
        assert top_k_accuracy(halves[k], val, 1) == pytest.approx(found[k], abs=0.1)

    random = measure(f"random:{arch}", photos)
    assert found[20] - random[20] >= 50

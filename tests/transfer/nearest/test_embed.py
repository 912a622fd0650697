"""Features as files: their values, their names, interruption, refusals, use from Python."""

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import instdisc
from instdisc.errors import Interrupted
from instdisc.features import store as feature_store
from instdisc.images.transforms import eval_transform
from instdisc.networks.weights import open_weights
from transfer.embed import main
from transfer.nearest.embed import run_embed
from transfer.nearest.settings import EmbedConfig

FLAGS = ("--device", "cpu", "-j", "0")


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("features", ["backbone", "embedding", "conv3"])
@torch.no_grad()
def test_rows_are_what_the_network_gives_for_the_named_image(
    features: str, tiny_network: Path, image_tree: Path
) -> None:
    assert main([*FLAGS, "--data", str(image_tree), "--features", features]) == 0
    folder = tiny_network.parents[2] / "embed" / "tiny"
    table = np.load(folder / f"{image_tree.name}-{features}.npy")
    rows = read_csv(folder / f"{image_tree.name}-{features}.csv")
    assert table.dtype == np.float32
    assert len(table) == len(rows) == 24 + 6
    assert [row["split"] for row in rows] == ["train"] * 24 + ["val"] * 6
    weights = open_weights(tiny_network)
    assert weights.embedding is not None
    network = instdisc.load_backbone(tiny_network)
    transform = eval_transform(weights.spec)
    for row, found in zip(rows, table, strict=True):
        assert Path(row["image"]).parent.name == row["class"]
        pixels = transform(Image.open(row["image"]).convert("RGB"))[None]
        if features == "conv3":
            expected = network.stages(pixels)["conv3"].mean((2, 3))
        else:
            expected = network(pixels) if features == "backbone" else weights.embedding(pixels)
        np.testing.assert_allclose(found, expected[0].numpy(), rtol=1e-6, atol=1e-6)


def test_an_interrupted_command_goes_on_to_the_same_files(
    tiny_network: Path, image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def config(name: str) -> EmbedConfig:
        return EmbedConfig(
            data=str(image_tree), output=tmp_path / name, workers=0, device="cpu", batch_size=2
        )

    monkeypatch.setattr(feature_store, "CHUNK_ROWS", 5)
    whole = run_embed(config("whole"))
    shutil.rmtree(tmp_path / "runs" / "features")
    written: list[int] = []
    inner = feature_store.ChunkedTable.write

    def write(self: feature_store.ChunkedTable, chunk: int, values: np.ndarray) -> None:
        inner(self, chunk, values)
        written.append(chunk)
        if len(written) == 2:
            raise Interrupted("stopped")

    monkeypatch.setattr(feature_store.ChunkedTable, "write", write)
    with pytest.raises(Interrupted):
        run_embed(config("parts"))
    assert not list((tmp_path / "parts").glob("*.npy"))
    parts = run_embed(config("parts"))
    assert written == [0, 1, 2, 3, 4, 0, 1]  # train from its third chunk, then val
    for one, two in zip(whole, parts, strict=True):
        assert one.read_bytes() == two.read_bytes()


def test_normalised_half_and_one_split(tiny_network: Path, image_tree: Path) -> None:
    config = EmbedConfig(
        data=str(image_tree), workers=0, device="cpu", normalize=True, precision="half", split="val"
    )
    table, listing = run_embed(config)
    rows = np.load(table)
    assert rows.shape[0] == len(read_csv(listing)) == 6
    assert rows.dtype == np.float16
    np.testing.assert_allclose(np.linalg.norm(rows.astype(np.float32), axis=1), 1, atol=1e-3)


def test_the_same_from_python(tiny_network: Path, image_tree: Path, tmp_path: Path) -> None:
    found = instdisc.embed(image_tree, tiny_network, device="cpu")
    table, listing = found.save(tmp_path / "mine")
    expected = run_embed(EmbedConfig(data=str(image_tree), workers=0, device="cpu"))
    assert table.read_bytes() == expected[0].read_bytes()
    assert listing.read_bytes() == expected[1].read_bytes()
    assert (tmp_path / "mine.npy", tmp_path / "mine.csv") == (table, listing)


def test_unreadable_images(
    tiny_network: Path, image_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = Path(shutil.copytree(image_tree / "train", tmp_path / "photos"))
    (data / "class0" / "3.png").write_bytes(b"nothing")
    flags = [*FLAGS, "--data", str(data), "--output", str(tmp_path / "out")]
    assert main(flags) == 2
    assert "3.png is not a readable image" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.npy"))
    assert main([*flags, "--skip-bad-images"]) == 0
    rows = read_csv(tmp_path / "out" / "photos-backbone.csv")
    assert len(rows) == len(np.load(tmp_path / "out" / "photos-backbone.npy")) == 23
    assert not any(row["image"].endswith("class0/3.png") for row in rows)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--data", "nowhere"], "nowhere does not exist"),
        (["--weights", "nowhere"], "no such run"),
        (["--features", "stage2"], "has no stage2: choose from embedding, backbone, conv1"),
        (["--split", "val", "--data", "{train}"], "has no val/"),
    ],
)
def test_bad_input_is_one_line(
    flags: list[str],
    words: str,
    tiny_network: Path,
    image_tree: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [flag.format(train=image_tree / "train") for flag in flags]
    assert main([*FLAGS, *given]) == 2
    said = capsys.readouterr().err
    assert words in said.splitlines()[-1]
    assert said.count("error:") == 1


def test_names_that_are_no_text_and_commas(
    tiny_network: Path, image_tree: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "photos" / "a, b"
    folder.mkdir(parents=True)
    for number, name in enumerate((b"one,\n.png", b"\xff.png")):
        shutil.copy(image_tree / "val" / "class0" / f"{number}.png", folder)
        (folder / f"{number}.png").rename(
            Path(str(folder), name.decode("utf-8", "surrogateescape"))
        )
    table, listing = run_embed(EmbedConfig(data=str(tmp_path / "photos"), workers=0, device="cpu"))
    rows = read_csv(listing)
    assert [row["class"] for row in rows] == ["a, b"] * 2 == ["a, b"] * len(np.load(table))
    assert [Path(row["image"]).name for row in rows] == ["one,\n.png", "\\udcff.png"]

"""Mutated files of every kind that the commands read: success or a UserError, and nothing else.

    python tests/faults/fuzz.py                     20,000 mutations over all kinds
    python tests/faults/fuzz.py xml mat --count 100

A reader works in a child process with bounded memory and a time limit for each file, so that a
crash, a hang and an attempt to take all memory are found as well as an exception that no command
would turn into one line. Exit code 1 if there was one; the file that caused it is kept. A new kind
of file needs a function that returns a `Kind`, and a line in `KINDS`. --record FILE puts the counts
into a file of docs/results.
"""

import argparse
import dataclasses
import io
import json
import os
import pickle
import random
import re
import resource
import shutil
import signal
import sys
import tarfile
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from PIL import Image
from record import record

from instdisc.cli import parse, to_dict
from instdisc.errors import UserError, explain
from instdisc.runs.results import Result, read_results
from pretrain.config import PretrainConfig

MEMORY = 1_500_000_000  # bytes more than the process has when it starts
SECONDS = 20  # for one file
# Names that matter: some readers look at the ending, and one takes the image's id from the name.
FILES = {
    "yaml": "fuzzed.yaml", "mat": "000005_boxes.mat", "images": "x.jpg", "checkpoints": "x.pt",
    "lists": "x.csv", "tars": "x.tar", "foreign": "x.pth", "labels": "labels.txt",
    "toml": "slurm.toml", "coco": "instances_x.json", "kit": "meta.mat",
}  # fmt: skip
TOKENS = (
    b"", b"\0", b"\xff" * 4, b"\x7f\xff\xff\xff", b"-1", b"1e999", b"NaN", b"null", b"[]", b"{}",
    b"999999999999999999999", b"<!DOCTYPE a [<!ENTITY b 'c'>]>", b"&b;", b"!!python/name:os.system",
    b"*a", b"&a", b"../../../etc/passwd", b"\xed\xa0\x80", b"\n", b"'", b'"', b"true", b"\r\n\t",
)  # fmt: skip


def mutate(content: bytes, draw: random.Random) -> bytes:
    """One to four small changes, or a cut."""
    data = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(data) + 1)
        length = min(len(data) - place, int(draw.expovariate(0.1)))
        kind = draw.randrange(7)
        if kind == 0 and place < len(data):
            data[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[place : place + length] = draw.randbytes(length)
        elif kind == 2:
            data[place : place + draw.choice((0, length))] = draw.choice(TOKENS)
        elif kind == 3:
            del data[place : place + length]
        elif kind == 4:
            data[place:place] = data[place : place + length] * draw.randint(1, 3)
        elif kind == 5 and draw.random() < 0.3:
            del data[place:]
        elif kind == 6 and place + 4 <= len(data):
            number = draw.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0x80000000, 65536))
            data[place : place + 4] = number.to_bytes(4, draw.choice(("little", "big")))
    return bytes(data)


def change(value: Any, draw: random.Random, depth: int = 0) -> Any:
    """A nested value with one part exchanged for something else, or missing."""
    others = (None, -1, 0, 1e300, "", "x" * 50, [], {}, True, b"bytes", [1, 2], {"a": 1})
    if depth and (not isinstance(value, dict | list) or not value or draw.random() < 0.15):
        return draw.choice(others)
    if isinstance(value, dict):
        key = draw.choice(list(value))
        if draw.random() < 0.2:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: change(value[key], draw, depth + 1)}
    if isinstance(value, list):
        place = draw.randrange(len(value))
        return [*value[:place], change(value[place], draw, depth + 1), *value[place + 1 :]]
    return value


@dataclasses.dataclass(frozen=True)
class Kind:
    """Files of one kind: good ones, how to spoil them, how a command reads them."""

    name: str
    seeds: list[bytes]
    read: Callable[[Path], object]
    spoil: Callable[[bytes, random.Random], bytes] = mutate


def images(folder: Path) -> Kind:
    """What training decodes."""
    from instdisc.images.loading import Samples
    from instdisc.images.sets import ImageSet
    from instdisc.images.transforms import InputSpec, pretrain_transform

    rng = np.random.default_rng(0)
    rgb = Image.fromarray(rng.integers(0, 255, (40, 30, 3), dtype=np.uint8))
    deep = Image.fromarray(rng.integers(0, 65535, (20, 20), dtype=np.uint16))
    turned = Image.Exif()
    turned[0x0112] = 6
    several = {"save_all": True, "append_images": [rgb.rotate(90), rgb.rotate(180)]}
    made: list[tuple[Image.Image, str, dict[str, Any]]] = [
        (rgb, "JPEG", {}), (rgb, "JPEG", {"exif": turned, "progressive": True}),
        (rgb.convert("CMYK"), "JPEG", {}), (rgb.convert("L"), "JPEG", {}), (rgb, "PNG", {}),
        (rgb.convert("P"), "PNG", {}), (rgb.convert("RGBA"), "PNG", {}), (deep, "PNG", {}),
        (rgb, "PNG", several), (rgb.resize((1, 1)), "PNG", {}), (rgb, "BMP", {}),
        (rgb, "PPM", {}), (rgb, "TIFF", {"compression": "tiff_lzw"}), (deep, "TIFF", {}),
        (rgb, "WEBP", several), (rgb, "GIF", several), (rgb, "ICO", {}), (rgb, "TGA", {}),
    ]  # fmt: skip
    seeds = []
    for image, form, options in made:
        stream = io.BytesIO()
        image.save(stream, form, **options)
        seeds.append(stream.getvalue())
    spec = InputSpec(size=16)

    def read(path: Path) -> object:
        one = ImageSet(
            "fuzz", "train", ("a",), np.array([os.fsencode(path.name)]), np.zeros(1, np.int64),
            np.ones(1, np.int64), path.parent,
        )  # fmt: skip
        _, _, error = Samples(one, pretrain_transform(spec), spec, 0)[(0, 0)]
        one.open(0)
        if error:  # half of a file may be enough for one of the two
            raise UserError(error)
        return one

    return Kind("images", seeds, read)


def read_set(path: Path) -> object:
    """A set as training opens it, and each of its images."""
    from instdisc.images.locations import locate_data
    from instdisc.images.sets import load_images

    found = load_images(locate_data(str(path)), "train")
    for index in range(len(found)):
        found.open(index)
    return found.fingerprint


def lists(folder: Path) -> Kind:
    """Lists of images, with and without labels."""
    names = ["a.png", "b/c.png", "b/d e.png"]
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (3, 2)).save(folder / name)
    texts = [
        "\n".join(names), "".join(f"{name} {len(name)}\r\n" for name in names),
        "path,label\n" + "".join(f'"{name}",cat\n' for name in names), f"{folder}/a.png\n",
    ]  # fmt: skip
    return Kind("lists", [text.encode() for text in texts], read_set)


def tars(folder: Path) -> Kind:
    """Archives of images; half of the damaged headers get a checksum that fits."""
    stream = io.BytesIO()
    Image.new("RGB", (3, 2)).save(stream, "PNG")
    png = stream.getvalue()
    seeds = []
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w", format=form) as tar:
            for name in ("a/x.png", "b/" + "y" * 98 + "/z.png", "b/é.png", "b/x.json"):
                header = tarfile.TarInfo(name)
                header.size = len(png)
                tar.addfile(header, io.BytesIO(png))
        seeds.append(packed.getvalue())

    def spoil(seed: bytes, draw: random.Random) -> bytes:
        if draw.random() < 0.5:
            return mutate(seed, draw)
        data = bytearray(seed)
        block = 512 * draw.randrange(len(data) // 512)
        header = bytearray(mutate(bytes(data[block : block + 512]), draw)[:512].ljust(512, b"\0"))
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
        data[block : block + 512] = header
        return bytes(data)

    return Kind("tars", seeds, read_set, spoil)


def checkpoints(folder: Path) -> Kind:
    """backbone.pt as every transfer command opens it; of a network that is quickly written."""
    from torch import nn

    from instdisc.images.transforms import InputSpec
    from instdisc.networks import backbones
    from instdisc.networks.backbones import Embedding, backbone_payload, build_backbone
    from instdisc.networks.weights import open_weights
    from instdisc.runs.checkpoint import load_checkpoint, save_checkpoint

    def tiny(stem: str, batch_norm: bool) -> nn.Module:
        stages = [nn.Sequential(nn.Conv2d(w, 4, 3), nn.ReLU()) for w in (3, 4, 4, 4, 4)]
        return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    backbones.ARCHS["tiny"] = backbones.Arch(tiny, 4, (4,) * 5, ("0", "1", "2", "3", "4"))
    payload = {
        **backbone_payload(Embedding(build_backbone("tiny"), 4)),
        "input": InputSpec(size=16).to_dict(),
        "pretraining": {"config": {"data": None}, "dataset": "x", "epoch": 1.0},
    }
    good = folder / "good.pt"
    save_checkpoint(good, "backbone", payload)
    content = good.read_bytes()

    def spoil(seed: bytes, draw: random.Random) -> bytes:
        if draw.random() < 0.5:
            return mutate(seed, draw)
        file = folder / "changed.pt"  # sound as a file, odd inside
        save_checkpoint(file, "backbone", change(payload, draw))
        return file.read_bytes()

    def read(path: Path) -> object:
        load_checkpoint(path, "backbone")
        return open_weights(str(path))

    return Kind("checkpoints", [content], read, spoil)


def configs(folder: Path) -> Kind:
    """config.json, as --config takes it."""
    seeds = [
        json.dumps(to_dict(PretrainConfig()), indent=2).encode(),
        json.dumps(to_dict(PretrainConfig(arch="resnet18", on_nan=("skip", "2")))).encode(),
    ]

    def read(path: Path) -> object:
        return parse(PretrainConfig, ["--config", str(path)])

    def spoil(seed: bytes, draw: random.Random) -> bytes:
        if draw.random() < 0.5:
            return mutate(seed, draw)
        return json.dumps(change(json.loads(seed), draw), default=str).encode()

    return Kind("configs", seeds, read, spoil)


def yaml(folder: Path) -> Kind:
    """Detection configs, with the files that they are based on beside them."""
    from importlib.resources import files

    from transfer.detection.recipe import read_config

    seeds = []
    root = Path(str(files("detection_configs")))
    shutil.copytree(root, folder, dirs_exist_ok=True)
    for each in sorted(root.rglob("*.yaml")):

        def from_root(base: re.Match[str], folder: Path = each.parent) -> str:
            return f"_BASE_: {os.path.relpath(folder / base[1], root)}"

        # The fuzzed file lies at the root, whatever the folder of its seed.
        seeds.append(re.sub(r"^_BASE_: (.+)", from_root, each.read_text(), flags=re.M).encode())
    return Kind("yaml", seeds, lambda path: read_config(path))


XML = b"""<?xml version="1.0" encoding="utf-8"?>
<annotation><folder>VOC2007</folder><filename>000005.jpg</filename>
<size><width>90</width><height>70</height><depth>3</depth></size>
<object><name>cat</name><difficult>0</difficult>
<bndbox><xmin>3</xmin><ymin>4</ymin><xmax>50</xmax><ymax>60</ymax></bndbox></object>
<object><name>dog</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>90</xmax><ymax>70</ymax></bndbox>
</object></annotation>"""


def xml(folder: Path) -> Kind:
    """VOC annotations."""
    from transfer.detection.voc import find_class_names, read_voc

    for name in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (folder / name).mkdir(parents=True)
    (folder / "ImageSets/Main/test.txt").write_text("000005\n")
    (folder / "JPEGImages/000005.jpg").write_bytes(b"no image")

    def read(path: Path) -> object:
        shutil.copy(path, folder / "Annotations/000005.xml")
        names = find_class_names(folder, 2007, ["test"])
        return read_voc(folder, 2007, "test", names)

    return Kind("xml", [XML], read)


def coco(folder: Path) -> Kind:
    """COCO's annotations: read, then what pycocotools makes of them."""
    from pycocotools import mask as mask_tools

    from transfer.detection.coco import CocoSplit, read_coco, to_ground_truth
    from transfer.detection.coco_ap import score

    Image.new("RGB", (9, 7)).save(folder / "a.png")
    size = {"height": 7, "width": 9}
    noise = np.random.default_rng(0).random((7, 9)) < 0.5
    packed = mask_tools.encode(np.asfortranarray(noise, np.uint8))["counts"].decode()
    thing = {"image_id": 5, "category_id": 3, "iscrowd": 0, "area": 6.0, "bbox": [1, 2, 3, 2.5]}
    masks: list[Any] = [
        [[1, 2, 4, 2, 4, 4.5]], {"size": [7, 9], "counts": [10, 20, 33]},
        {"size": [7, 9], "counts": packed}, {"size": [7, 9], "counts": "o1"},
    ]  # fmt: skip
    content = {
        "images": [
            {"id": 5, "file_name": "a.png", **size},
            {"id": 6, "file_name": "a.png", **size},
        ],
        "categories": [{"id": 3, "name": "cat"}, {"id": 9, "name": "dog"}],
        "annotations": [{**thing, "id": i, "segmentation": m} for i, m in enumerate(masks, 1)],
    }

    def spoil(seed: bytes, draw: random.Random) -> bytes:
        if draw.random() < 0.4:
            return mutate(seed, draw)
        changed = json.loads(seed)
        for _ in range(draw.randint(1, 2)):
            changed = change(changed, draw)
        return json.dumps(changed, default=str).encode()

    def read(path: Path) -> object:
        for with_masks in (True, False):
            found = read_coco(CocoSplit(path, folder, "x"), with_masks=with_masks)
            truth = to_ground_truth(found.records, found.categories)
            results = [{**each, "score": 0.5} for each in truth["annotations"]]
            score(truth, results, "bbox")
            if with_masks:
                for each in results:
                    each["segmentation"] = {"size": [7, 9], "counts": "o1"}
                score(truth, results, "segm")
        return truth

    return Kind("coco", [json.dumps(content).encode()], read, spoil)


def classes(folder: Path) -> Kind:
    """Which image is of which class, of Kaggle's ImageNet and of Places205, made into folders."""
    from instdisc.images.class_folders import arrange
    from instdisc.images.settings import ArrangeConfig

    names = ["val_1.JPEG", "val_2.JPEG", "a/abbey/1.jpg", "a/arch/indoor/2.jpg"]
    for name in names:
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "images" / name).touch()
    kaggle = "ImageId,PredictionString\nval_1,n00000001 1 2 3 4\nval_2,n00000002 1 2 3 4 \n"
    places = "".join(f"{name} {number}\n" for number, name in enumerate(names[2:]))

    def read(path: Path) -> None:
        layout = "places205" if b"abbey" in path.read_bytes() else "imagenet-val"
        shutil.rmtree(folder / "out", ignore_errors=True)
        values: dict[str, Any] = {"layout": layout, "list": path, "images": folder / "images"}
        arrange(ArrangeConfig(**values, output=folder / "out"))

    return Kind("classes", [kaggle.encode(), places.encode()], read)


def kit(folder: Path) -> Kind:
    """The classes of ImageNet's development kit."""
    import scipy.io

    from instdisc.images.class_folders import GROUND_TRUTH, read_imagenet

    rows = np.zeros((3, 1), dtype=[("ILSVRC2012_ID", object), ("WNID", object)])
    for place in range(3):
        rows[place, 0] = (float(place + 1), f"n0000000{place}")
    seeds = []
    for packed in (False, True):
        stream = io.BytesIO()
        scipy.io.savemat(stream, {"synsets": rows}, do_compression=packed)
        seeds.append(stream.getvalue())
    (folder / GROUND_TRUTH).write_text("3\n1\n2\n")
    return Kind("kit", seeds, lambda path: list(read_imagenet(path.parent)))


def mat(folder: Path) -> Kind:
    """Selective search's own files, both layouts."""
    import scipy.io

    from transfer.detection.proposals import from_mat

    boxes = np.array([[1, 1, 30, 40], [2, 3, 50, 60]], np.float64)
    cells = np.empty((1, 2), object)
    cells[0, 0], cells[0, 1] = boxes, boxes[:1]
    names = np.empty((2, 1), object)
    names[0, 0], names[1, 0] = "000005", "000007"
    seeds = []
    for content in ({"boxes": cells, "images": names}, {"boxes": cells}, {"boxes": boxes - 1}):
        for packed in (False, True):
            stream = io.BytesIO()
            scipy.io.savemat(stream, content, do_compression=packed)
            seeds.append(stream.getvalue())
    return Kind("mat", seeds, lambda path: from_mat(path, ["000005", "000007"]))


def proposals(folder: Path) -> Kind:
    """Pickles of Detectron and Detectron2."""
    from transfer.detection.proposals import from_detectron_pkl

    boxes = [np.array([[0, 0, 30, 40]], np.float32), np.zeros((0, 4), np.float32)]
    scores = [np.ones(1, np.float32), np.zeros(0, np.float32)]
    ours = {"ids": ["5", "7"], "boxes": boxes, "objectness_logits": scores, "bbox_mode": 0}
    older = {"indexes": [5, 7], "boxes": boxes, "scores": scores}
    seeds = [pickle.dumps(value, version) for value in (ours, older) for version in (2, 4)]
    return Kind("proposals", seeds, lambda path: from_detectron_pkl(path, ["000005", "000007"]))


def results(folder: Path) -> Kind:
    """results.jsonl, read and put into the report's tables."""
    from transfer.reporting.page import render_report
    from transfer.reporting.sections import build_sections

    def row(task: str, protocol: str, metric: str, **details: Any) -> dict[str, Any]:
        result = Result(
            task=task, protocol=protocol, arch="resnet18", weights="run", weights_hash="w",
            dataset="imagenet", data_fingerprint="d", metric=metric, value=40.0, seed=0,
            config_hash="c", details=details, provenance={"argv": []},
        )  # fmt: skip
        return dataclasses.asdict(result)

    facts = {"pretraining": {"epochs": 200, "objective": "nce", "embedding_dim": 128}}
    rows = [
        row("knn", "k=200 tau=0.07 embedding", "top1", num_train=9, num_classes=3, **facts),
        row("linear", "stage=conv5 solver=sgd", "top1", stage="conv5", cost=1.0, **facts),
        row("semisup", "labeled=0.01 subset=random recipe=paper", "top5", fraction=0.01,
            init="scratch", curve="subset=random", num_labeled=9, **facts),
        row("detect", "faster_r50, voc07-trainval -> voc07-test", "ap50_11point",
            per_class={"cat": 1.0}, init="ours", **facts),
    ]  # fmt: skip

    def spoil(seed: bytes, draw: random.Random) -> bytes:
        if draw.random() < 0.4:
            return mutate(seed, draw)
        lines = [change(each, draw) if draw.random() < 0.5 else each for each in rows]
        return "".join(json.dumps(each, default=str) + "\n" for each in lines).encode()

    def read(path: Path) -> object:
        sections = build_sections(read_results(path), folder, figures=False)
        return render_report("t", [], "", sections)

    return Kind(
        "results", ["".join(json.dumps(r) + "\n" for r in rows).encode()], read, spoil
    )  # fmt: skip


def listings(folder: Path) -> Kind:
    """runs/listings: a damaged one is made anew, so it is never refused and never believed."""
    from instdisc.images import catalog

    data = folder / "data"
    for name in ("a.png", "b.png"):
        (data / "c").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (3, 2)).save(data / "c" / name)
    catalog.runs_root = lambda: folder / "kept"
    catalog.SETTLED = -(10**9)  # nobody changes these
    good = catalog.load_listing(data)
    (place,) = (folder / "kept" / "listings").glob("*.npz")

    def read(path: Path) -> object:
        shutil.copy(path, place)
        found = catalog.load_listing(data)
        # Its states and sizes are compared with the disk, its names with those of the sizes.
        assert len(found.names) == len(found.sizes) == len(good.names)
        return found

    return Kind("listings", [place.read_bytes()], read)


def foreign(folder: Path) -> Kind:
    """Peers' checkpoints: zipped and older pickles, and safetensors."""
    import torch

    from instdisc.importers.api import describe

    tensors = {
        "module.conv1.weight": torch.zeros(4, 3, 3, 3),
        "module.fc.bias": torch.zeros(4, dtype=torch.float16),
    }
    content = {"state_dict": tensors, "epoch": 3, "arch": "resnet18"}
    seeds = []
    for zipped in (True, False):
        stream = io.BytesIO()
        torch.save(content, stream, _use_new_zipfile_serialization=zipped)
        seeds.append(stream.getvalue())
    header = json.dumps(
        {"conv1.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    ).encode()
    seeds.append(len(header).to_bytes(8, "little") + header + bytes(16))
    return Kind("foreign", seeds, describe)


def archives(folder: Path) -> Kind:
    """Official files of CIFAR-10, CIFAR-100 and Fashion-MNIST."""
    from instdisc.images.archives import read as read_archive

    record = bytes(range(10)) + bytes(3072 - 10)
    pixels = np.zeros((2, 3072), np.uint8)
    idx = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (2, 4, 4)) + bytes(32)
    forms = (
        ("cifar10", "data_batch_1.bin", (b"\1" + record) * 2),
        ("cifar100", "train.bin", (b"\1\2" + record) * 2),
        ("cifar100", "train", pickle.dumps({"data": pixels, "fine_labels": [1, 2]}, 2)),
        ("fashion-mnist", "train-images-idx3-ubyte", idx),
    )

    def read(path: Path) -> object:
        data = path.read_bytes()
        # Which of them it was is told by what is left of its beginning.
        kind, name, _ = min(forms, key=lambda form: _distance(form[2][:8], data[:8]))
        place = folder / kind / name
        shutil.rmtree(place.parent, ignore_errors=True)
        place.parent.mkdir()
        place.write_bytes(data)
        labels = bytes([0, 0, 8, 1]) + (2).to_bytes(4, "big") + b"\1\2"
        (place.parent / "train-labels-idx1-ubyte").write_bytes(labels)
        return read_archive(kind, place.parent, "train")

    return Kind("archives", [content for _, _, content in forms], read)


def _distance(one: bytes, other: bytes) -> int:
    return sum(a != b for a, b in zip(one, other.ljust(8, b"\xee"), strict=True))


def labels(folder: Path) -> Kind:
    """Lists of labelled images, as the published ones of 1% and 10%."""
    from instdisc.images.locations import locate_data
    from instdisc.images.sets import load_images
    from instdisc.images.subsets import read_list

    names = [f"class{label}/{number}.png" for label in range(2) for number in range(3)]
    for name in names:
        place = folder / "data" / "train" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (3, 2)).save(place)
    found = load_images(locate_data(str(folder / "data")), "train")
    seeds = ["\n".join(names), "".join(f"x/{name} {name[5]}\r\n" for name in names)]
    return Kind("labels", [text.encode() for text in seeds], lambda path: read_list(found, path))


def toml(folder: Path) -> Kind:
    """slurm.toml."""
    from slurm.resources import load_resources

    seed = b"""partition = "gpu"
gpus = 8
time = "24h"
setup = ["module load cuda"]
sbatch = {mail-type = "FAIL"}
[pretrain]
nodes = 4
[knn]
gpus = 1
"""

    def read(path: Path) -> object:
        found = load_resources({}, "pretrain", ["pretrain", "knn"], path)
        return found.sbatch_options(), found.srun_options(), found.describe()

    return Kind("toml", [seed], read)


# What documents call a kind, and how it is made.
KINDS: dict[str, tuple[str, Callable[[Path], Kind]]] = {
    "images": ("images", images),
    "lists": ("lists of images", lists),
    "tars": ("tar archives", tars),
    "archives": ("CIFAR and Fashion-MNIST files", archives),
    "listings": ("kept listings", listings),
    "labels": ("lists of labels", labels),
    "checkpoints": ("checkpoints", checkpoints),
    "foreign": ("peers' checkpoints", foreign),
    "configs": ("`config.json`", configs),
    "yaml": ("YAML", yaml),
    "toml": ("`slurm.toml`", toml),
    "xml": ("XML", xml),
    "coco": ("COCO's JSON", coco),
    "classes": ("ImageNet's and Places205's lists of classes", classes),
    "kit": ("`.mat` of ImageNet's kit", kit),
    "mat": ("`.mat` of proposals", mat),
    "proposals": ("proposals", proposals),
    "results": ("`results.jsonl`", results),
}


def outcome(read: Callable[[Path], object], path: Path) -> str:
    """`accepted`, `refused`, or what came out instead."""
    try:
        read(path)
    except UserError as error:
        return "refused" if str(error).strip() else "a refusal without words"
    except SystemExit as stop:
        return "refused" if stop.code == 2 else f"exit code {stop.code}"
    except Exception as error:  # this is what is looked for
        if explain(error):  # run_command tells it in one line
            return "refused"
        frames = traceback.format_exc().strip().splitlines()
        return f"{frames[-1][:200]}  [{frames[-3].strip() if len(frames) > 2 else ''}]"
    return "accepted"


def file_for(kind: Kind, number: int, seed: int) -> bytes:
    """The mutation of a number: the same whenever it is asked for."""
    draw = random.Random(f"{seed} {kind.name} {number}")
    return kind.spoil(draw.choice(kind.seeds), draw)


def work(kind: Kind, folder: Path, numbers: range, seed: int, told: int) -> None:
    """In the child: one line of JSON for each number, before and after it is tried."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY, in_use + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["INSTDISC_RUNS"] = str(folder / "runs")
    path = folder / FILES.get(kind.name, "fuzzed")
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    warnings.simplefilter("ignore")
    for number in numbers:
        path.write_bytes(file_for(kind, number, seed))
        os.write(told, f"{json.dumps([number, None])}\n".encode())
        signal.alarm(SECONDS)  # ends the process, wherever it is
        found = outcome(kind.read, path)
        signal.alarm(0)
        os.write(told, f"{json.dumps([number, found])}\n".encode())


def lines_of_child(kind: Kind, folder: Path, numbers: range, seed: int) -> Iterator[list[Any]]:
    """Runs `work` in a child; what it says, and at its end how it ended."""
    pipe, told = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(pipe)
        code = 1
        try:
            work(kind, folder, numbers, seed, told)
            code = 0
        finally:
            os._exit(code)
    os.close(told)
    with os.fdopen(pipe) as stream:
        for line in stream:
            yield json.loads(line)
    _, status = os.waitpid(pid, 0)
    yield [-1, os.waitstatus_to_exitcode(status)]


def fuzz(kind: Kind, folder: Path, count: int, seed: int) -> tuple[Counter[str], dict[int, str]]:
    """Tries all mutations; how they ended, and the bad ends by number."""
    ends: Counter[str] = Counter()
    bad: dict[int, str] = {}
    first = 0
    while first < count:
        trying = first
        for number, found in lines_of_child(kind, folder, range(first, count), seed):
            if number == -1 and found == 0:
                first = count
            elif number == -1:
                bad[trying] = f"the process ended with {found} (-14: it hung)"
                first = trying + 1
            elif found is None:
                trying = number
            elif found in ("accepted", "refused"):
                ends[found] += 1
            else:
                bad[number] = found
    return ends, bad


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; or all")
    parser.add_argument("--count", type=int, default=20_000, help="mutations in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--record", type=Path, metavar="FILE", help="of docs/results")
    args = parser.parse_args()
    names = args.kinds or list(KINDS)
    count = -(-args.count // len(names))
    rows: list[dict[str, Any]] = []
    for name in names:
        with tempfile.TemporaryDirectory() as scratch:
            folder, started = Path(scratch), time.monotonic()
            title, make = KINDS[name]
            kind = make(folder)
            assert all(outcome(kind.read, _put(folder, kind, s)) != "refused" for s in kind.seeds)
            ends, bad = fuzz(kind, folder, count, args.seed)
            found = {"accepted": ends["accepted"], "refused": ends["refused"], "other": len(bad)}
            seconds = round(time.monotonic() - started)
            rows.append({"kind": title, "mutations": count, **found, "seconds": seconds})
            sys.stdout.write(
                f"{name}: {count:,} mutations, {ends['accepted']:,} accepted, "
                f"{ends['refused']:,} refused, {len(bad)} other ends, {seconds} s\n"
            )
            for number, end in list(bad.items())[:20]:
                args.keep.mkdir(exist_ok=True)
                (args.keep / f"{name}-{number}").write_bytes(file_for(kind, number, args.seed))
                sys.stdout.write(f"  {number}: {end}\n")
            sys.stdout.flush()
    counted = ("mutations", "accepted", "refused", "other", "seconds")
    rows.append({"kind": "all", **{key: sum(row[key] for row in rows) for key in counted}})
    sys.stdout.write(f"{json.dumps(rows[-1])}\n")
    if args.record:
        record(args.record, "fuzz", rows)
    return 1 if rows[-1]["other"] else 0


def _put(folder: Path, kind: Kind, content: bytes) -> Path:
    path = folder / FILES.get(kind.name, "fuzzed")
    path.write_bytes(content)
    return path


if __name__ == "__main__":
    sys.exit(main())

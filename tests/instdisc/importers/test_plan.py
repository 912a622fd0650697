"""Trunks under prefixes that nobody has seen: found, told apart, refused, chosen."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from instdisc.errors import UserError
from instdisc.importers.api import describe, import_checkpoint
from instdisc.importers.plan import choose, make_plan
from instdisc.importers.recognition import FEATURE_DIMS, Network
from instdisc.networks.backbones import ARCHS, Backbone, build_backbone, restore_backbone
from instdisc.untrusted.containers import ForeignFile
from instdisc.untrusted.pickles import Storage, StoredTensor, row_major
from pretrain.import_weights import main

State = dict[str, Tensor]
PREFIXES = ["", "encoder.body.0.", "a.b.c.", "layer1.", "momentum_head.", "module.module."]
HEADS: State = {"my_projector.0.weight": torch.ones(2, 2), "queue": torch.ones(3, 2)}


def put(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def build(arch: str, seed: int = 0) -> Backbone:
    """A network whose batch norm statistics matter, so that a lost one shows."""
    torch.manual_seed(seed)
    model = build_backbone(arch).eval()
    for name, tensor in model.state_dict().items():
        if name.endswith(("running_mean", "running_var", "bias")):
            tensor.uniform_(0.5, 1.5)
    return model


def save(content: Any, path: Path) -> Path:
    torch.save(content, path)
    return path


@pytest.fixture(scope="module")
def states() -> list[State]:
    return [dict(build("resnet18", seed).trunk.state_dict()) for seed in (0, 1)]


@pytest.mark.parametrize("arch", ARCHS)
def test_shapes_are_those_of_the_networks(arch: str) -> None:
    for stem, batch_norm in itertools.product(("imagenet", "small"), (True, False)):
        if arch.startswith("resnet") and not batch_norm:
            continue
        network = Network(arch, stem, batch_norm)  # type: ignore[arg-type] # a Stem
        with torch.device("meta"):
            model = build_backbone(arch, stem=network.stem, batch_norm=batch_norm)
        state = model.trunk.state_dict()
        assert list(network.shapes().items()) == [(k, tuple(v.shape)) for k, v in state.items()]
        assert FEATURE_DIMS[arch] == model.feature_dim


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize("arch", ARCHS)
def test_every_tensor_of_a_trunk_has_its_place(arch: str, batch_norm: bool, prefix: str) -> None:
    if arch.startswith("resnet") and not batch_norm:
        return
    expected = Network(arch, "imagenet", batch_norm).shapes()
    content = {}
    for name, shape in expected.items():
        storage = Storage("float32", max(1, torch.Size(shape).numel()))
        content[prefix + name] = StoredTensor().place(storage, 0, shape, row_major(shape))
    for file_content in (content, {"epoch": 3, "weights": {"net": content}}):
        file = ForeignFile(Path("on/paper.pth"), "torch file", file_content)
        plan = make_plan(file, choose(file))
        path = prefix if file_content is content else f"weights.net.{prefix}"
        assert plan.match.trunk.prefix == path
        assert plan.network == Network(arch, "imagenet", batch_norm)
        assert plan.used == {name: path + name for name in expected}
        assert (plan.dropped, plan.unknown, plan.missing) == ((), (), ())


def features(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize("prefix", ["", "encoder.body.0.", "a.b.c."])
@pytest.mark.parametrize(
    "arch",
    [
        "resnet18",
        *(pytest.param(a, marks=pytest.mark.slow) for a in ("resnet50", "alexnet", "vgg16")),
    ],
)
def test_features_are_those_of_the_original(arch: str, prefix: str, tmp_path: Path) -> None:
    model = build(arch)
    path = save(put(prefix, dict(model.trunk.state_dict())) | HEADS, tmp_path / "net.pth")
    report = import_checkpoint(path)
    path.unlink()  # VGG16 is half a gigabyte
    assert (report.format, report.prefix) == ("torchvision", prefix)
    assert report.payload["arch"] == arch
    assert report.dropped == tuple(HEADS)
    assert report.payload["pretraining"].get("prefix", "") == prefix
    assert torch.equal(features(restore_backbone(report.payload).eval()), features(model))


@pytest.mark.parametrize(
    "lay_out",
    [
        lambda a, b: put("wise.", a) | put("young.", b),
        lambda a, b: {"wise": a, "young": {"model": put("module.", b)}},
        lambda a, b: {"state_dict": put("x.wise.", a) | put("x.young.net.0.", b) | HEADS},
        lambda a, b: a | put("young.", b) | {"fc.weight": torch.ones(2, 512)},
    ],
)
def test_of_two_trunks_one_must_be_chosen(
    lay_out: Any, states: list[State], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(lay_out(*states), tmp_path / "two.pth")
    with pytest.raises(UserError, match=r"has trunks .*: choose one with --prefix") as caught:
        import_checkpoint(path)
    named = str(caught.value).partition("has trunks ")[2].partition(":")[0].split(", ")
    assert [name.partition(" (")[2] for name in named] == ["resnet18)"] * 2
    prefixes = [name.partition(" (")[0].replace("no prefix", "") for name in named]
    assert main([str(path), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all((prefix or "no prefix") in error for prefix in prefixes)
    for prefix, state in zip(prefixes, states, strict=True):
        for spelled in {prefix, prefix.rstrip("."), prefix.removeprefix("state_dict.")}:
            report = import_checkpoint(path, prefix=spelled)
            assert report.prefix == prefix
            assert torch.equal(report.payload["trunk"]["conv1.weight"], state["conv1.weight"])
            assert any(note.startswith("other trunks in the file") for note in report.notes)
        assert f"prefix: {prefix or 'none'}" in describe(path, prefix=prefix).splitlines()
    with pytest.raises(UserError, match=r"has no trunk under 'old' but .*young.*: choose one"):
        import_checkpoint(path, prefix="old")


def test_a_known_choice_can_be_changed(states: list[State], tmp_path: Path) -> None:
    heads = {
        f"encoder_{kind}.fc.{name}": torch.full(shape, float(kind == "q"))
        for kind in "qk"
        for name, shape in (("weight", (128, 512)), ("bias", (128,)))
    }
    content = put("encoder_q.", states[0]) | put("encoder_k.", states[1]) | heads
    path = save({"state_dict": put("module.", content)}, tmp_path / "moco.pth")
    for prefix, state, ones in ((None, states[0], 1.0), ("encoder_k", states[1], 0.0)):
        payload = import_checkpoint(path, prefix=prefix).payload
        assert torch.equal(payload["trunk"]["conv1.weight"], state["conv1.weight"])
        assert torch.equal(payload["projection"]["bias"], torch.full((128,), ones))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("a.b.layer4.1.bn2.weight"), "lacks 1 tensors, layer4.1.bn2.weight: use"),
        (lambda s: s.pop("a.b.conv1.weight"), "conv1.weight is missing or of another shape"),
        (
            lambda s: s.update({"a.b.layer1.0.se.fc.weight": torch.ones(2)}),
            "1 tensors that this format does not have, a.b.layer1.0.se.fc.weight: --ignore-unknown",
        ),
        (
            lambda s: s.update({"a.other": torch.ones(2)}),
            "does not have, a.other: --ignore-unknown",
        ),
        (
            lambda s: s.update({"a.b.bn1.bias": torch.ones(3)}),
            r"a.b.bn1.bias is \(3,\), resnet18 has \(64,\)",
        ),
        (
            lambda s: s.update({"a.c.layer1.0.conv1.weight": torch.ones(2)}),
            r"has trunks a.b. \(resnet18\), a.c. \(no network of ours\): choose one with --prefix",
        ),
    ],
)
def test_partial_and_strange_trunks_are_refused(
    change: Any, message: str, states: list[State], tmp_path: Path
) -> None:
    content = put("a.b.", states[0])
    change(content)
    path = save(content, tmp_path / "odd.pth")
    with pytest.raises(UserError, match=message):
        import_checkpoint(path)
    assert "not importable" in describe(path)


def test_files_made_to_confuse(states: list[State], tmp_path: Path) -> None:
    conv = torch.ones(2)
    many = {f"p{i}.features.0.weight": conv for i in range(101)}
    with pytest.raises(UserError, match="has 101 networks: save the state_dict of one alone"):
        import_checkpoint(save(many, tmp_path / "many.pth"))
    twice = {"a": {"b.w": conv}, "a.b": {"w": conv}}
    with pytest.raises(UserError, match=r"a.b.w. twice: save a state_dict"):
        import_checkpoint(save(twice, tmp_path / "twice.pth"))
    beside = {"a.b": states[0], "a": {"b": conv}}
    with pytest.raises(UserError, match=r"1 tensors that this format does not have, a.b: "):
        import_checkpoint(save(beside, tmp_path / "beside.pth"))
    itself: dict[str, Any] = {"model": states[0]}
    itself["self"] = itself
    assert import_checkpoint(save(itself, tmp_path / "itself.pth")).prefix == "model."


def test_inspection_needs_no_torch(states: list[State], tmp_path: Path, repo: Path) -> None:
    optimizer = {"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": []}
    network = (
        put("wise.net.", states[0] | {"fc.bias": torch.ones(5)}) | HEADS | {"odd.w": torch.ones(2)}
    )
    content = {"epoch": 12, "name": "run 7", "model": network, "optimizer": optimizer}
    path = save(content, tmp_path / "unknown.ckpt")
    script = (
        "import sys, pretrain.import_weights as command\n"
        f"assert command.main(['--inspect', {str(path)!r}]) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=repo)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    numbers = sum(tensor.numel() for tensor in states[0].values())
    assert lines[:5] == [
        "container: torch file",
        "epoch: 12",
        "name: run 7",
        "tensors:",
        f"  model.wise.net.: {len(states[0])} tensors, {numbers:,} numbers, float32, int64, "
        "trunk resnet18",
    ]
    for line in (
        "  model.wise.net.fc: shape (5,), 5 numbers, float32",
        "  model.my_projector: shape (2, 2), 4 numbers, float32",
        "  model.queue: shape (3, 2), 6 numbers, float32",
        "  optimizer: shape (3,), 3 numbers, float32",
        "prefix: model.wise.net.",
        "used: 120 tensors",
        "dropped: wise, my_projector, queue, optimizer",
        "unknown: odd",
    ):
        assert line in lines

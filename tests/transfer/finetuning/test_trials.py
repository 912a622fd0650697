"""Where fine-tuning starts, its recipes, and what its command refuses."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from instdisc.cli import parse
from instdisc.networks.weights import open_weights
from instdisc.runs.checkpoint import weights_hash
from transfer.finetuning.semisup import run_semisup
from transfer.finetuning.settings import SemisupConfig
from transfer.finetuning.supervised import SupervisedTrainer
from transfer.finetuning.trials import open_start, reinitialized
from transfer.semisup import main


def test_it_starts_where_it_says(tiny_network: Path, tmp_path: Path) -> None:
    weights = open_weights(tiny_network)
    before = weights.hash
    pretrained, scratch = (open_start(how, weights) for how in ("pretrained", "scratch"))
    copy = pretrained.build(3)
    assert weights_hash(copy.state_dict()) == weights_hash(weights.backbone.state_dict())
    with torch.no_grad():
        next(copy.parameters()).zero_()
    assert weights.hash == before
    hashes = [weights_hash(scratch.build(seed).state_dict()) for seed in (3, 3, 4)]
    assert hashes[0] == hashes[1] != hashes[2]
    assert hashes[0] != weights_hash(weights.backbone.state_dict())
    named = open_start(f"supervised:{tiny_network}", weights)
    assert named.weights == "supervised:tiny"
    assert weights_hash(named.build(0).state_dict()) == weights_hash(weights.backbone.state_dict())


def test_all_labels_are_fine_tuned_by_a_published_recipe(
    tiny_network: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the recipe says reaches the optimiser and the classifier."""
    seen: list[SupervisedTrainer] = []
    starts: list[torch.Tensor] = []
    inner = SupervisedTrainer.train

    def train(self: SupervisedTrainer) -> None:
        seen.append(self)
        starts.append(self.model.head.bias.detach().clone())
        inner(self)

    monkeypatch.setattr(SupervisedTrainer, "train", train)
    common = ["--epochs", "1", "--workers", "0", "--device", "cpu", "--output", str(tmp_path / "a")]
    for recipe in ("vissl-full", "paper"):
        fraction = [] if recipe == "vissl-full" else ["--labeled", "1"]
        rows = run_semisup(parse(SemisupConfig, ["--recipe", recipe, *fraction, *common]))
        assert rows[0].details["num_labeled"] == 24  # all of them
        assert rows[0].protocol == f"labeled=1 subset=random recipe={recipe} epochs=1"
    assert [each.optimizer.defaults["nesterov"] for each in seen] == [True, False]
    assert starts[0].any()  # torch's own start; the others begin without biases
    assert not starts[1].any()


def test_a_timm_network_is_trained_too(image_tree: Path, tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    folder = tmp_path / "local"
    folder.mkdir()
    architecture = {"architecture": "resnet10t", "pretrained_cfg": {"input_size": [3, 32, 32]}}
    (folder / "config.json").write_text(json.dumps({**architecture, "num_classes": 0}))
    model = timm.create_model("resnet10t", pretrained=False, num_classes=0)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    name = f"timm:local-dir:{folder}"
    backbone = open_weights(name).backbone
    fresh = reinitialized(backbone, 1)
    assert weights_hash(fresh.state_dict()) != weights_hash(backbone.state_dict())
    assert weights_hash(fresh.state_dict()) == weights_hash(reinitialized(backbone, 1).state_dict())
    run = SemisupConfig(
        weights=name,
        data=str(image_tree),
        output=tmp_path / "run",
        labeled=(0.5,),
        init=("pretrained", "scratch"),
        epochs=1,
        workers=0,
        device="cpu",
    )
    assert {row.weights for row in run_semisup(run)} == {name, "scratch"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--labeled", "0.0001"], "--labeled must be fractions from 0.001 to 1"),
        (["--labeled", "1.5"], "--labeled must be fractions"),
        (["--labeled", "1%"], "invalid float value"),
        (["--labeled"], "name at least one fraction"),
        (["--labeled", "0.05", "--subset", "balanced"], "is 1, and seed 0 gives no image of class"),
        (["--labeled", "0.13", "--seed", "1"], "use --subset balanced"),
        (["--list", "EMPTY"], "is empty"),
        (["--list", "OTHER"], "is it of another data set?"),
        (["--list", "NUMBERS"], "class number 7 there"),
        (["--list", "absent.txt"], "no such file"),
        (["--list", "OTHER", "--labeled", "0.1"], "give one of them"),
        (["--init", "imagenet"], "--init must be of"),
        (["--init", "supervised:none.pt"], "no such run, file"),
        (["--weights", "nothing"], "no such run, file"),
        (["--data", "nowhere"], "does not exist"),
        (["--labeled", "0.13", "--subset", "balanced", "--sweep"], "needs two of some class"),
        (["--epochs", "0"], "--epochs must be at least 1"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    tiny_network: Path,
    tmp_path: Path,
    refusal: Callable[..., str],
    arguments: list[str],
    message: str,
) -> None:
    lists = {"EMPTY": "\n", "OTHER": "n01440764_10026.JPEG\n", "NUMBERS": "class0/1.png 7\n"}
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
    arguments = [str(tmp_path / a) if a in lists else a for a in arguments]
    assert message in refusal(main, arguments)
    assert not list(tmp_path.rglob("last.pt"))


def test_the_demo_recipe_is_found_from_the_network(
    tiny_network: Path, image_tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    defaults = SemisupConfig.recipe_defaults
    assert defaults({"weights": str(tiny_network)})["recipe"] == "paper"
    assert defaults({})["recipe"] == "paper"
    assert defaults({"data": "demo"})["recipe"] == "demo"
    assert defaults({"data": "demo"})["subset"] == "balanced"
    assert defaults({"weights": "random:tiny"})["recipe"] == "demo"
    assert defaults({"recipe": "swav-1"})["head_lr_scale"] * 0.02 == 5.0
    monkeypatch.setenv("INSTDISC_DATA", str(image_tree))
    assert defaults({"weights": "random:tiny"})["recipe"] == "paper"


def test_defaults_are_the_papers() -> None:
    """Section 4.3: 70 epochs, lr 0.01, divided by ten every 30 epochs."""
    paper = SemisupConfig()
    assert (paper.epochs, paper.lr, paper.lr_milestones, paper.lr_factor) == (
        70,
        0.01,
        (30, 60),
        0.1,
    )
    assert (paper.subset, paper.head_lr_scale, paper.init) == ("random", 1.0, ("pretrained",))

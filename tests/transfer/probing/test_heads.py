"""Trained linear layers against torch's own batch norm and a plain loop."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from transfer.probing import heads as module
from transfer.probing.heads import BatchStatistics, LinearHeads

WIDTHS, CHANNELS = {"conv1": 3 * 4, "backbone": 5}, {"conv1": 3, "backbone": 5}


def features(num: int, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {stage: 3 + 2 * torch.randn(num, d, generator=rng) for stage, d in WIDTHS.items()}


def build(batch_norm: str = "affine", init: str = "uniform", num_heads: int = 2) -> LinearHeads:
    return LinearHeads(
        WIDTHS, CHANNELS, 4, num_heads=num_heads, batch_norm=batch_norm, init=init, seed=0
    )


def test_statistics_are_those_of_torchs_batch_norm() -> None:
    ours, theirs = BatchStatistics(3), nn.BatchNorm2d(3, affine=False)
    for seed in range(3):
        rows = features(8, seed)["conv1"]
        assert torch.allclose(ours(rows), theirs(rows.view(8, 3, 2, 2)).flatten(1), atol=1e-5)
    assert theirs.running_mean is not None
    assert theirs.running_var is not None
    assert torch.allclose(ours.mean, theirs.running_mean, atol=1e-6)
    assert torch.allclose(ours.var, theirs.running_var, atol=1e-5)
    rows = features(8, 9)["conv1"]
    expected = theirs.eval()(rows.view(8, 3, 2, 2)).flatten(1)
    assert torch.allclose(ours.eval()(rows), expected, atol=1e-5)


def test_statistics_are_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads stand for processes; their sums are added up in between, as a collective does."""
    rows = features(9)["conv1"]
    whole = BatchStatistics(3)
    expected = whole(rows)
    meet, sums, local = threading.Barrier(2), [torch.empty(0)] * 2, threading.local()

    def add_up(value: Tensor) -> Tensor:
        sums[local.rank] = value
        meet.wait(30)
        return sums[0] + sums[1]

    monkeypatch.setattr(module.dist, "all_reduce_sum", add_up)
    shares, parts = [BatchStatistics(3), BatchStatistics(3)], [torch.empty(0)] * 2

    def work(rank: int) -> None:
        local.rank = rank
        parts[rank] = shares[rank](rows[:4] if rank == 0 else rows[4:])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert torch.allclose(torch.cat(parts), expected, atol=1e-6)
    for share in shares:
        assert torch.allclose(share.mean, whole.mean)
        assert torch.allclose(share.var, whole.var)


def test_layers_are_batch_norm_and_linear_trained_by_torchs_sgd() -> None:
    """VISSL's head, put together from torch's modules, after the same steps."""
    rates, decay = {"conv1": [0.1, 0.5], "backbone": [0.1, 0.5]}, 0.05
    ours = build()
    references: dict[str, Any] = {}
    for stage, names in ours.names.items():
        for number, name in enumerate(names):
            norm, layer = nn.BatchNorm2d(CHANNELS[stage]), nn.Linear(WIDTHS[stage], 4)
            layer.load_state_dict(ours.layers[name].state_dict())
            optimizer = torch.optim.SGD(
                [
                    {"params": layer.parameters(), "weight_decay": decay},
                    {"params": norm.parameters(), "weight_decay": 0.0},
                ],
                lr=rates[stage][number],
                momentum=0.9,
                nesterov=True,
            )
            references[name] = (stage, norm, layer, optimizer)
    groups = [{**g, "lr": g["lr_scale"]} for g in ours.groups(rates, decay)]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9, nesterov=True)
    labels = torch.arange(8) % 4
    for step in range(4):
        inputs = features(8, step)
        optimizer.zero_grad()
        scores = ours(inputs)
        sum(nn.functional.cross_entropy(s, labels) for s in scores.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
        for name, (stage, norm, layer, reference) in references.items():
            reference.zero_grad()
            maps = inputs[stage].view(8, CHANNELS[stage], -1, 1)
            expected = layer(norm(maps).flatten(1))
            assert torch.allclose(scores[name], expected, atol=1e-4), (name, step)
            nn.functional.cross_entropy(expected, labels).backward()
            reference.step()
    for name, (_, norm, layer, _) in references.items():
        assert torch.allclose(ours.layers[name].weight, layer.weight, atol=1e-5)
        assert torch.allclose(ours.scales[name].flatten(), norm.weight, atol=1e-5)
        assert torch.allclose(ours.shifts[name].flatten(), norm.bias, atol=1e-5)


def test_layers_of_a_stage_start_alike_and_as_their_source_says() -> None:
    normal = build(batch_norm="off", init="normal")
    for names in normal.names.values():
        weights = [normal.layers[name].weight for name in names]
        assert torch.equal(*weights)
        assert weights[0].std() < 0.03
        assert not normal.layers[names[0]].bias.any()
    uniform = build(init="uniform").layers["conv1/0"]
    bound = WIDTHS["conv1"] ** -0.5
    assert 0.8 * bound < uniform.weight.abs().max() <= bound
    assert uniform.bias.any()
    assert not torch.equal(
        build().layers["conv1/0"].weight[:, :5], normal.layers["backbone/0"].weight
    )


def test_only_affine_norms_have_parameters_of_their_own() -> None:
    for batch_norm, count in (("off", 2), ("plain", 2), ("affine", 4)):
        heads = build(batch_norm=batch_norm, num_heads=1)
        assert len(list(heads.parameters())) == 2 * count, batch_norm
        grouped = [p for g in heads.groups({s: [1.0] for s in WIDTHS}, 0.1) for p in g["params"]]
        assert {id(p) for p in grouped} == {id(p) for p in heads.parameters()}

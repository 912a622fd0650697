"""What training loops share, alone and in two processes: wrapping, buffers, losses, saves."""

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from instdisc.errors import Interrupted
from instdisc.runs.signals import StopSignal
from instdisc.training import dist, loop
from instdisc.training.cpu import SmallMapConv2d
from instdisc.training.dist import Process
from instdisc.training.loop import (
    HostCopy,
    LossMeter,
    SaveOrStop,
    prepare_device,
    share_buffers,
    wrap_parallel,
)

CPU = torch.device("cpu")
ALONE = Process(0, 1, CPU)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(1))


def test_each_device_is_prepared_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    for device, kind, benchmark in (("cpu", SmallMapConv2d, False), ("cuda", nn.Conv2d, True)):
        conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        prepare_device(conv, torch.device(device))
        assert type(conv) is kind
        assert torch.backends.cudnn.benchmark == benchmark


def test_one_process_trains_the_module_itself() -> None:
    module = net()
    assert wrap_parallel(module, ALONE) is module
    share_buffers([module])  # nothing to do


@pytest.mark.slow  # loading the compiler takes seconds
def test_a_compiled_module_trains_the_weights_of_the_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inner = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module: inner(module, backend="eager"))
    module, plain = net(), net()
    names = list(module.state_dict())
    compiled = wrap_parallel(module, ALONE, compiled=True)
    images = torch.randn(2, 3, 6, 6)
    for each in (compiled.train(), plain.train()):
        each(images).square().mean().backward()
    assert list(module.state_dict()) == names
    assert module.training
    gradients = [[weight.grad for weight in each.parameters()] for each in (module, plain)]
    for ours, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(module[1].running_mean, plain[1].running_mean)


def test_losses_add_up_as_python_floats_do() -> None:
    """Bit for bit: float32 losses, summed in double precision, epoch by epoch."""
    losses = torch.randn(100, generator=torch.Generator().manual_seed(0)) * 1e3
    meter, expected = LossMeter(CPU, total=0.1), 0.1
    for loss in losses:
        meter.add(loss)
        expected += loss.item()
    assert meter.total == 0.1  # as last read
    assert meter.read() == losses[-1].item()
    assert meter.total == expected
    assert meter.end_epoch() == expected
    meter.add(losses[0])
    meter.read()
    assert meter.total == losses[0].item()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_told_a_step_later(value: float) -> None:
    meter = LossMeter(CPU)
    told = []
    for loss in (1.0, value, 1.0, 1.0):
        meter.add(torch.tensor(loss))
        told.append(meter.failed_before())
    assert told == [False, False, True, True]


def test_it_saves_in_time_at_an_end_and_on_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    with StopSignal() as stop:
        saves = SaveOrStop(stop, minutes=2)
        assert not saves.is_due()
        assert saves.is_due(ended=True)
        assert saves.is_due(failed=True)
        now[0] = 119.0
        assert not saves.is_due()
        now[0] = 120.0
        assert saves.is_due()
        saves.saved(7, Path("last.pt"), finished=False)
        assert not saves.is_due()
        os.kill(os.getpid(), signal.SIGTERM)
        assert saves.is_due()
        saves.saved(8, Path("last.pt"), finished=True)  # nothing left to be stopped
        with pytest.raises(Interrupted, match="stopped after step 9"):
            saves.saved(9, Path("last.pt"), finished=False)
        assert SaveOrStop(stop, minutes=0).is_due()


def test_the_counter_of_waits_counts(host_syncs: Any) -> None:
    """The fixture that other tests trust."""
    values = torch.arange(3.0)
    kept = values > 0
    with host_syncs() as syncs:
        values.sum().item()
        bool(kept.all())
        values[kept]
        values[kept] = 0.0
        kept.nonzero()
        values.tolist()
        late = HostCopy(values)
        HostCopy(values).read()
        late.read()
        values[torch.tensor([0, 2])] = torch.where(kept, values, 1.0)[:2]
    scalars = ["_local_scalar_dense"] * 2
    assert syncs.found == [
        *scalars, "index", "index_put_", "nonzero", "tolist", "read at once"
    ]  # fmt: skip


def test_values_reach_the_host() -> None:
    assert HostCopy(torch.tensor([1.0, 2.5], requires_grad=True)).read() == [1.0, 2.5]


def work(rank: int, folder: Path) -> None:
    """One of two processes, which see other images: what each holds, to a file."""
    process = dist.init_process("cpu")
    module = net()
    parallel = wrap_parallel(module, process)
    with torch.no_grad():  # torch refuses a backward pass after a fork
        parallel(torch.randn(2, 3, 6, 6) + rank)
    own = {name: value.clone() for name, value in module.named_buffers()}
    share_buffers([module])
    shared = dict(module.named_buffers())
    meter = LossMeter(CPU)
    for loss in (1.0, 4.0):
        meter.add(torch.tensor(loss + 2 * rank))
    latest = meter.read()
    with StopSignal() as stop:
        told = [SaveOrStop(stop, minutes=60).is_due(failed=failed) for failed in (False, rank == 1)]
        told.append(SaveOrStop(stop, minutes=0 if rank else 60).is_due())  # late on one alone
        stop.raised = rank == 1
        saves = SaveOrStop(stop)
        told += [saves.is_due(), saves.stopping]
    torch.save((own, shared), folder / f"{rank}.pt")
    (folder / f"{rank}.json").write_text(json.dumps([latest, meter.total, told]))
    dist.close()


def test_two_processes_have_one_state_and_one_mind(tmp_path: Path, run_ranks: Any) -> None:
    assert run_ranks(lambda rank: work(rank, tmp_path)) == [0, 0]
    (first, shared), (second, too) = (
        torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)
    )
    assert not torch.equal(first["1.running_mean"], second["1.running_mean"])
    for name, value in first.items():  # batch norm's counter is an integer
        assert torch.equal(shared[name], value), name
        assert torch.equal(too[name], value), name
    for rank in range(2):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        assert told == [5.0, 7.0, [False, True, True, True, True]]

"""Training on a CPU: gradients over a few pixels are those of nn.Conv2d; memory that is kept."""

import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from instdisc.networks.backbones import build_backbone
from instdisc.training.cpu import (
    ChannelsLastSGD,
    SmallMapConv2d,
    build_sgd,
    use_small_map_gradients,
)

LAYOUTS = {"channels last": torch.channels_last, "contiguous": torch.contiguous_format}


def gradients(conv: nn.Conv2d, inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    inputs = inputs.clone().requires_grad_()
    conv.zero_grad()
    output = conv(inputs)
    weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)
    (output * weights).sum().backward()
    assert inputs.grad is not None
    assert conv.weight.grad is not None
    return output.detach(), inputs.grad, conv.weight.grad.clone()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (1, 2), (5, 1), (7, 2)])
def test_values_and_gradients_are_the_usual_ones(
    layout: torch.memory_format, size: int, kernel: int, stride: int
) -> None:
    torch.manual_seed(0)
    usual = nn.Conv2d(6, 10, kernel, stride, kernel // 2, bias=False).double()
    ours = copy.deepcopy(usual)
    use_small_map_gradients(ours)
    assert isinstance(ours, SmallMapConv2d)
    inputs = torch.randn(4, 6, size, size, dtype=torch.float64).to(memory_format=layout)
    for one, two in zip(gradients(usual, inputs), gradients(ours, inputs), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (3, 2), (1, 2)])
def test_under_autocast_gradients_are_right_to_the_rounding_of_bfloat16(
    size: int, kernel: int, stride: int
) -> None:
    torch.manual_seed(0)
    ours = nn.Conv2d(32, 48, kernel, stride, kernel // 2, bias=False)
    exact = copy.deepcopy(ours).double()
    use_small_map_gradients(ours)
    inputs = torch.randn(16, 32, size, size).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(ours, inputs)
    assert [each.dtype for each in found] == [torch.bfloat16, torch.float32, torch.float32]
    for one, two in zip(gradients(exact, inputs.double()), found, strict=True):
        # Inputs, weights and what is summed up are rounded to 8 bits.
        assert (one - two).norm() < 0.01 * one.norm()


def test_a_network_keeps_its_names_weights_and_outputs() -> None:
    torch.manual_seed(0)
    usual = build_backbone("resnet50").eval()
    ours = copy.deepcopy(usual)
    use_small_map_gradients(ours)
    assert any(isinstance(module, SmallMapConv2d) for module in ours.modules())
    assert usual.state_dict().keys() == ours.state_dict().keys()
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(usual(images), ours(images))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_sgd_is_torchs_to_the_bit(layout: torch.memory_format, nesterov: bool) -> None:
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov}
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 5, 1))
    networks = [copy.deepcopy(network).to(memory_format=layout) for _ in range(2)]
    cpu = torch.device("cpu")
    ours = build_sgd(networks[0].parameters(), cpu, **settings)
    usual = torch.optim.SGD(networks[1].parameters(), fused=True, **settings)  # type: ignore[arg-type]
    assert isinstance(ours, ChannelsLastSGD)
    for step in range(4):
        if step == 2:  # as when a run goes on
            state = copy.deepcopy(ours.state_dict())
            ours = build_sgd(networks[0].parameters(), cpu, **settings)
            ours.load_state_dict(state)
        images = torch.randn(4, 3, 6, 6)
        for each, optimizer in zip(networks, (ours, usual), strict=True):
            optimizer.zero_grad()
            each(images).square().mean().backward()
            each[2].bias.grad = None if step == 3 else each[2].bias.grad
            optimizer.step()
        for one, two in zip(networks[0].parameters(), networks[1].parameters(), strict=True):
            assert torch.equal(one, two)
            assert one.stride() == two.stride()
    one, two = (optimizer.state_dict()["state"] for optimizer in (ours, usual))
    for key, state in two.items():
        assert torch.equal(one[key]["momentum_buffer"], state["momentum_buffer"])


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 4, 3, padding=1),  # a bias
        nn.Conv2d(4, 4, 3, padding=1, groups=2, bias=False),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2, bias=False),
        nn.Conv2d(4, 4, 3, padding=0, bias=False),
        nn.Conv2d(4, 4, 1, bias=False),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect", bias=False),
    ],
    ids=["bias", "groups", "dilation", "no padding", "1x1", "reflect"],
)
def test_other_convolutions_are_left_alone(conv: nn.Conv2d) -> None:
    use_small_map_gradients(conv)
    assert type(conv) is nn.Conv2d


FAULTS = """
import resource
import torch
from instdisc.images.loading import build_loader
from instdisc.training.cpu import keep_memory

def faults():
    # Pages of 60 MB that the system has to give after 64 MB were freed. As many as were freed would
    # not fit in their place: glibc asks for some bytes more to align a block.
    for megabytes in (64, 60):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = torch.ones(megabytes * 2**18)
        del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

class Faults(torch.utils.data.Dataset):
    def __getitem__(self, index):
        return faults()

first = faults()
{action}
here = faults()
(worker,) = build_loader(Faults(), [[0]], 1)
print(first, here, int(worker))
"""
SETTINGS = ("MALLOC_", "GLIBC_TUNABLES")  # of the user's, which keep_memory respects
GIVEN_BACK = 15000  # of 15,360 pages; transparent huge pages would be fewer, and are checked for


def count_faults(action: str, **environ: str) -> list[int]:
    code = FAULTS.format(action=action)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    env = {**inherited, **environ}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    found = [int(word) for word in done.stdout.split()]
    if found[0] < GIVEN_BACK:
        pytest.skip("this system gives memory back in other ways, or takes huge pages")
    return found


@pytest.mark.slow
def test_memory_is_kept_in_a_process_that_trains_and_not_in_its_loaders() -> None:
    _, here, worker = count_faults("keep_memory(torch.device('cpu'))")
    assert here < 100
    assert worker > GIVEN_BACK


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "environ"),
    [
        ("import instdisc; instdisc.load_backbone('random:resnet18')", {}),
        ("keep_memory(torch.device('cuda'))", {}),
        ("keep_memory(torch.device('cpu'))", {"MALLOC_ARENA_MAX": "8"}),
    ],
    ids=["a backbone from Python", "training on a GPU", "a choice of the user's"],
)
def test_memory_is_given_back_otherwise(action: str, environ: dict[str, str]) -> None:
    assert min(count_faults(action, **environ)) > GIVEN_BACK

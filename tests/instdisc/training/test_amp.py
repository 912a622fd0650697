import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from instdisc.errors import UserError
from instdisc.networks.backbones import build_backbone
from instdisc.training.amp import autocast, build_scaler, check_amp

CPU = torch.device("cpu")


def test_names_mean_types() -> None:
    for amp, dtype in (("off", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with autocast(CPU, amp):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype
    assert [build_scaler(CPU, amp).is_enabled() for amp in ("off", "bf16", "fp16")] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("arch", "options", "size", "wrong"),
    [
        ("resnet18", {}, 16, "trunk.layer4.0.conv1"),
        ("resnet50", {}, 16, "trunk.layer4.0.conv2"),
        ("resnet50", {}, 8, "trunk.layer3.0.conv2"),
        ("resnet18", {}, 17, None),
        ("resnet18", {"stem": "small"}, 8, None),
        ("vgg16", {}, 32, None),
        ("alexnet", {}, 63, None),
    ],
)
def test_bfloat16_on_a_cpu_needs_two_pixels_under_a_stride(
    arch: str, options: Any, size: int, wrong: str | None
) -> None:
    network = build_backbone(arch, **options)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    if wrong is None:
        check_amp(network, size, CPU, "bf16")
    else:
        with pytest.raises(UserError, match=f"{wrong} sees a single pixel of {size}-pixel images"):
            check_amp(network, size, CPU, "bf16")
        check_amp(network, size, CPU, "off")
        check_amp(network, size, CPU, "fp16")
        check_amp(network, size, torch.device("cuda"), "bf16")
    assert network.training
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[name]), name


GRADIENTS = """
import torch
from instdisc.training.amp import autocast
from instdisc.networks.backbones import build_backbone

def litter():
    "Leaves NaN in the memory that comes next."
    [torch.full((2**power,), torch.nan) for power in range(4, 23) for _ in range(4)]

def gradients(amp):
    for weight in network.parameters():
        weight.grad = None
    litter()
    with autocast(torch.device("cpu"), amp):
        features = network(images)
    litter()
    (features.float() * direction).sum().backward()
    return torch.cat([weight.grad.flatten() for weight in network.parameters()])

torch.set_num_threads(1)
torch.manual_seed(0)
network = build_backbone("{arch}").eval().to(memory_format=torch.channels_last)
images = torch.randn(4, 3, {size}, {size})
direction = torch.randn(4, network.feature_dim)
want, got = gradients("off"), gradients("bf16")
print(float(torch.cosine_similarity(want, got, dim=0)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="bfloat16 needs oneDNN")
@pytest.mark.parametrize(("arch", "size"), [("resnet18", 17), ("resnet50", 32)])
def test_gradients_that_are_not_refused_are_right(arch: str, size: int) -> None:
    """Whatever lies in the memory; 16 pixels give NaN here, which is what is refused."""
    program = GRADIENTS.replace("{arch}", arch).replace("{size}", str(size))
    done = subprocess.run(
        [sys.executable, "-c", program],
        # Virtual machines that say they have AMX may die of it.
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert float(done.stdout) > 0.95

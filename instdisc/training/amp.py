"""Mixed precision by the name that `--amp` has for it."""

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from instdisc.errors import UserError

DTYPES = {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, amp: str) -> torch.autocast:
    """The context of a network's forward pass."""
    return torch.autocast(device.type, DTYPES[amp], enabled=amp != "off")


def build_scaler(device: torch.device, amp: str) -> torch.amp.GradScaler:
    """Loss scaling: fp16 needs it."""
    return torch.amp.GradScaler(device.type, enabled=amp == "fp16")


def check_amp(network: nn.Module, image_size: int, device: torch.device, amp: str) -> None:
    """Refuses what oneDNN 3.12 computes wrong: bf16 gradients of strided one-pixel convolutions.

    The weights' gradient of a convolution with a stride, and a kernel of more than one pixel, whose
    input is one pixel is partly uninitialised memory: most often numbers near zero, at
    times NaN. Other convolutions, float16 and float32 were found correct, each with memory full of
    NaN, on AVX-512 with and without bfloat16 instructions.
    """
    if amp != "bf16" or device.type != "cpu":
        return
    strided = {
        module: name
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv2d) and max(module.stride) > 1 and max(module.kernel_size) > 1
    }
    wrong: list[str] = []

    def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if module in strided and inputs[0].shape[2:].numel() == 1:
            wrong.append(strided[module])

    was_training, hook = network.training, register_module_forward_pre_hook(look)
    try:
        with torch.no_grad():
            network.eval()(torch.zeros(1, 3, image_size, image_size))
    finally:
        hook.remove()
        network.train(was_training)
    if wrong:
        raise UserError(
            f"--amp bf16 on a CPU: {wrong[0]} sees a single pixel of {image_size}-pixel images, "
            "and its gradient would be wrong (an error of oneDNN): use larger images or --amp off"
        )

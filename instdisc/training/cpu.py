"""What makes training on a CPU faster, without changing what is computed beyond rounding.

**Memory.** glibc gives large blocks back to the system when they are freed, and a training step
takes the same ones again, each page filled with zeros by the kernel. `keep_memory` ends that for a
process that trains. It is called when its loader processes have been started; those that are
started later undo it, since images of all sizes would make them keep the largest ever seen.

**Small maps.** Networks for 224 pixels that see 32 end in maps of 2x2 and 1x1. oneDNN's weight
gradient of a 3x3 convolution falls to a tenth of its usual rate there (float32 on AVX2, bfloat16 on
AVX-512 too), and takes up to half of a training step. As one matrix product over all patches it
does not.

**SGD.** torch's fused step copies every weight that is not contiguous, and channels-last weights
are not: `ChannelsLastSGD` hands them over in the order of their memory.
"""

import ctypes
import functools
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.sgd import sgd

MAX_AREA = 4  # output pixels up to which the product is the faster way
SGD_SETTINGS = ("lr", "momentum", "weight_decay", "dampening", "nesterov", "maximize")

# mallopt's options by their numbers in malloc.h.
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, MMAP_MAX = -1, -2, -3, -4
KEEP = {MMAP_MAX: 0, TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: 64 * 2**20}
# glibc's own values; for the thresholds those up to which it raises them by itself.
GIVE_BACK = {
    MMAP_MAX: 65536,
    MMAP_THRESHOLD: 32 * 2**20,
    TRIM_THRESHOLD: 64 * 2**20,
    TOP_PAD: 128 * 2**10,
}
_keeping: list[int] = []  # the process that keeps its memory, known to its forks


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc."""
    try:
        library = ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows has no such thing
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None


def keep_memory(device: torch.device) -> None:
    """Lets this process, if it trains on a CPU, keep what it frees for its next step.

    Nothing is changed where the user's environment has settings of its own (MALLOC_*).
    """
    library = _glibc()
    chosen = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if device.type == "cpu" and library is not None and not chosen:
        for option, value in KEEP.items():
            library.mallopt(option, value)
        _keeping[:] = [os.getpid()]


def give_back_memory() -> None:
    """Undoes `keep_memory` in a fork of the process that called it."""
    library = _glibc()
    if library is not None and _keeping and _keeping != [os.getpid()]:
        for option, value in GIVE_BACK.items():
            library.mallopt(option, value)
        library.malloc_trim(0)
        _keeping.clear()


def _weight_gradient(inputs: Tensor, grad: Tensor, weight: Tensor, conv: nn.Conv2d) -> Tensor:
    """dL/dw, `(O, I, k, k)` in channels-last order, from inputs and the gradient of outputs."""
    kernel, stride, padding = conv.kernel_size[0], conv.stride[0], int(conv.padding[0])
    channels = inputs.shape[1]
    rows = grad.permute(0, 2, 3, 1).reshape(-1, grad.shape[1])
    pixels = inputs.permute(0, 2, 3, 1)
    if inputs.shape[2:] == (1, 1):  # all taps but the one on the pixel see zeros
        result = weight.new_zeros(grad.shape[1], kernel, kernel, channels)
        result[:, padding, padding] = rows.T @ pixels.reshape(-1, channels)
    else:
        padded = functional.pad(pixels, (0, 0, padding, padding, padding, padding))
        patches = padded.unfold(1, kernel, stride).unfold(2, kernel, stride)
        columns = patches.permute(0, 1, 2, 4, 5, 3).reshape(len(rows), -1)
        result = (rows.T @ columns).view(-1, kernel, kernel, channels)
    return result.permute(0, 3, 1, 2)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, conv: nn.Conv2d) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.conv = conv
        return functional.conv2d(inputs, weight, None, conv.stride, conv.padding)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,), (inputs, weight) = grad_outputs, ctx.saved_tensors
        grad_inputs = grad_weight = None
        if ctx.needs_input_grad[0]:
            conv = ctx.conv
            grad_inputs = torch.ops.aten.convolution_backward(
                *(grad, inputs, weight, None, conv.stride, conv.padding, conv.dilation),
                *(False, [0, 0], conv.groups, [True, False, False]),
            )[0]
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_gradient(inputs, grad, weight, ctx.conv)
        return grad_inputs, grad_weight, None


class SmallMapConv2d(nn.Conv2d):
    """nn.Conv2d whose weight gradient is a matrix product where the maps are small."""

    def forward(self, input: Tensor) -> Tensor:
        """The convolution; its values are those of nn.Conv2d."""
        area = (input.shape[2] // self.stride[0]) * (input.shape[3] // self.stride[1])
        if area > MAX_AREA or not torch.is_grad_enabled():
            return super().forward(input)
        weight = self.weight
        if torch.is_autocast_enabled("cpu"):  # which does not reach into a Function
            dtype = torch.get_autocast_dtype("cpu")
            input, weight = input.to(dtype), weight.to(dtype)
        return _Convolution.apply(input, weight, self)


def use_small_map_gradients(model: nn.Module) -> None:
    """Changes the class of those convolutions of a model that are slow on small maps.

    Names, weights and checkpoints stay as they are.
    """
    for module in model.modules():
        if (
            type(module) is nn.Conv2d
            and module.bias is None
            and module.groups == 1
            and module.kernel_size[0] == module.kernel_size[1]
            and module.stride[0] == module.stride[1]
            and (module.kernel_size[0] > 1 or module.stride[0] > 1)
            and module.dilation == (1, 1)
            and module.padding == (module.kernel_size[0] // 2,) * 2
            and module.padding_mode == "zeros"
        ):
            module.__class__ = SmallMapConv2d


class ChannelsLastSGD(torch.optim.SGD):
    """torch's fused SGD, to the bit, without copies of channels-last weights on a CPU."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; the first, which makes the momentum buffers, is torch's own."""
        used = [[w for w in group["params"] if w.grad is not None] for group in self.param_groups]
        known = all("momentum_buffer" in self.state[w] for weights in used for w in weights)
        if closure is not None or not known:
            return super().step(closure)
        for group, weights in zip(self.param_groups, used, strict=True):
            sgd(
                [_as_stored(weight, weight) for weight in weights],
                [_as_stored(weight.grad, weight) for weight in weights],
                [_as_stored(self.state[weight]["momentum_buffer"], weight) for weight in weights],
                fused=True,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
                **{name: group[name] for name in SGD_SETTINGS},
            )
        return None


def _as_stored(tensor: Tensor, weight: Tensor) -> Tensor:
    """A view whose dimensions have the order that those of the weight have in memory."""
    last = weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last)
    return tensor.permute(0, 2, 3, 1) if last else tensor


def build_sgd(parameters: Any, device: torch.device, **settings: Any) -> torch.optim.SGD:
    """SGD in one pass over the weights: a fifth of a step of VGG16 on a CPU."""
    kind = ChannelsLastSGD if device.type == "cpu" else torch.optim.SGD
    return kind(parameters, fused=True, **settings)

"""What the modules of a network give in a forward pass."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn


@contextlib.contextmanager
def recorded_outputs(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """What each module gives in a forward pass within, by its label."""
    found: dict[str, Tensor] = {}

    def keep(label: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, args, output: found.__setitem__(label, output)

    with contextlib.ExitStack() as stack:
        for label, module in modules.items():
            stack.enter_context(module.register_forward_hook(keep(label)))
        yield found

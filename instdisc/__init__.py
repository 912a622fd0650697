"""instdisc: instance-discrimination backbones and what they are worth downstream."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`instdisc.load_backbone`, imported on first use: `import instdisc` must not import torch."""
    if name == "load_backbone":
        from instdisc.networks.weights import load_backbone

        return load_backbone
    raise AttributeError(f"module 'instdisc' has no attribute {name!r}")

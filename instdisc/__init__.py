"""instdisc: instance-discrimination backbones and what they are worth downstream."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`load_backbone` and `embed`, imported on first use: `import instdisc` imports no torch."""
    if name == "load_backbone":
        from instdisc.networks.weights import load_backbone

        return load_backbone
    if name == "embed":
        from instdisc.features.embed import embed

        return embed
    raise AttributeError(f"module 'instdisc' has no attribute {name!r}")

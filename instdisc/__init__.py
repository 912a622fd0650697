"""instdisc: instance-discrimination backbones and what they are worth downstream."""

__version__ = "0.1.0"

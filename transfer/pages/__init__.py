"""HTML pages from the templates beside this file: one file each, without the network.

Imports no torch.
"""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Path(__file__).parent


def to_data_uri(image: bytes) -> str:
    """A PNG or JPEG file inside the page."""
    kind = "png" if image.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["data_uri"] = to_data_uri
    return environment


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _join(parts: Sequence[str], ending: str) -> str:
    files = [TEMPLATES / f"{part}.{ending}" for part in parts]
    return "".join(file.read_text("utf-8") for file in files if file.exists())


def render(name: str, **context: object) -> str:
    """The page of a template; every value in it is escaped.

    Its policy admits one style sheet and one script, by hash: those of base, map and the page.
    """
    style, script = (_join(("base", "map", name), ending) for ending in ("css", "js"))
    template = _environment().get_template(f"{name}.html.j2")
    hashes = {"style_hash": _digest(style), "script_hash": _digest(script)}
    return template.render(style=style, script=script, **hashes, **context)

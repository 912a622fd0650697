"""HTML pages from templates/: one file each, without scripts, fonts or the network.

Imports no torch.
"""

import base64
import hashlib
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

TEMPLATES = Path(__file__).with_name("templates")


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


def render(name: str, **context: object) -> str:
    """The page of a template; every value in it is escaped.

    Its policy admits one style sheet, by hash: base.css and the page's own.
    """
    style = "".join((TEMPLATES / f"{part}.css").read_text("utf-8") for part in ("base", name))
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    template = _environment().get_template(f"{name}.html.j2")
    return template.render(style=style, style_hash=digest, **context)

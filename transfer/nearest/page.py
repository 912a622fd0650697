"""The retrieval figure as one HTML file."""

import io

from transfer.nearest.gallery import Gallery, Picture
from transfer.pages import render


def encode(picture: Picture) -> bytes:
    """The file of a picture; small ones keep every pixel."""
    file = io.BytesIO()
    if picture.is_small:
        picture.image.save(file, "PNG")
    else:
        picture.image.save(file, "JPEG", quality=82)
    return file.getvalue()


def render_page(gallery: Gallery) -> str:
    """The whole page."""
    return render(
        "retrieval",
        title=gallery.title,
        warning=gallery.warning,
        facts=gallery.facts,
        gallery=gallery,
        encode=encode,
    )

"""Pages from templates: values are text, a missing one is an error, one style, one script."""

import base64
import hashlib
import re

import pytest
from jinja2 import UndefinedError

from transfer.pages import render, to_data_uri


def test_policy_admits_the_style_and_the_script_of_the_page_and_nothing_else() -> None:
    from transfer.nearest.gallery import Gallery
    from transfer.nearest.page import render_page

    page = render_page(Gallery("<i>&\"'", [("a", "<b>")], []))
    policy = "default-src 'none'; img-src data:; "
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        policy += f"{tag}-src 'sha256-{digest}'; "
    assert policy + "base-uri 'none'; form-action 'none'" in page
    assert "<title>&lt;i&gt;&amp;&#34;&#39;</title>" in page
    assert "<dd>&lt;b&gt;</dd>" in page


def test_what_a_template_needs_and_does_not_get_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="title"):
        render("report")


def test_images_say_what_they_are() -> None:
    assert to_data_uri(b"\x89PNG\r\n") == "data:image/png;base64,iVBORw0K"
    assert to_data_uri(b"\xff\xd8\xff") == "data:image/jpeg;base64,/9j/"

"""What a retrieval page and figure show: queries, their neighbours, and words about them."""

import dataclasses
from collections.abc import Sequence

from PIL import Image, ImageOps

from transfer.nearest.feature_map import FeatureMap

THUMBNAIL = 160  # pixels; twice the size on a page, for dense screens


@dataclasses.dataclass(frozen=True)
class Picture:
    """One image of the gallery.

    Attributes:
        image: a square thumbnail.
        caption: its class, or its name.
        title: its full name.
        similarity: to the query; None for the query itself.
        agrees: whether its class is the query's; None where there are no classes.
    """

    image: Image.Image
    caption: str
    title: str
    similarity: float | None = None
    agrees: bool | None = None

    @property
    def is_small(self) -> bool:
        """Whether its pixels are shown as they are."""
        return min(self.image.size) <= 64


@dataclasses.dataclass(frozen=True)
class Case:
    """A query and its neighbours, the nearest first."""

    query: Picture
    neighbors: Sequence[Picture]

    @property
    def agreement(self) -> str:
        """How many neighbours share the query's class, in words; empty without classes."""
        marks = [picture.agrees for picture in self.neighbors if picture.agrees is not None]
        return f"{sum(marks)} of {len(marks)} agree" if marks else ""


@dataclasses.dataclass(frozen=True)
class Section:
    """Cases under a heading, with a sentence about their choice."""

    heading: str
    note: str
    cases: Sequence[Case]


@dataclasses.dataclass(frozen=True)
class Gallery:
    """A page: a title, facts as (name, value), sections, a warning or nothing, a map or none."""

    title: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    warning: str = ""
    feature_map: FeatureMap | None = None

    @property
    def has_classes(self) -> bool:
        """Whether any border means agreement."""
        cases = (case for section in self.sections for case in section.cases)
        return any(case.agreement for case in cases)


def to_thumbnail(image: Image.Image) -> Image.Image:
    """The middle square, at most `THUMBNAIL` pixels wide; small images keep their pixels."""
    side = min(THUMBNAIL, *image.size)
    return ImageOps.fit(image.convert("RGB"), (side, side), Image.Resampling.LANCZOS)


def to_printable(text: str) -> str:
    r"""The text with whatever is not printable spelt out, as in "\x1b" or "\udcff".

    File names may hold control characters, or bytes that are no text: neither may reach a terminal
    or a page.
    """
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )

"""A figure of the report in a light and a dark version. Imports no torch."""

import dataclasses
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transfer.nearest.feature_map import FeatureMap

DPI = 160
THEMES: dict[str, dict[str, Any]] = {
    "light": {
        "page": "#ffffff",
        "text": "#1c2128",
        "line": "#d8dee4",
        "colours": ("#0072b2", "#d55e00", "#009e73", "#a8508c", "#b07a00", "#3d8fc4"),
    },
    "dark": {
        "page": "#0f1318",
        "text": "#e6edf3",
        "line": "#2d333b",
        "colours": ("#58a6ff", "#ff9e64", "#3ecf8e", "#e7a3d0", "#f2c14e", "#a5d8ff"),
    },
}
Draw = Callable[[Any, Sequence[str]], None]


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure, or the sentence that stands for it.

    Attributes:
        slug: name of its file and anchor.
        title: its heading.
        caption: what it shows, or why it is not there.
        images: PNG by theme; empty where there is nothing to draw.
        is_demo: whether it is of the embedded images.
        is_wide: whether it needs more width than a telephone has.
        feature_map: what a page shows instead of the image.
    """

    slug: str
    title: str
    caption: str
    images: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    is_demo: bool = False
    is_wide: bool = False
    feature_map: FeatureMap | None = None

    @property
    def file_name(self) -> str:
        """Of the light version, where there is one."""
        is_png = self.images["light"].startswith(b"\x89PNG")
        return f"{self.slug}.{'png' if is_png else 'jpg'}"


def render(draw: Draw, size: tuple[float, float]) -> dict[str, bytes]:
    """Draws in every theme; `draw` gets a figure and the colours of its lines."""
    # Heavy to import, and not needed by the tables.
    import matplotlib
    from matplotlib.figure import Figure

    images = {}
    for name, theme in THEMES.items():
        settings: Any = {
            **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), theme["text"]),
            **dict.fromkeys(("xtick.color", "ytick.color"), theme["text"]),
            **dict.fromkeys(("axes.facecolor", "figure.facecolor"), theme["page"]),
            **{f"axes.spines.{side}": False for side in ("top", "right")},
            "grid.color": theme["line"],
            "axes.grid": True,
            "font.size": 10,
            "legend.frameon": False,
            "legend.fontsize": 9,
            "text.parse_math": False,  # a run may be called $x$
        }
        with matplotlib.rc_context(settings):
            figure = Figure(figsize=size, layout="constrained")
            draw(figure, theme["colours"])
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=DPI)
        images[name] = file.getvalue()
    return images


def shorten(name: str, most: int = 44) -> str:
    """A name that fits into a legend."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-most // 2 + 1 :]}"

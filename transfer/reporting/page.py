"""The report as one HTML file. Imports no torch."""

from collections.abc import Mapping, Sequence

from transfer.pages import render
from transfer.reporting.drawing import Drawing
from transfer.reporting.grids import DASH, Grid, show_rows
from transfer.reporting.text import describe_sources, shared_citation

LEGEND = (
    "Published numbers stand as printed, with their source. Measured ones are "
    "mean ± standard deviation (n repetitions with other seeds); the difference is measured minus "
    f"published, in points. A {DASH} says that nothing was published or measured there. "
    "A column holds one protocol."
)


def render_report(
    title: str,
    facts: Sequence[tuple[str, str]],
    warning: str,
    sections: Mapping[str, tuple[Sequence[Grid], Sequence[Drawing]]],
) -> str:
    """The whole page.

    Args:
        title: of the page.
        facts: what it was made from.
        warning: what a reader must know first; may be empty.
        sections: heading -> tables and figures below it.
    """
    return render(
        "report",
        title=title,
        facts=facts,
        warning=warning,
        sections=sections,
        legend=LEGEND,
        dash=DASH,
        show_rows=show_rows,
        shared_citation=shared_citation,
        describe_sources=describe_sources,
    )

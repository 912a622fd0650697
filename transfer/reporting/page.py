"""The report as one HTML file. Imports no torch."""

from collections.abc import Sequence

from transfer.pages import render
from transfer.reporting.grids import DASH, show_difference, show_lines
from transfer.reporting.paper_numbers import find_address
from transfer.reporting.sections import CARD_LEGEND, Section
from transfer.reporting.text import describe_protocols, shared_citation


def render_report(
    title: str, facts: Sequence[tuple[str, str]], warning: str, sections: Sequence[Section]
) -> str:
    """The whole page.

    Args:
        title: of the page.
        facts: what it was made from.
        warning: what a reader must know first; may be empty.
        sections: in their order.
    """
    return render(
        "report",
        title=title,
        facts=facts,
        warning=warning,
        sections=sections,
        dash=DASH,
        legend=CARD_LEGEND,
        show_lines=show_lines,
        show_difference=show_difference,
        shared_citation=shared_citation,
        describe_protocols=describe_protocols,
        find_address=find_address,
    )

"""What stands where in the report: measurements first, what was only published last.

Imports no torch.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from instdisc.runs.results import Result
from transfer.reporting.drawing import Drawing
from transfer.reporting.figures import draw_figures
from transfer.reporting.grids import DASH, Grid
from transfer.reporting.rows import collect
from transfer.reporting.scorecard import Scorecard, build_scorecard
from transfer.reporting.tables import Tables

CARD_LEGEND = (
    "In percent: mean ± standard deviation (n repetitions with other seeds), then the points above "
    "the same architecture untrained. Bold: the best of its column; the darker, the better in it. "
    "Each column is one protocol; its details have the published numbers, data, n and runs. "
    "A number that is a link has its details in another table."
)
GRID_LEGEND = (
    "Published numbers stand as printed, with their source. Measured ones are "
    "mean ± standard deviation (n repetitions with other seeds); the difference is measured minus "
    f"published, in points. A {DASH} says that nothing was published or measured there. "
    "A column holds one protocol."
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, a sentence on how to read it, and what stands below it, in this order.

    Attributes:
        heading: its title.
        note: may be empty.
        cards: scorecards.
        drawings: figures.
        grids: tables.
        is_folded: whether a page shows its heading only until a reader opens it.
    """

    heading: str
    note: str = ""
    cards: Sequence[Scorecard] = ()
    drawings: Sequence[Drawing] = ()
    grids: Sequence[Grid] = ()
    is_folded: bool = False

    @property
    def undrawn(self) -> list[Drawing]:
        """Figures that there is no data for; their captions say what makes it."""
        return [drawing for drawing in self.drawings if not drawing.images]


def build_sections(rows: Sequence[Result], root: Path, *, figures: bool) -> list[Section]:
    """All sections that are not empty."""
    entries = collect(rows)
    grids = Tables(entries).build()
    cards = [build_scorecard(entries, grids, is_demo=demo) for demo in (False, True)]
    real, demo = (
        draw_figures(root, rows, is_demo=is_demo) if figures else [] for is_demo in (False, True)
    )
    demo_grids = [grid for grid in grids if grid.is_demo]
    measured = [grid for grid in grids if grid.has_measurements and not grid.is_demo]
    other = [grid for grid in measured if grid.slug.startswith("other-")]
    sections = [
        Section("Measured", CARD_LEGEND, cards=[card for card in cards if card is not None]),
        Section("Figures", drawings=[drawing for drawing in real if drawing.images]),
        Section("The paper's tables", GRID_LEGEND, grids=[g for g in measured if g not in other]),
        Section("Also measured", grids=other),
        Section(
            "Demo: embedded images",
            drawings=[drawing for drawing in demo if drawing.images],
            grids=demo_grids,
        ),
        Section(
            "Published, not measured here",
            grids=[grid for grid in grids if not grid.has_measurements],
            drawings=[drawing for drawing in real if not drawing.images],
            is_folded=True,
        ),
    ]
    return [section for section in sections if section.cards or section.drawings or section.grids]

"""Which queries a retrieval figure shows, and their pictures."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from instdisc.images.sets import ImageSet
from transfer.nearest.gallery import Case, Picture, to_printable, to_thumbnail

BEST = (
    "Queries with the most neighbours of their own class; among equals the one whose neighbours "
    "are more similar on average. No class comes twice before every class came once."
)
WORST = (
    "Queries with the fewest neighbours of their own class; among equals, again, the one whose "
    "neighbours are more similar: the surest mistakes. No class comes twice before every class "
    "came once."
)


def choose_cases(
    agreement: np.ndarray, similarity: np.ndarray, labels: np.ndarray, num_cases: int
) -> tuple[list[int], list[int]]:
    """The best and the worst queries, at most `num_cases` each, none in both.

    Args:
        agreement: neighbours of the query's class, `(Q,)`.
        similarity: mean similarity of the neighbours, `(Q,)`.
        labels: classes of the queries, `(Q,)`.
        num_cases: how many of each.
    """

    def choose(badness: np.ndarray, candidates: np.ndarray, count: int) -> list[int]:
        order = candidates[np.lexsort((candidates, -similarity[candidates], badness[candidates]))]
        times: dict[int, int] = {}
        seen_before = []
        for query in order:
            label = int(labels[query])
            seen_before.append(times.get(label, 0))
            times[label] = seen_before[-1] + 1
        first_of_class = np.argsort(seen_before, kind="stable")
        return [int(query) for query in order[first_of_class][:count]]

    everyone = np.arange(len(labels))
    best = choose(-agreement, everyone, min(num_cases, -(-len(everyone) // 2)))
    rest = np.setdiff1d(everyone, best)
    return best, choose(agreement, rest, min(num_cases, len(rest)))


def make_case(
    queries: ImageSet,
    query: int,
    images: ImageSet,
    indices: Sequence[int],
    similarities: Sequence[float],
    *,
    labelled: bool,
) -> Case:
    """A query and its neighbours; captions are their classes if labelled, else file names."""

    def caption(images: ImageSet, index: int) -> str:
        if labelled:
            return to_printable(images.classes[images.labels[index]])
        return to_printable(Path(images.name(index)).name)

    def picture(
        images: ImageSet, index: int, similarity: float | None, agrees: bool | None
    ) -> Picture:
        return Picture(
            image=to_thumbnail(images.open(index)),
            caption=caption(images, index),
            title=to_printable(images.name(index)),
            similarity=similarity,
            agrees=agrees,
        )

    return Case(
        picture(queries, query, None, None),
        [
            picture(
                images,
                index,
                similarity,
                bool(images.labels[index] == queries.labels[query]) if labelled else None,
            )
            for index, similarity in zip(indices, similarities, strict=True)
        ],
    )

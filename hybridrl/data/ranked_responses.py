"""Preference pairs of rankings: lists of responses to one prompt, in order or with scores."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

from hybridrl.data.row_origin import DataRow
from hybridrl.errors import RowError


class RankedPair(NamedTuple):
    """Two responses to a prompt, and how much better the first one is."""

    better: Any
    worse: Any
    margin: float


def list_ranked_pairs(
    row: DataRow, responses: Any, scores: Any, columns: tuple[str, str | None], which: str
) -> list[RankedPair]:
    """Return the pairs of a ranking, the better response first; none of equal scores.

    Args:
        responses: Of the row, the best one first if there are no `scores`.
        scores: A number for each response, whose differences are the margins; None if `columns` has
            none.
        columns: Those of responses and scores, for messages.
        which: `all` pairs, or the `ends`, the best and the worst response.

    Raises:
        RowError: if they are no lists, of two responses at least and as many numbers.
    """
    if not isinstance(responses, list) or len(responses) < 2:
        raise RowError(
            f"{row} has {responses!r:.80} in the column `{columns[0]}` "
            f"(`{row / 'ranked_column'}`), expected a list of two responses or more.",
            "without two responses",
        )
    if columns[1] is None:
        values = [0.0] * len(responses)
    elif not (
        isinstance(scores, list)
        and all(map(is_finite_number, scores))
        and len(scores) == len(responses)
    ):
        raise RowError(
            f"{row} has {scores!r:.80} in the column `{columns[1]}` (`{row / 'scores_column'}`), "
            f"expected a list of {len(responses)} finite numbers, one for each response.",
            "without a score for each response",
        )
    else:
        values = list(scores)
    order = sorted(range(len(responses)), key=lambda place: -values[place])
    places: Iterator[tuple[int, ...]] = combinations(order, 2)
    if which == "ends":
        places = iter([(order[0], order[-1])])
    found = [RankedPair(responses[a], responses[b], values[a] - values[b]) for a, b in places]
    return [pair for pair in found if columns[1] is None or pair.margin > 0]


def is_finite_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)

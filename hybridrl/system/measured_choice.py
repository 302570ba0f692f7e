"""Choosing between ways by what they were measured to take, and noticing that it no longer holds.

Ranks that are told the same figures choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeVar

_Way = TypeVar("_Way")


class MeasuredChoice:
    """Watches whether what was measured still holds.

    Args:
        in_a_row: So many observations one after the other that are out of bounds are no accident.
    """

    def __init__(self, in_a_row: int) -> None:
        self._in_a_row = in_a_row
        self.hold(-math.inf, math.inf)

    def hold(self, least: float, most: float, for_s: float = math.inf) -> None:
        """Begin to watch: ways were measured, and one was chosen.

        Args:
            least, most: Between which it is as was measured.
            for_s: Seconds of use after which to measure anew in any case.
        """
        self._bounds, self._left, self._strikes = (least, most), for_s, 0

    def is_outdated(self, observed: float, used_s: float = 0.0, counts: bool = True) -> bool:
        """Return whether to measure again, after something was observed.

        Args:
            used_s: Seconds of use since the last observation.
            counts: Whether this much matters; else it is as if it were within bounds.
        """
        least, most = self._bounds
        is_out = counts and not least <= observed <= most
        self._strikes = self._strikes + 1 if is_out else 0
        self._left -= used_s
        return self._strikes >= self._in_a_row or self._left <= 0


def quickest(seconds: Mapping[_Way, float], margin: float = 0.0) -> _Way:
    """Return the way that takes least.

    Args:
        seconds: Of each way, those that are preferred first.
        margin: The share of its time that a way has to save over one that stands before it.
    """
    best, least = next(iter(seconds)), math.inf
    for way, taken in seconds.items():
        # Of what nobody waits for, no share is saved.
        if taken < (1 - margin) * least:
            best, least = way, taken
    return best

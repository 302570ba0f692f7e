"""Figures: named numbers that workers, programs and functions report, to be written and shown."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from hybridrl.errors import ConfigError

LONGEST_NAME = 250
"""Characters of a figure's name, which trackers take too."""
MOST_TOLD = 20


def number_of(value: Any) -> float | None:
    """Return a number, or an array of one, as a float. Infinities are NaN, since neither files nor
    trackers take them. None: it is no number that a float can hold."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    try:
        found = float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:
        return None
    return found if found is None or math.isfinite(found) else math.nan


def fault_of_name(name: Any) -> str:
    """Return why this cannot be a figure's name, as the end of a sentence; empty: it can."""
    if not isinstance(name, str):
        return f"whose name is a {type(name).__name__}, not a text"
    if not 0 < len(name) <= LONGEST_NAME:
        return f"whose name has {len(name):,} characters, and 1 to {LONGEST_NAME} are allowed"
    return "" if name.isprintable() else "whose name has characters that cannot be printed"


class FigureCheck:
    """Takes what others report as figures. Nothing is learned from figures, so one that cannot be
    written costs a sentence, once, and not the steps of a run.

    Args:
        say: Told of each that is left out.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told: set[tuple[str, str]] = set()

    def figures(self, found: Mapping[Any, Any], who: str) -> dict[str, float]:
        """Return those that are named numbers.

        Args:
            who: Reported them, for people.

        Raises:
            ConfigError: if it is no mapping.
        """
        if not isinstance(found, Mapping):
            raise ConfigError(
                f"{who} gave a {type(found).__name__}: it must be a dictionary of names and "
                "numbers."
            )
        kept: dict[str, float] = {}
        for name, value in found.items():
            number = value if type(value) is float and math.isfinite(value) else number_of(value)
            fault = fault_of_name(name)
            if number is None and not fault:
                too_large = isinstance(value, numbers.Real)
                kind = type(value).__name__
                fault = f"which is {'too large' if too_large else 'not a number'} ({kind})"
            if fault:
                self._tell(who, name, fault)
            elif number is not None:
                kept[name] = number
        return kept

    def _tell(self, who: str, name: Any, fault: str) -> None:
        shown = repr(name)[:80] if isinstance(name, str) else "..."
        if (who, shown) not in self._told and len(self._told) < MOST_TOLD:
            self._told.add((who, shown))
            self._say(f"{who} reported the metric {shown}, {fault}: it is left out.")

"""A piece of advice with its numbers, its severity, and the setting to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

WARNING, TIP = "warning", "tip"
"""Something is wrong; or something could be quicker, or might be better."""
_HIGHEST_TIP_WEIGHT = 0.5


class RunAdvice(NamedTuple):
    """A piece of advice on a run.

    Attributes:
        title: What was seen, a sentence with its numbers.
        numbers: The same for programs, by name.
        action: What to change, with the setting's name; a sentence.
        weight: 0 to 1: how much it matters. Every warning has more than every tip.
        kind: `WARNING` or `TIP`.
    """

    title: str
    numbers: Mapping[str, float]
    action: str
    weight: float
    kind: str


def make_warning(
    title: str, numbers: Mapping[str, float], action: str, severity: float
) -> RunAdvice:
    """Build a warning: something is wrong. Its weight is above that of every tip."""
    weight = _HIGHEST_TIP_WEIGHT + (1 - _HIGHEST_TIP_WEIGHT) * min(1.0, max(0.0, severity))
    return RunAdvice(title, numbers, action, weight, WARNING)


def make_tip(title: str, numbers: Mapping[str, float], action: str, gain: float) -> RunAdvice:
    """Build a tip: something could be faster or better. Its weight grows with the gain."""
    return RunAdvice(title, numbers, action, _HIGHEST_TIP_WEIGHT * min(1.0, max(0.0, gain)), TIP)

"""What a run could do better, ranked, each with the numbers behind it and the setting to change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

WARNING, TIP = "warning", "tip"
"""Something is wrong, or something could be quicker or better."""


class Advice(NamedTuple):
    """One piece.

    Attributes:
        title: What was seen, a sentence with its numbers.
        numbers: The same for programs, by name.
        action: What to change, with the setting's name; a sentence.
        weight: 0 to 1: how much it matters; what comes first is the largest.
        kind: `WARNING` or `TIP`.
    """

    title: str
    numbers: Mapping[str, float]
    action: str
    weight: float
    kind: str = TIP


def advise(run_folder: Path) -> list[Advice]:
    """All that there is to say of a run, what matters most first."""
    return []


def what_was_learned(run_folder: Path) -> list[str]:
    """Sentences: what the run learned, and where its time went."""
    return []

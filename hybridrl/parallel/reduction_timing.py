"""Measurement of each gradient reduction method on these ranks, in a few seconds.

All ways take turns at each size, so that what else the machine and the link do falls on all. Every
rank is told the time of the slowest one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.parallel.collectives import reduce_scatter_tensor
from hybridrl.parallel.compressed_collectives import CompressedReduceScatter, ReductionHop
from hybridrl.parallel.reduction_choice import (
    FULL_REDUCTION,
    ZERO_COST,
    CostCurve,
    HopCost,
    MethodCost,
)
from hybridrl.system.timing import measure_seconds

MIN_VALUES, _GROWTH_FACTOR, _MAX_VALUES = 1 << 12, 4, 1 << 24
"""Values that are summed: the fewest, how many times as many come next, and the most."""
_SLOW_SECONDS = 0.1
"""Seconds. What takes longer is measured at no larger size."""
MIN_REPEATS = 5
"""Of each way at each size."""

_TimedCall = Callable[[torch.Tensor], None]


def measure_methods(
    ways: Mapping[str, CompressedReduceScatter],
    largest: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> list[MethodCost]:
    """Measure `full` and these methods, and return the cost of each one's hops. Collective over the
    group.

    Args:
        ways: By name.
        largest: Values of the largest unit.
        group: All ranks that share parameters.
    """
    orders: dict[ReductionHop, Sequence[int] | None] = {}
    for way in ways.values():
        for number, hop in enumerate(way.hops):
            orders.setdefault(hop, way.order if number == 0 else None)
    works = [_timed_sum(reduce_scatter_tensor, group)]
    for hop, order in orders.items():
        works.append(_timed_sum(CompressedReduceScatter([hop], order), hop.group))
    whole, *hops = _measure_curves(works, min(largest, _MAX_VALUES), group, device)
    curves = dict(zip(orders, hops, strict=True))
    found = [MethodCost(FULL_REDUCTION, (HopCost(1.0, ZERO_COST, whole),))]
    for name, way in ways.items():
        parts, share = [], 1.0
        for hop in way.hops:
            parts.append(_split_hop_cost(hop, share, curves))
            share /= hop.group.size()
        found.append(MethodCost(name, tuple(parts)))
    return found


def all_reduce_figures(
    figures: Sequence[float], operation: Any, group: dist.ProcessGroup
) -> list[float]:
    """All-reduce figures so that they are the same on all ranks."""
    together = torch.tensor(figures, dtype=torch.float64)
    dist.all_reduce(together, operation, group=group)
    return [float(figure) for figure in together]


def _split_hop_cost(
    hop: ReductionHop, share: float, curves: dict[ReductionHop, CostCurve]
) -> HopCost:
    """Split the time of a hop into the link's share, which is what as many bytes of float32 take,
    and the codec's, which is the rest."""
    whole, exact = curves[hop], curves.get(ReductionHop(hop.group, None))
    if hop.codec is None or exact is None:
        return HopCost(share, ZERO_COST, whole)
    ranks, codec, link = hop.group.size(), [], []
    for values, taken in whole.points:
        sent = min(taken, exact(hop.codec.size(int(values) // ranks) * ranks / 4))
        link.append((values, sent))
        codec.append((values, taken - sent))
    return HopCost(share, CostCurve(tuple(codec)), CostCurve(tuple(link)))


def _timed_sum(reduce: Callable[..., None], group: dist.ProcessGroup) -> _TimedCall:
    def work(values: torch.Tensor) -> None:
        out = values.new_empty(len(values) // group.size())
        reduce(out, values, group=group, op=dist.ReduceOp.SUM)

    return work


def _measure_curves(
    works: Sequence[_TimedCall], largest: int, group: dist.ProcessGroup, device: torch.device
) -> list[CostCurve]:
    """Measure each call at two sizes or more, growing the size until it takes long enough."""
    found: list[list[tuple[float, float]]] = [[] for _ in works]
    ranks = group.size()  # of any hop a multiple
    largest = ranks * -(-largest // ranks)
    least = numel = ranks * -(-MIN_VALUES // ranks)
    going = list(range(len(works)))
    while going:
        values = torch.randn(numel, device=device)
        runs = [partial(works[number], values) for number in going]
        mine = measure_seconds(runs, device, turns=MIN_REPEATS, least=0.0)
        slowest = all_reduce_figures(mine, dist.ReduceOp.MAX, group)
        for number, seconds in zip(going, slowest, strict=True):
            found[number].append((float(numel), seconds))
        if numel >= largest and numel > least:
            break
        if numel > least:
            going = [number for number in going if found[number][-1][1] <= _SLOW_SECONDS]
        numel = max(_GROWTH_FACTOR * least, min(_GROWTH_FACTOR * numel, largest))
    return [CostCurve(tuple(points)) for points in found]

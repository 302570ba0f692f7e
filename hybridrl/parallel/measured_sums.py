"""`parallel.gradients=auto`: each unit's gradients are summed in the way that was measured to be
quickest.

Before a job's first update the ranks time every way at several sizes on their own links, and choose
for each of FSDP's units (`hybridrl.compress.gradient_choice`). After each update they compare what
the sums took with what was measured. All of them are told the same figures, so they choose alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from hybridrl.compress.gradient_choice import (
    FULL,
    IN_ORDER,
    NOTHING,
    ON_A_STREAM,
    Bucket,
    Choice,
    Curve,
    Part,
    Way,
    choose,
)
from hybridrl.compress.gradients import CompressedReduceScatter, Hop
from hybridrl.core.device import Moment

LEAST, STEP, MOST = 1 << 12, 4, 1 << 24
"""Values that are summed to measure: the fewest, how many times as many come next, and the most."""
LONG = 0.1
"""Seconds. What takes longer is measured at no larger size."""
REPEATS, MOST_REPEATS, ENOUGH = 3, 9, 0.03
"""Of one size: the fewest, and the most if they do not take so many seconds together."""
DRIFT = 1.5
"""Sums that take so many times as long as was measured, or as little, may want another way..."""
IN_A_ROW = 3
"""...if they do so in so many updates."""
SETTLING = 3
"""Updates after which is chosen again where sums go on beside the backward: what a bubble is can
be seen only once sums are short."""


@dataclass(frozen=True)
class HopWay:
    """One way: its name, its hops, and the order of parts before them (see
    `CompressedReduceScatter`)."""

    name: str
    hops: Sequence[Hop]
    order: Sequence[int] | None = None

    @property
    def sums(self) -> CompressedReduceScatter:
        """What does it."""
        return CompressedReduceScatter(self.hops, self.order)


@dataclass(frozen=True)
class _Sum:
    """One that was made: of which unit, when its gradients were ready, when it began and ended."""

    unit: int
    ready: Moment
    begin: Moment
    end: Moment


class MeasuredSums:
    """The sums of one model's gradients, on one rank.

    Args:
        ways: That may be chosen beside `full`, what loses nothing first.
        group: The ranks that share parameters.
        device: This rank's.

    Attributes:
        choice: The last one; None before `install`.
        units: What sums each unit's gradients.
        said: Sentences for the user that nobody has taken yet.
        measurements: How often was measured.
    """

    def __init__(
        self, ways: Sequence[HopWay], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._ways, self._group, self._device = ways, group, device
        self._overlap = IN_ORDER if device.type == "cpu" else ON_A_STREAM
        self.choice: Choice | None = None
        self.units: list[UnitSum] = []
        self.said: list[str] = []
        self.measurements = 0
        self._sums: list[_Sum] = []
        self._drift, self._drifted, self._updates = DRIFT, 0, 0

    def install(self, units: Sequence[FSDPModule], values: Sequence[int]) -> None:
        """Gives each unit its way, after measuring. Collective over the group.

        Args:
            values: How many gradients each unit has.
        """
        self._values = list(values)
        self._order = list(range(len(values)))
        self._gaps = [0.0] * len(values)
        self.units = [UnitSum(self, number) for number in range(len(values))]
        for unit, own in zip(units, self.units, strict=True):
            unit.set_custom_reduce_scatter(own)
        self._measure()
        self._choose()
        self._say()

    def note(self, unit: int, ready: Moment, begin: Moment, end: Moment) -> None:
        """Keeps the times of a sum until the update is over."""
        self._sums.append(_Sum(unit, ready, begin, end))

    def after_update(self) -> None:
        """Looks at what the sums of an update took. Collective over the group.

        They are measured again if they drifted. A rank that comes first to a sum waits in it for
        the others; so what counts is the least that any rank was in its sums.
        """
        done, self._sums = self._sums, []
        if not done:
            return
        took = sum(one.end.since(one.begin) for one in done)
        expected = sum(self._seconds[one.unit] for one in done)
        ratio = self._agreed([took / expected], dist.ReduceOp.MIN)[0]
        self._updates += 1
        if self._overlap.beside and self._updates <= SETTLING:
            self._see_gaps(done)
            self._choose()
            if self._updates == SETTLING:
                self._say()
            return
        drifted = not 1 / self._drift <= ratio <= self._drift
        self._drifted = self._drifted + 1 if drifted else 0
        if self._drifted < IN_A_ROW:
            return
        before = self.choice
        self._measure()
        self._choose()
        self._drifted = 0
        if before is not None and self.choice is not None and before.ways == self.choice.ways:
            # It is not the link alone that differs from what is measured apart from a step: to
            # measure again and again would not help.
            self._drift *= 2
        self._say(
            f"in {IN_A_ROW} updates sums took {ratio:.2g} times what was measured, so it was "
            "measured again. "
        )

    def _choose(self) -> None:
        ready, buckets = 0.0, []
        for unit in self._order:
            buckets.append(Bucket(self._values[unit], ready))
            ready += self._gaps[unit]
        self.choice = choose(buckets, self._costs, self._overlap)
        made = {way.name: way.sums for way in self._ways}
        costs = {way.name: way for way in self._costs}
        self._seconds = [0.0] * len(buckets)
        for unit, name in zip(self._order, self.choice.ways, strict=True):
            self.units[unit].sums = made.get(name)
            values = self._values[unit]
            self._seconds[unit] = max(1e-9, costs[name].codec(values) + costs[name].link(values))

    def _say(self, why: str = "") -> None:
        assert self.choice is not None
        self.said.append(f"parallel.gradients=auto: {why}{self.choice.sentence()}.")

    def _see_gaps(self, done: Sequence[_Sum]) -> None:
        """Seconds of computation between neighbouring units, where no sum hid them: the same on
        all ranks."""
        seen: list[int] = []
        for one, following in pairwise(done):
            if one.unit not in seen:
                seen.append(one.unit)
            gap = following.ready.since(one.ready)
            # A backward ends with the unit before the one that it began with.
            if following.unit != done[0].unit and gap > 1.05 * one.end.since(one.begin):
                self._gaps[one.unit] = gap
        seen += [unit for unit in (done[-1].unit, *self._order) if unit not in seen]
        self._order = list(dict.fromkeys(seen))
        self._gaps = self._agreed(self._gaps, dist.ReduceOp.MAX)

    def _measure(self) -> None:
        """Every hop that is in a way, and torch's own sum."""
        self.measurements += 1
        largest = min(max(self._values, default=0), MOST)
        points = self._points(lambda values: _whole_sum(values, self._group), largest)
        self._costs = [Way(FULL, (Part(1.0, NOTHING, Curve(points)),))]
        known: dict[Hop, Part] = {}
        for way in self._ways:
            parts, share = [], 1.0
            for number, hop in enumerate(way.hops):
                if hop not in known:
                    order = way.order if number == 0 else None
                    alone = CompressedReduceScatter([hop], order)
                    known[hop] = self._part(alone, hop, int(share * largest), known)
                parts.append(Part(share, known[hop].codec, known[hop].link))
                share /= hop.group.size()
            self._costs.append(Way(way.name, tuple(parts)))

    def _part(
        self, sums: CompressedReduceScatter, hop: Hop, largest: int, known: dict[Hop, Part]
    ) -> Part:
        """What a hop takes of the device and of the link."""
        size = hop.group.size()

        def once(values: torch.Tensor) -> None:
            out = values.new_empty(len(values) // size)
            sums(out, values, hop.group, dist.ReduceOp.SUM)

        points = self._points(once, largest)
        whole = Curve(points)
        exact = known.get(Hop(hop.group, None))
        if hop.codec is None or exact is None:
            return Part(1.0, NOTHING, whole)
        link = [
            (values, min(taken, exact.link(hop.codec.size(int(values) // size) * size / 4)))
            for values, taken in points
        ]
        codec = [(v, t - sent) for (v, t), (_, sent) in zip(points, link, strict=True)]
        return Part(1.0, Curve(tuple(codec)), Curve(tuple(link)))

    def _points(
        self, once: Callable[[torch.Tensor], None], largest: int
    ) -> tuple[tuple[float, float], ...]:
        """Seconds of the slowest rank at two sizes or more: more values until it is enough."""
        found: list[tuple[float, float]] = []
        ranks = self._group.size()  # of any hop a multiple
        largest = ranks * -(-largest // ranks)
        least = numel = ranks * -(-LEAST // ranks)
        while True:
            values = torch.randn(numel, device=self._device)
            if not found:
                once(values)  # connections are made, kernels compiled
            taken: list[float] = []
            while len(taken) < REPEATS or (sum(taken) < ENOUGH and len(taken) < MOST_REPEATS):
                taken.append(self._seconds_of(once, values))
            found.append((float(numel), statistics.median(taken)))
            if len(found) > 1 and (numel >= largest or found[-1][1] > LONG):
                return tuple(found)
            numel = max(STEP * least, min(STEP * numel, largest))

    def _seconds_of(self, once: Callable[[torch.Tensor], None], values: torch.Tensor) -> float:
        begin = Moment(self._device)
        once(values)
        return self._agreed([Moment(self._device).since(begin)], dist.ReduceOp.MAX)[0]

    def _agreed(self, figures: Sequence[float], operation: Any) -> list[float]:
        """The same on all ranks."""
        together = torch.tensor(figures, dtype=torch.float64)
        dist.all_reduce(together, operation, group=self._group)
        return [float(figure) for figure in together]


class UnitSum:
    """What one unit's `set_custom_reduce_scatter` takes.

    Attributes:
        sums: How; None: torch's own.
    """

    def __init__(self, owner: MeasuredSums, number: int) -> None:
        self._owner, self._number = owner, number
        self.sums: CompressedReduceScatter | None = None
        self._ready: Moment | None = None

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for gradients, which are ready when this is first called for a sum."""
        self._ready = self._ready or Moment(device)
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """See `CompressedReduceScatter`."""
        begin = Moment(input_tensor.device)
        if self.sums is None:
            _reduce_scatter(output_tensor, input_tensor, op, group)
        else:
            self.sums(output_tensor, input_tensor, group, op)
        end = Moment(input_tensor.device)
        ready, self._ready = self._ready or begin, None
        self._owner.note(self._number, ready, begin, end)


def _whole_sum(values: torch.Tensor, group: dist.ProcessGroup) -> None:
    out = values.new_empty(len(values) // group.size())
    _reduce_scatter(out, values, dist.ReduceOp.SUM, group)


def _reduce_scatter(
    out: torch.Tensor, values: torch.Tensor, op: Any, group: dist.ProcessGroup
) -> None:
    """torch's own, by the name that it has in this version."""
    named = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    named(out, values, op=op, group=group)

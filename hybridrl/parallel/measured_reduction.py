"""`parallel.gradients=auto`: each unit's gradients are reduced by the method that was measured to
be fastest.

Before a job's first update the ranks time every way at several sizes on their own links, and choose
for each of FSDP's units (`hybridrl.parallel.reduction_choice`). After each update they compare what
the sums took with what was measured. All of them are told the same figures, so they choose alike.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from hybridrl.parallel.collectives import reduce_scatter_tensor
from hybridrl.parallel.compressed_collectives import CompressedReduceScatter, PlainAllocation
from hybridrl.parallel.reduction_choice import (
    GradientBucket,
    ReductionChoice,
    choose_methods,
)
from hybridrl.parallel.reduction_timing import all_reduce_figures, measure_methods
from hybridrl.system.device_traits import TimingEvent
from hybridrl.system.measured_choice import MeasuredChoice

_DRIFT_RATIO = 1.5
"""Sums that take so many times as long as was measured, or as little, may want another way..."""
DRIFTED_UPDATES = 3
"""...if they do so in so many updates."""
MIN_TIME_SHARE = 0.02
"""...and if it is such a share of all time: to measure takes seconds."""
CALM_UPDATES = 100
"""Updates after which a measurement is forgotten that was made again. Until then twice as much is
let pass after each: what differs may not be the link, and to measure it more often would not
help."""
SETTLING_UPDATES = 3
"""Updates after which is chosen again where sums go on beside the backward: what a bubble is can
be seen only once sums are short."""


@dataclass(frozen=True)
class _TimedReduction:
    """One reduction of a unit's gradients: when they were ready, when it began and when it
    ended."""

    unit: int
    ready: TimingEvent
    begin: TimingEvent
    end: TimingEvent


class MeasuredReduceScatter:
    """The measured reduce-scatters of one model's gradients, on one rank.

    Args:
        ways: By name, those that may be chosen beside `full`, what loses nothing first.
        group: The ranks that share parameters.
        device: This rank's.

    Attributes:
        choice: The last one; None before `install`.
        units: What sums each unit's gradients.
        said: Sentences for the user that nobody has taken yet.
        measurements: How often was measured.
    """

    def __init__(
        self,
        ways: Mapping[str, CompressedReduceScatter],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._ways, self._group, self._device = ways, group, device
        self._beside = device.type != "cpu"
        self.choice: ReductionChoice | None = None
        self.units: list[UnitReduceScatter] = []
        self.said: list[str] = []
        self.measurements = 0
        self._sums: list[_TimedReduction] = []
        self._held = MeasuredChoice(DRIFTED_UPDATES)
        self._drift, self._updates, self._again = _DRIFT_RATIO, 0, 0
        self._last = 0.0  # when the last update was over

    def install(self, units: Sequence[FSDPModule], values: Sequence[int]) -> None:
        """Measure all methods and give each unit one. Collective over the group.

        Args:
            values: How many gradients each unit has.
        """
        self._values = list(values)
        self._order = list(range(len(values)))
        self._gaps = [0.0] * len(values)
        self.units = [UnitReduceScatter(self, number) for number in range(len(values))]
        for unit, own in zip(units, self.units, strict=True):
            unit.set_custom_reduce_scatter(own)
        self._measure()
        self._choose()
        self._say()
        self._last = time.monotonic()

    def note(self, unit: int, ready: TimingEvent, begin: TimingEvent, end: TimingEvent) -> None:
        """Record the times of a reduction until the update is over."""
        self._sums.append(_TimedReduction(unit, ready, begin, end))

    def after_update(self) -> None:
        """Compare the time of an update's reductions with the measurement. Collective over the
        group.

        They are measured again if they drifted. A rank that comes first to a sum waits in it for
        the others; so what counts is the least that any rank was in its sums.
        """
        done, self._sums = self._sums, []
        if not done:
            return
        took = sum(one.end.since(one.begin) for one in done)
        expected = sum(self._seconds[one.unit] for one in done)
        now = time.monotonic()
        share = abs(took - expected) / max(now - self._last, 1e-9)
        self._last = now
        ratio, share = all_reduce_figures([took / expected, share], dist.ReduceOp.MIN, self._group)
        self._updates += 1
        if self._beside and self._updates <= SETTLING_UPDATES:
            self._see_gaps(done)
            self._choose()
            if self._updates == SETTLING_UPDATES:
                self._say()
            return
        if self._updates - self._again > CALM_UPDATES and self._drift > _DRIFT_RATIO:
            self._drift = _DRIFT_RATIO
            self._held.hold(1 / _DRIFT_RATIO, _DRIFT_RATIO)
        if not self._held.is_outdated(ratio, counts=share >= MIN_TIME_SHARE):
            return
        self._drift, self._again = 2 * self._drift, self._updates
        self._measure()
        self._choose()
        self._say(
            f"in {DRIFTED_UPDATES} updates sums took {ratio:.2g} times what was measured, so it "
            "was measured again. "
        )

    def _choose(self) -> None:
        ready, buckets = 0.0, []
        for unit in self._order:
            buckets.append(GradientBucket(self._values[unit], ready))
            ready += self._gaps[unit]
        self.choice = choose_methods(buckets, self._costs, self._beside)
        costs = {way.name: way for way in self._costs}
        self._seconds = [0.0] * len(buckets)
        for unit, name in zip(self._order, self.choice.ways, strict=True):
            self.units[unit].sums = self._ways.get(name)
            values = self._values[unit]
            self._seconds[unit] = max(1e-9, costs[name].codec(values) + costs[name].link(values))

    def _say(self, why: str = "") -> None:
        assert self.choice is not None
        self.said.append(f"parallel.gradients=auto: {why}{self.choice.sentence()}.")

    def _see_gaps(self, done: Sequence[_TimedReduction]) -> None:
        """Measure the seconds of computation between neighbouring units where no reduction hid
        them; the result is the same on all ranks."""
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
        self._gaps = all_reduce_figures(self._gaps, dist.ReduceOp.MAX, self._group)

    def _measure(self) -> None:
        self.measurements += 1
        largest = max(self._values, default=0)
        self._costs = measure_methods(self._ways, largest, self._group, self._device)
        self._held.hold(1 / self._drift, self._drift)


class UnitReduceScatter(PlainAllocation):
    """The custom reduce-scatter of one FSDP unit.

    Attributes:
        sums: How; None: torch's own.
    """

    def __init__(self, owner: MeasuredReduceScatter, number: int) -> None:
        self._owner, self._number = owner, number
        self.sums: CompressedReduceScatter | None = None
        self._ready: TimingEvent | None = None

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocate memory for gradients, which are ready at the first call of a reduction."""
        self._ready = self._ready or TimingEvent(device)
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        begin = TimingEvent(input_tensor.device)
        if self.sums is None:
            reduce_scatter_tensor(output_tensor, input_tensor, op, group)
        else:
            self.sums(output_tensor, input_tensor, group, op)
        end = TimingEvent(input_tensor.device)
        ready, self._ready = self._ready or begin, None
        self._owner.note(self._number, ready, begin, end)

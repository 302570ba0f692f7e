"""The search for a placement: which roles share devices, how many these are, how each model is cut,
and which settings make it fit.

HybridFlow's Algorithm 1 (Sheng et al., EuroSys 2025): all set partitions of the roles, all numbers
of devices for the sets, the best cut of each model; memory is the first cut, a replay of the steps
the judge. It finds what going through all of them finds, by bounds: a way to place the roles takes
at least what the quickest cut of each would take if it fitted, so those that seem quickest are
looked at first, until none is left that could be among the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import product
from typing import Any, NamedTuple

from hybridrl.planner.search.memory_states import (
    MemoryState,
    prune_memory_states,
    sum_by_flow_stage,
)
from hybridrl.planner.search.placement_space import (
    PlacementShape,
    list_device_ranges,
    list_shapes,
    list_split_points,
)
from hybridrl.planner.search.planned_costs import PlannedSearchCosts
from hybridrl.planner.search.search_terms import (
    CutOption,
    FoundPlacement,
    SearchObjective,
    SearchReport,
    SettingChanges,
)
from hybridrl.planner.step.step_calls import PlannedCall
from hybridrl.planner.step.step_time import STEP_FLOW, SteadyStateReplay

_SHOWN_PLACEMENTS = 5


class _Way(NamedTuple):
    """A candidate placement with a lower bound of its value."""

    bound: tuple[float, ...]
    number: int
    shape: PlacementShape
    variant: int
    devices: tuple[range, ...]


def search_placements(
    costs: PlannedSearchCosts,
    objective: SearchObjective | None = None,
    *,
    deadline_s: float = 60.0,
    accept: Callable[[FoundPlacement], bool] = lambda found: True,
    among: Sequence[PlacementShape] | None = None,
) -> SearchReport:
    """Find the best placements of the roles, one for each shape.

    Args:
        deadline_s: Seconds after which the best so far is given.
        accept: Asked of each that would be among the best: whether a job would start so.
        among: Shapes to look at; None: all that there are.
    """
    if among is None:
        among = list(list_shapes(costs.roles, costs.learning, costs.separable))
    until = time.monotonic() + deadline_s
    return _Search(costs, objective or SearchObjective(), until, accept, among).run()


@dataclass
class _Search:
    costs: PlannedSearchCosts
    objective: SearchObjective
    until: float
    accept: Callable[[FoundPlacement], bool]
    among: Sequence[PlacementShape]
    _least: dict[Any, tuple[float, ...] | None] = field(default_factory=dict)
    _fronts: dict[Any, tuple[list[tuple[CutOption, ...]], float]] = field(default_factory=dict)
    _best: dict[PlacementShape, FoundPlacement] = field(default_factory=dict)

    def run(self) -> SearchReport:
        report, begin = SearchReport(), time.monotonic()
        ways = self._ways()
        report.ways = len(ways) * len(self.costs.variants)
        report.complete = time.monotonic() <= self.until  # else there may be more of them
        heapify(ways)
        while ways:
            way = heappop(ways)
            limit = self._limit()
            if limit is not None and way.bound >= limit:
                break
            if time.monotonic() > self.until:
                report.complete = False
                break
            best = self._best.get(way.shape)
            if best is not None and way.bound >= best.value:
                continue
            report.looked_at += 1
            lacks = self._judge(way)
            if lacks is not None:
                known = report.misfits.get(way.shape, lacks)
                report.misfits[way.shape] = min(known, lacks)
            if way.variant == 0:
                self._push_variants(way, ways)
        best_first = sorted(self._best.values(), key=lambda found: found.value)
        report.best = best_first[:_SHOWN_PLACEMENTS]
        for shape in self._best:
            report.misfits.pop(shape, None)
        report.seconds = time.monotonic() - begin
        return report

    def _push_variants(self, way: _Way, ways: list[_Way]) -> None:
        """Add the same placement with other settings, which are never faster, while they can beat
        what was found."""
        best = self._best.get(way.shape)
        if best is not None and way.bound >= best.value:
            return
        for number, variant in enumerate(self.costs.variants[1:], 1):
            if (bound := self._bound(way.shape, variant, way.devices)) is not None:
                heappush(ways, way._replace(bound=bound, variant=number))

    def _limit(self) -> tuple[float, ...] | None:
        """Return the value that a candidate must be below to be shown; None while any would be."""
        values = sorted(found.value for found in self._best.values())
        return values[_SHOWN_PLACEMENTS - 1] if len(values) >= _SHOWN_PLACEMENTS else None

    def _ways(self) -> list[_Way]:
        found: list[_Way] = []
        totals = list_split_points(self.costs.devices)[1:]
        for total in totals if self.objective.with_fewer else totals[-1:]:
            borders = list_split_points(total)
            for shape in self.among:
                for parts in list_device_ranges(borders, len(shape.sets), self.costs.differ):
                    bound = self._bound(shape, self.costs.variants[0], parts)
                    if bound is not None:
                        found.append(_Way(bound, len(found), shape, 0, tuple(parts)))
                if time.monotonic() > self.until:
                    return found
        return found

    def _bound(
        self, shape: PlacementShape, variant: SettingChanges, parts: Sequence[range]
    ) -> tuple[float, ...] | None:
        """Return a lower bound of the value of a placement; None if a role cannot be cut over its
        devices."""
        total = sum(map(len, parts))
        placed = [(shape.everywhere, range(total)), *zip(shape.sets, parts, strict=True)]
        sums: list[list[float]] = []
        for roles, devices in placed:
            least = [self._least_of(shape, variant, role, devices) for role in roles]
            known = [seconds for seconds in least if seconds is not None]
            if len(known) < len(least):
                return None
            sums.append([sum(stage) for stage in zip(*known, [0.0] * len(STEP_FLOW), strict=True)])
        common, *of_sets = sums
        if self._staleness(shape):
            seconds = max(sum(of_set) + sum(common) for of_set in of_sets)
        else:
            seconds = sum(common) + sum(max(stage) for stage in zip(*of_sets, strict=True))
        return self.objective.of(seconds, total)

    def _staleness(self, shape: PlacementShape) -> int:
        return self.costs.staleness if shape.is_separated else 0

    def _least_of(
        self, shape: PlacementShape, variant: SettingChanges, role: str, devices: range
    ) -> tuple[float, ...] | None:
        """Return, by stage of the flow, the seconds of a role's fastest cut; None if it has
        none."""
        key = variant, shape.is_separated, role, devices
        if key not in self._least:
            own = self._calls_of(shape, role)
            self._least[key] = None
            if options := self.costs.options(*key):
                stages = [sum_by_flow_stage(own, option.seconds) for option in options]
                self._least[key] = tuple(min(times) for times in zip(*stages, strict=True))
        return self._least[key]

    def _calls_of(self, shape: PlacementShape, role: str) -> list[PlannedCall]:
        return [call for call in self.costs.calls(shape.is_separated) if call.role == role]

    def _judge(self, way: _Way) -> float | None:
        """Evaluate a candidate and record its best cuts if they are the best of its shape; return
        the memory needed over the memory available if nothing fits."""
        shape, variant = way.shape, self.costs.variants[way.variant]
        total = sum(len(devices) for devices in way.devices)
        calls = self.costs.calls(shape.is_separated)
        where = {role: range(total) for role in shape.everywhere}
        for roles, devices in zip(shape.sets, way.devices, strict=True):
            where |= dict.fromkeys(roles, devices)
        of_everywhere = [
            self.costs.options(variant, shape.is_separated, role, range(total))
            for role in shape.everywhere
        ]
        lacks, fits = math.inf, False
        for base in product(*of_everywhere):
            of_sets = [
                self._front(way, base, roles, devices)
                for roles, devices in zip(shape.sets, way.devices, strict=True)
            ]
            lacks = min(lacks, max(least for _, least in of_sets))
            for chosen in product(*(front for front, _ in of_sets)):
                fits = True
                cuts = dict(zip(shape.everywhere, base, strict=True))
                for roles, options in zip(shape.sets, chosen, strict=True):
                    cuts |= zip(roles, options, strict=True)
                self._note(way, calls, where, cuts, total)
        return None if fits else lacks

    def _note(
        self,
        way: _Way,
        calls: Sequence[PlannedCall],
        where: Mapping[str, range],
        cuts: Mapping[str, CutOption],
        total: int,
    ) -> None:
        rest = {role: iter(option.seconds) for role, option in cuts.items()}
        timed = [(call, next(rest[call.role])) for call in calls if call.role in rest]
        steps = SteadyStateReplay(timed, where, self._staleness(way.shape))
        value = self.objective.of(steps.seconds, total)
        before = self._best.get(way.shape)
        limit = self._limit() if before is None else before.value
        if limit is not None and value >= limit:
            return
        found = FoundPlacement(
            value,
            steps.seconds,
            way.shape,
            self.costs.variants[way.variant],
            dict(where),
            {role: option.cut for role, option in cuts.items()},
        )
        if self.accept(found):
            self._best[way.shape] = found

    def _front(
        self, way: _Way, base: tuple[CutOption, ...], roles: tuple[str, ...], devices: range
    ) -> tuple[list[tuple[CutOption, ...]], float]:
        """List the combinations of cuts of a set's models that fit its devices and that no other
        one dominates; return also how full the leanest is."""
        shape, variant = way.shape, self.costs.variants[way.variant]
        apart = shape.is_separated
        key = way.variant, apart, shape.everywhere, tuple(map(id, base)), roles, devices
        if key not in self._fronts:
            per_role = [self.costs.options(variant, apart, role, devices) for role in roles]
            process = self.costs.process(apart, (*shape.everywhere, *roles))
            room = self.costs.capacities(devices)
            start = MemoryState.of(room, process, self.costs.offloads(variant))
            for option in base:
                start = start.with_option(option, ())
            states = [start]
            for role, options in zip(roles, per_role, strict=True):
                own = self._calls_of(shape, role)
                states = prune_memory_states(
                    [
                        # Of roles that share all of their devices with the same others, only what
                        # they take together in each stage of the flow counts.
                        state.with_option(option, sum_by_flow_stage(own, option.seconds))
                        if not base
                        else state.with_option(option, option.seconds, apart=True)
                        for state in states
                        for option in options
                    ],
                    room,
                )
            leanest = start
            for options in per_role:
                leanest = leanest.with_option(min(options, key=lambda option: option.peak), ())
            found = [state.chosen[len(base) :] for state in states]
            self._fronts[key] = found, leanest.full(room)
        return self._fronts[key]

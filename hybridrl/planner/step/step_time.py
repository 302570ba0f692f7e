"""The time that a step will last: its calls in the order in which a driver makes them, each on the
devices of its role, replayed for several steps.

A call begins when its devices are free and its inputs are there. So roles on the same devices take
turns, others overlap, and with separation the next samples are generated while the last are
learned, as far as `placement.staleness` lets them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from hybridrl.parallel.reduction_choice import ReductionChoice
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.step.call_time import CallTimeEstimator
from hybridrl.planner.step.graph_replay import ReplayResult, WorkGraph, WorkNode, replay_graph
from hybridrl.planner.step.step_calls import PlannedCall

if TYPE_CHECKING:
    from hybridrl.planner.job_roles import JobRoles


@dataclass(frozen=True)
class TimeEstimate:
    """The estimated time of a step and of its calls.

    Attributes:
        calls: Each call of the step with its seconds.
        step: Seconds from one step's end to the next one's.
        idle: Shares of the time of all devices in which they do nothing, by what they wait for,
            the largest first.
        source: Where the rates are from.
        sums: How roles that learn sum the gradients of each unit (of the slowest stage).
    """

    calls: Sequence[tuple[PlannedCall, float]]
    step: float
    idle: Mapping[str, float]
    source: str
    sums: Mapping[str, ReductionChoice] = field(default_factory=dict)

    @property
    def phases(self) -> Mapping[tuple[str, str], float]:
        """Return the seconds by role and phase."""
        found: defaultdict[tuple[str, str], float] = defaultdict(float)
        for call, seconds in self.calls:
            found[call.role, call.phase] += seconds
        return dict(found)

    @property
    def idle_share(self) -> float:
        """Return the share of the time of all devices in which they are idle."""
        return sum(self.idle.values())

    @property
    def overlap(self) -> float:
        """Return the share of the work that runs beside other work."""
        together = sum(seconds for _, seconds in self.calls)
        return max(0.0, 1 - self.step / together) if together else 0.0


def estimate_step_time(planner: JobRoles, rates: Sequence[DeviceRates]) -> TimeEstimate:
    """Estimate the time of a step and of its calls, by the rates of each device."""
    devices = {role: place.devices for role, place in planner.placement.roles.items()}
    clocks = {
        role: CallTimeEstimator(planner, DeviceRates.of_slowest(rates[d] for d in numbers))
        for role, numbers in devices.items()
    }
    calls = [(call, clocks[call.role].seconds(call)) for call in planner.calls]
    sums = {role: choice for clock in clocks.values() for role, choice in clock.sums.items()}
    staleness = planner.config.placement.staleness if planner.placement.is_separated else 0
    steps = SteadyStateReplay(calls, devices, staleness)
    return TimeEstimate(calls, steps.seconds, steps.idle, rates[0].source, sums)


STEP_FLOW = (
    (("sync", "generate"), "weights", "samples"),
    (("score",), "samples", "scores"),
    (("train",), "scores", "step"),
)
"""Phases, what they need and what they make."""
STEPS = 6
"""Simulated, so that what overlaps from step to step is in its steady state."""


class SteadyStateReplay:
    """A replay of several planned steps in a row, the last of which are in steady state.

    Devices on which the same roles live do the same, and are one place of the graph.

    Args:
        calls: In order, with their seconds.
        devices: Of each role.
        staleness: So many steps old the weights may be with which samples are generated.
    """

    def __init__(
        self,
        calls: Sequence[tuple[PlannedCall, float]],
        devices: Mapping[str, Sequence[int]],
        staleness: int = 0,
    ) -> None:
        roles_of: defaultdict[int, list[str]] = defaultdict(list)
        for role, numbers in devices.items():
            for number in numbers:
                roles_of[number].append(role)
        alike: dict[tuple[str, ...], int] = {}
        self._counts: dict[int, int] = defaultdict(int)
        places: defaultdict[str, dict[int, None]] = defaultdict(dict)
        for here in roles_of.values():
            place = alike.setdefault(tuple(here), len(alike))
            self._counts[place] += 1
            for role in here:
                places[role][place] = None
        nodes: list[WorkNode] = []
        ends: list[int] = []
        made = 0
        for step in range(STEPS + staleness):
            before = () if step <= staleness else (ends[step - staleness - 1],)
            done = {"weights": before, "samples": before, "scores": (), "step": ()}
            for phases, needs, makes in STEP_FLOW:
                rests = [*done[needs], *done[makes]]
                for call, seconds in calls:
                    if call.phase not in phases:
                        continue
                    made += 1
                    for rank, place in enumerate(places[call.role]):
                        rests.append(len(nodes))
                        nodes.append(
                            WorkNode(
                                call.role,
                                call.phase,
                                step,
                                rank,
                                seconds,
                                place,
                                done[needs],
                                together=made,
                            )
                        )
                done[makes] = (len(nodes),)
                nodes.append(WorkNode("driver", makes, step, 0, 0.0, after=tuple(rests)))
            ends.append(len(nodes) - 1)
        self._last, self._before = ends[-1], ends[-2]
        self._graph = WorkGraph(nodes, [", ".join(names) for names in alike])

    @cached_property
    def replayed(self) -> ReplayResult:
        """Return the replay of all simulated steps."""
        return replay_graph(self._graph)

    @property
    def seconds(self) -> float:
        """Return the seconds between the ends of the last two steps."""
        return self.replayed.ends[self._last] - self.replayed.ends[self._before]

    @property
    def idle(self) -> dict[str, float]:
        """Return the shares of the time of all devices in which they are idle, by what they wait
        for, the largest first."""
        replayed, found = self.replayed, defaultdict[str, float](float)
        whole = (replayed.makespan or 1.0) * max(1, sum(self._counts.values()))
        for place, causes in replayed.idle.items():
            for cause, seconds in causes.items():
                found[cause] += seconds * self._counts[place] / whole
        return dict(sorted(found.items(), key=lambda one: -one[1]))

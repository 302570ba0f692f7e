"""How long a step will last: its calls, put together along the placement by `step_graph`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hybridrl.parallel.reduction_choice import Choice
from hybridrl.planner.machine.device_rates import Rates
from hybridrl.planner.step.call_time import CallClock
from hybridrl.planner.step.step_calls import Call
from hybridrl.planner.step.step_graph import SteadySteps

if TYPE_CHECKING:
    from hybridrl.planner.job_roles import Planner


@dataclass(frozen=True)
class Times:
    """Of one step.

    Attributes:
        calls: Each call of the step with its seconds.
        step: Seconds from one step's end to the next one's.
        idle: Shares of the time of all devices in which they do nothing, by what they wait for,
            the largest first.
        source: Where the rates are from.
        sums: How roles that learn sum the gradients of each unit (of the slowest stage).
    """

    calls: Sequence[tuple[Call, float]]
    step: float
    idle: Mapping[str, float]
    source: str
    sums: Mapping[str, Choice] = field(default_factory=dict)

    @property
    def phases(self) -> Mapping[tuple[str, str], float]:
        """Seconds by role and phase."""
        found: defaultdict[tuple[str, str], float] = defaultdict(float)
        for call, seconds in self.calls:
            found[call.role, call.phase] += seconds
        return dict(found)

    @property
    def idle_share(self) -> float:
        """Of the time of all devices, that in which they do nothing."""
        return sum(self.idle.values())

    @property
    def overlap(self) -> float:
        """Share of the work that is done beside other work."""
        together = sum(seconds for _, seconds in self.calls)
        return max(0.0, 1 - self.step / together) if together else 0.0


def estimate(planner: Planner, rates: Rates | Sequence[Rates]) -> Times:
    """The time of a step, and of its calls.

    Args:
        rates: Of every device, or of each.
    """
    each = rates if isinstance(rates, Sequence) else [rates] * len(planner.cluster.devices)
    devices = {role: place.devices for role, place in planner.placement.roles.items()}
    clocks = {
        role: CallClock(planner, Rates.of_slowest(each[device] for device in numbers))
        for role, numbers in devices.items()
    }
    calls = [(call, clocks[call.role].seconds(call)) for call in planner.calls]
    sums = {role: choice for clock in clocks.values() for role, choice in clock.sums.items()}
    staleness = planner.config.placement.staleness if planner.placement.is_separated else 0
    steps = SteadySteps(calls, devices, staleness)
    return Times(calls, steps.seconds, steps.idle, each[0].source, sums)

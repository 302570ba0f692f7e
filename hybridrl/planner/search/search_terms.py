"""The terms of a search for a placement: cuts to choose from, objectives, placements found, and the
report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybridrl.planner.search.placement_space import PlacementShape

SettingChanges = tuple[tuple[str, Any], ...]


class RoleBytes(NamedTuple):
    """The bytes that a role takes of a device; see `RoleMemory`.

    Attributes:
        working: By phase.
    """

    resident: float
    loaded: float
    awake: float
    working: tuple[float, ...]


class CutOption(NamedTuple):
    """A way to cut a role's model over some devices, with its time and memory.

    Attributes:
        cut: What it is called in a plan; opaque here.
        seconds: Of each of its calls, in the order of calls.
        taken: Of a device, by its model.
    """

    cut: Any
    seconds: tuple[float, ...]
    taken: Mapping[str, RoleBytes]

    @property
    def peak(self) -> float:
        """Return the bytes at the peak of the role alone, on the device that it fills most."""
        return max(
            max(taken.loaded + taken.awake, taken.resident + max(taken.working, default=0.0))
            for taken in self.taken.values()
        )


class FoundPlacement(NamedTuple):
    """A placement of all roles that a search has found, with the cut of each model.

    Attributes:
        value: What is to be small; see `SearchObjective`.
        step: Seconds.
        where: Devices of each role.
        cuts: Of each role.
    """

    value: tuple[float, ...]
    step: float
    shape: PlacementShape
    variant: SettingChanges
    where: Mapping[str, range]
    cuts: Mapping[str, Any]


@dataclass(frozen=True)
class SearchObjective:
    """A value of a placement that a search minimizes.

    Attributes:
        of: `(seconds of a step, devices) -> value`.
        with_fewer: Whether fewer devices than there are can be better.
    """

    of: Callable[[float, int], tuple[float, ...]] = lambda step, devices: (step,)
    with_fewer: bool = False


@dataclass
class SearchReport:
    """A report of a search: the best placements, and how many were evaluated.

    Attributes:
        best: Of each of the best shapes its best, in order.
        looked_at: Ways to place the roles that were judged, of `ways` that there are.
        misfits: Shapes of which no way that was looked at fits, with the least that lacks there:
            bytes needed over bytes there are.
        complete: Whether nothing better can be left; else the time was over.
        seconds: That it took.
    """

    best: list[FoundPlacement] = field(default_factory=list)
    looked_at: int = 0
    ways: int = 0
    misfits: dict[PlacementShape, float] = field(default_factory=dict)
    complete: bool = True
    seconds: float = 0.0

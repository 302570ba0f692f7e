"""Combinations of roles on the devices that they share, without those cuts and combinations than
which another one is better in every respect."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import le
from typing import NamedTuple, TypeVar

from hybridrl.planner.search.search_terms import CutOption
from hybridrl.planner.step.step_calls import PlannedCall
from hybridrl.planner.step.step_time import STEP_FLOW


class MemoryState(NamedTuple):
    """A combination of roles on some devices, with its time and memory. All of its numbers only
    grow as roles are added.

    Attributes:
        seconds: By stage of the flow, or call by call.
        memory: Of each kind of device: what is there between calls; the most that a phase adds to
            it; what is built; the most while it is built; the most of a role alone.
    """

    seconds: tuple[float, ...]
    memory: tuple[tuple[str, float, float, float, float, float], ...]
    chosen: tuple[CutOption, ...]
    process: float
    offloads: bool

    @classmethod
    def of(cls, kinds: Iterable[str], process: float, offloads: bool) -> MemoryState:
        """Return the state without roles."""
        memory = tuple((kind, process, 0.0, process, 0.0, process) for kind in kinds)
        return cls((), memory, (), process, offloads)

    def with_option(
        self, option: CutOption, seconds: Sequence[float], apart: bool = False
    ) -> MemoryState:
        """Return the state with one more role.

        Args:
            apart: Its seconds count beside the others', not in their sum.
        """
        together = (*self.seconds, *seconds)
        if not apart and self.seconds and seconds:
            together = tuple(a + b for a, b in zip(self.seconds, seconds, strict=True))
        memory = []
        for kind, resident, most, built, loading, alone in self.memory:
            taken = option.taken[kind]
            works = max(taken.working, default=-math.inf)
            built += taken.loaded
            if taken.loaded or taken.awake:
                loading = max(loading, built + taken.awake)
            alone = max(alone, self.process + taken.resident + works)
            memory.append(
                (kind, resident + taken.resident, max(most, works), built, loading, alone)
            )
        chosen = (*self.chosen, option)
        return self._replace(seconds=together, memory=tuple(memory), chosen=chosen)

    @property
    def numbers(self) -> tuple[float, ...]:
        """Return all numbers, in which states are compared."""
        return (*self.seconds, *(number for one in self.memory for number in one[1:]))

    def full(self, room: Mapping[str, float]) -> float:
        """Return the bytes needed over the bytes available, at the fullest moment of the fullest
        device: while roles are built, one after the other, and while each works, beside the others
        or (`offloads`) without them."""
        return max(
            max(loading, alone if self.offloads else resident + most) / room[kind]
            for kind, resident, most, _, loading, alone in self.memory
        )


def prune_memory_states(
    states: Sequence[MemoryState], room: Mapping[str, float]
) -> list[MemoryState]:
    """Return the states that fit and that no other state dominates."""
    fitting = [state for state in states if state.full(room) <= 1]
    return _keep_undominated(fitting, lambda state: state.numbers)


def sum_by_flow_stage(calls: Sequence[PlannedCall], seconds: Sequence[float]) -> list[float]:
    """Sum the seconds of calls by stage of the flow."""
    found: defaultdict[str, float] = defaultdict(float)
    for call, taken in zip(calls, seconds, strict=True):
        found[call.phase] += taken
    return [sum(found[phase] for phase in phases) for phases, _, _ in STEP_FLOW]


def prune_options(options: Sequence[CutOption]) -> list[CutOption]:
    """Return the options that no other one dominates, in the time of each call and in memory."""

    def numbers(option: CutOption) -> tuple[float, ...]:
        taken = [(t.resident, t.loaded, t.awake, *t.working) for t in option.taken.values()]
        return (*option.seconds, *(number for one in taken for number in one))

    return _keep_undominated(options, numbers)


_T = TypeVar("_T")


def _keep_undominated(
    several: Iterable[_T], numbers: Callable[[_T], tuple[float, ...]]
) -> list[_T]:
    """Return those that no other one is as good as in all of their numbers."""
    kept: list[tuple[tuple[float, ...], _T]] = []
    # Whoever is better in everything comes first.
    for own, _, one in sorted((numbers(one), n, one) for n, one in enumerate(several)):
        if not any(all(map(le, known, own)) for known, _ in kept):
            kept.append((own, one))
    return [one for _, one in kept]

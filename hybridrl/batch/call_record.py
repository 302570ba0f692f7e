"""The record of one call on one rank, from which metrics, console and timeline are made."""

from __future__ import annotations

import math
import numbers
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hybridrl.errors import ConfigError

IN_WEIGHT, IN_COLUMN, IN_LOSS, IN_GRADIENT = range(4)
"""Where a number that is not finite may be: in a weight, in a column of a batch, in its loss, in
the gradient of a weight."""
DRIVER_ROLE = "driver"
"""In place of a role: what the driver does itself, and functions that it applies."""


class NonFiniteValue(NamedTuple):
    """The first non-finite number that a rank found, and where.

    Attributes:
        order: `IN_WEIGHT`, `IN_COLUMN`, `IN_LOSS` or `IN_GRADIENT`: what comes earlier in an update
            is the likelier cause.
        where: For people.
    """

    order: int
    where: str


class PhaseSpan(NamedTuple):
    """An uninterrupted phase inside a call.

    Attributes:
        start, end: Seconds since the epoch, by the clock of the rank's host.
        waited: Of these seconds, those in which it waited for other ranks.
    """

    phase: str
    start: float
    end: float
    waited: float = 0.0


_MERGE_GAP_SECONDS = 1e-3
"""A phase that comes again sooner than that has not been left."""


@dataclass
class CallRecord:
    """The record of a call on one rank.

    Attributes:
        start, end: Seconds since the epoch; a call starts when its inputs are there.
        phases: Seconds by phase name; the known ones are `generate`, `score`, `train`, `sync`.
        spans: When each of them was, in the order of their ends.
        peaks: By phase name, bytes of the device in use at its fullest moment.
        phase: The one that it is in now.
        progress: When a part of the work was last seen done, of the monotonic clock; 0: not yet.
        waited: Of its seconds, those in which it waited for other ranks; None: nobody knows, as of
            operations that are only queued on a GPU.
        tokens: Of prompts and responses, in the rows that it was given and those that it made.
        stage: The rank's in a pipeline: another one has other work.
        faults: Numbers in it that were not finite.
        notices: What failed in it that the settings let pass, for people.
        remarks: What people should know of it besides.
        choices: What it decided by measuring, for people.
        metrics: Figures that the worker reported; they add up over ranks and calls, but of those
            named `*_max` the largest counts.
        beside: Whether it ran on its host's second thread, beside the calls of other roles.
        loads: By phase name, what it took of the cores (see `hybridrl.system.core_pins`); empty
            unless `resources=auto`.
        call, host, reads: The number of the call, in the order in which the driver made them, the
            number of the device that it ran on, and the calls whose results it was given; the
            driver adds them.
    """

    role: str
    rank: int
    method: str
    start: float = 0.0
    end: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    spans: list[PhaseSpan] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    phase: str = ""
    progress: float = 0.0
    waited: float | None = None
    tokens: int = 0
    stage: int = 0
    beside: bool = False
    faults: list[NonFiniteValue] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    loads: dict[str, dict[str, float]] = field(default_factory=dict)
    call: int = 0
    host: int = -1
    reads: tuple[int, ...] = ()

    def add_span(self, span: PhaseSpan) -> None:
        """Add a phase that has just ended, merged with the last span if it continues it."""
        if self.spans:
            last = self.spans[-1]
            if last.phase == span.phase and 0 <= span.start - last.end < _MERGE_GAP_SECONDS:
                waited = last.waited + span.waited
                self.spans[-1] = PhaseSpan(last.phase, last.start, span.end, waited)
                return
        self.spans.append(span)


LONGEST_NAME = 250
"""Characters of a figure's name, which trackers take too."""
MOST_TOLD = 20


def number_of(value: Any) -> float | None:
    """Return a number, or an array of one, as a float. Infinities are NaN, since neither files nor
    trackers take them. None: it is no number that a float can hold."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    try:
        found = float(value) if isinstance(value, numbers.Real) else None
    except OverflowError:
        return None
    return found if found is None or math.isfinite(found) else math.nan


def fault_of_name(name: Any) -> str:
    """Return why this cannot be a figure's name, as the end of a sentence; empty: it can."""
    if not isinstance(name, str):
        return f"whose name is a {type(name).__name__}, not a text"
    if not 0 < len(name) <= LONGEST_NAME:
        return f"whose name has {len(name):,} characters, and 1 to {LONGEST_NAME} are allowed"
    return "" if name.isprintable() else "whose name has characters that cannot be printed"


class FigureCheck:
    """A filter of what others report as figures. Nothing is learned from figures, so one that
    cannot be written costs a sentence, once, and not the steps of a run.

    Args:
        say: Told of each that is left out.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told: set[tuple[str, str]] = set()

    def figures(self, found: Mapping[Any, Any], who: str) -> dict[str, float]:
        """Return those that are named numbers.

        Args:
            who: Reported them, for people.

        Raises:
            ConfigError: if it is no mapping.
        """
        if not isinstance(found, Mapping):
            raise ConfigError(
                f"{who} gave a {type(found).__name__}: it must be a dictionary of names and "
                "numbers."
            )
        kept: dict[str, float] = {}
        for name, value in found.items():
            number = value if type(value) is float and math.isfinite(value) else number_of(value)
            fault = fault_of_name(name)
            if number is None and not fault:
                too_large = isinstance(value, numbers.Real)
                kind = type(value).__name__
                fault = f"which is {'too large' if too_large else 'not a number'} ({kind})"
            if fault:
                self._tell(who, name, fault)
            elif number is not None:
                kept[name] = number
        return kept

    def _tell(self, who: str, name: Any, fault: str) -> None:
        shown = repr(name)[:80] if isinstance(name, str) else "..."
        if (who, shown) not in self._told and len(self._told) < MOST_TOLD:
            self._told.add((who, shown))
            self._say(f"{who} reported the metric {shown}, {fault}: it is left out.")

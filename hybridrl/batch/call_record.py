"""What one rank did in one call: the raw material of metrics, console and timeline."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

WEIGHT, COLUMN, LOSS, GRADIENT = range(4)
"""Where a number that is not finite may be: in a weight, in a column of a batch, in its loss, in
the gradient of a weight."""


class Fault(NamedTuple):
    """Where a rank first saw a number that is not finite.

    Attributes:
        order: `WEIGHT`, `COLUMN`, `LOSS` or `GRADIENT`: what comes earlier in an update is the
            likelier cause.
        where: For people.
    """

    order: int
    where: str


class Span(NamedTuple):
    """A phase inside a call, for as long as it went on without a break.

    Attributes:
        start, end: Seconds since the epoch, by the clock of the rank's host.
        waited: Of these seconds, those in which it waited for other ranks.
    """

    phase: str
    start: float
    end: float
    waited: float = 0.0


BREAK_SECONDS = 1e-3
"""A phase that comes again sooner than that has not been left."""


@dataclass
class Record:
    """A call as one rank saw it.

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
        notices: What went wrong in it that the settings let pass, for people.
        choices: What it decided by measuring, for people.
        metrics: Figures that the worker reported; they add up over ranks and calls, but of those
            named `*_max` the largest counts.
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
    spans: list[Span] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    phase: str = ""
    progress: float = 0.0
    waited: float | None = None
    tokens: int = 0
    stage: int = 0
    faults: list[Fault] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    choices: list[str] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    call: int = 0
    host: int = -1
    reads: tuple[int, ...] = ()

    def add_span(self, span: Span) -> None:
        """Notes a phase that has just ended."""
        if self.spans:
            last = self.spans[-1]
            if last.phase == span.phase and 0 <= span.start - last.end < BREAK_SECONDS:
                waited = last.waited + span.waited
                self.spans[-1] = Span(last.phase, last.start, span.end, waited)
                return
        self.spans.append(span)

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


@dataclass
class Record:
    """A call as one rank saw it.

    Attributes:
        start, end: Seconds since the epoch; a call starts when its inputs are there.
        phases: Seconds by phase name; the known ones are `generate`, `score`, `train`, `sync`.
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
    """

    role: str
    rank: int
    method: str
    start: float = 0.0
    end: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: defaultdict(float))
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

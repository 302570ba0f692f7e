"""What one rank did in one call: the raw material of metrics, console and timeline."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field


@dataclass
class Record:
    """A call as one rank saw it.

    Attributes:
        start, end: Seconds since the epoch; a call starts when its inputs are there.
        phases: Seconds by phase name; the known ones are `generate`, `score`, `train`, `sync`.
        peaks: By phase name, bytes of the device in use at its fullest moment.
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
    metrics: dict[str, float] = field(default_factory=dict)

"""What a run does beside the calls of its steps: devices may have waited for it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hybridrl.batch.call_record import Record, Span

DATA, EVALUATION, CHECKPOINT, KEEPING = "data", "evaluation", "checkpoint", "keeping"
"""What the driver may be at."""


class BesideSteps:
    """That of a run, until a step takes it into its own record."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._records: list[Record] = []

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """While the driver is at it."""
        begin = time.time()
        try:
            yield
        finally:
            self._spans.append(Span(what, begin, time.time()))

    def called(self, records: Sequence[Record]) -> Sequence[Record]:
        """Notes calls that belong to no step; returns them."""
        self._records += records
        return records

    def take(self) -> tuple[list[Record], list[Span]]:
        """Everything since this was asked last."""
        taken = self._records, self._spans
        self._records, self._spans = [], []
        return taken

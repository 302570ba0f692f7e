"""When a step is saved: as often as settings say, or as is worth its cost."""

from __future__ import annotations

import math
import time

from hybridrl.config.schema import CheckpointConfig

_BETWEEN_FAILURES = 50_000 * 3600.0
"""Seconds that one device works until the job is interrupted: 16,384 of them were 419 times in 54
days (The Llama 3 Herd of Models, 2024, section 3.3.4)."""


class SaveSchedule:
    """The schedule of one run, from its settings and from the measured cost of its checkpoints.

    Args:
        devices: How many of them may fail.
    """

    def __init__(self, settings: CheckpointConfig, devices: int) -> None:
        self._settings, self._is_wanted = settings, settings.wanted
        self._between_failures = _BETWEEN_FAILURES / devices
        self._begun_at = time.monotonic()
        self._stall: float | None = None
        self._has_begun = False

    def is_due(self, step: int, last: int) -> bool:
        """Return whether this step is saved; the last one always is."""
        settings = self._settings
        passed, minutes = time.monotonic() - self._begun_at, settings.every_minutes
        return self._is_wanted and (
            step == last
            or bool(settings.every and step % settings.every == 0)
            or (self._is_worth_it(passed) if minutes is None else 0 < 60 * minutes <= passed)
        )

    def begins(self) -> None:
        """Record that a checkpoint was started."""
        self._begun_at, self._has_begun = time.monotonic(), True

    def ends(self, stall: float) -> None:
        """Record that a checkpoint is complete, and the seconds that training waited for it."""
        self._stall = stall

    def _is_worth_it(self, passed: float) -> bool:
        """Return whether the optimal interval has passed. The cost is known after the first
        checkpoint, which is saved at once."""
        if self._stall is None:
            return not self._has_begun
        return passed >= optimal_interval(self._stall, self._between_failures)


def optimal_interval(cost: float, between_failures: float) -> float:
    """Return the seconds between checkpoints that lose the least time to saving and to repeated
    work: Young's first-order interval with Daly's correction (J. T. Daly, "A higher order estimate
    of the optimum checkpoint interval for restart dumps", 2006, equation 37).

    Args:
        cost: Seconds that training waits for a checkpoint.
        between_failures: Seconds, in the mean.
    """
    if cost >= 2 * between_failures:
        return between_failures
    share = math.sqrt(cost / (2 * between_failures))
    return math.sqrt(2 * cost * between_failures) * (1 + share / 3 + share**2 / 9) - cost

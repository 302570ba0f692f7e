"""When a step is saved, however good it is."""

from __future__ import annotations

import math
import time

from hybridrl.config.schema import CheckpointConfig

MINUTE = 60.0
BETWEEN_FAILURES = 50_000 * 3600.0
"""Seconds that one device works until the job is interrupted: 16,384 of them were 419 times in 54
days (The Llama 3 Herd of Models, 2024, section 3.3.4)."""


class WhenToSave:
    """Of one run, by its settings and by what checkpoints were seen to cost.

    Args:
        devices: How many of them may fail.
    """

    def __init__(self, settings: CheckpointConfig, devices: int) -> None:
        self._settings = settings
        self._between_failures = BETWEEN_FAILURES / devices
        self._begun_at = time.monotonic()
        self._stall: float | None = None
        self._has_begun = False

    def is_due(self, step: int, last: int) -> bool:
        """Whether this step is to be saved; the last one always is."""
        settings = self._settings
        passed, minutes = time.monotonic() - self._begun_at, settings.every_minutes
        return settings.wanted and (
            step == last
            or bool(settings.every and step % settings.every == 0)
            or (self._is_worth_it(passed) if minutes is None else 0 < MINUTE * minutes <= passed)
        )

    def begins(self) -> None:
        """A step is being saved."""
        self._begun_at, self._has_begun = time.monotonic(), True

    def ends(self, stall: float) -> None:
        """It is saved, for which training has waited so many seconds."""
        self._stall = stall

    def _is_worth_it(self, passed: float) -> bool:
        """What a checkpoint costs is known when the first one is there."""
        if self._stall is None:
            return not self._has_begun
        return passed >= best_interval(self._stall, self._between_failures)


def best_interval(cost: float, between_failures: float) -> float:
    """Seconds from checkpoint to checkpoint with which least is lost, to saving and to work that is
    done again: Young's first-order answer with Daly's correction (J. T. Daly, "A higher order
    estimate of the optimum checkpoint interval for restart dumps", 2006, equation 37).

    Args:
        cost: Seconds that training waits for a checkpoint.
        between_failures: Seconds, in the mean.
    """
    if cost >= 2 * between_failures:
        return between_failures
    share = math.sqrt(cost / (2 * between_failures))
    return math.sqrt(2 * cost * between_failures) * (1 + share / 3 + share**2 / 9) - cost

"""When a step is saved, however good it is."""

from __future__ import annotations

import math
import time

from hybridrl.config.schema import CheckpointConfig

MINUTE, HOUR = 60.0, 3600.0


class WhenToSave:
    """Of one run, by its settings and by what checkpoints were seen to cost."""

    def __init__(self, settings: CheckpointConfig) -> None:
        self._settings = settings
        self._begun_at = time.monotonic()
        self._stall: float | None = None
        self._has_begun = False

    def is_due(self, step: int, last: int) -> bool:
        """Whether this step is to be saved; the last one always is."""
        settings = self._settings
        passed = time.monotonic() - self._begun_at
        return settings.wanted and (
            step == last
            or bool(settings.every and step % settings.every == 0)
            or 0 < MINUTE * settings.every_minutes <= passed
            or bool(settings.hours_between_failures and self._is_worth_it(passed))
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
        return passed >= best_interval(self._stall, HOUR * self._settings.hours_between_failures)


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

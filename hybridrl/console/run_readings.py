"""The newest metrics of a run for a console: latest values, history, remaining time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import pairwise

from hybridrl.console.phase_colors import STEP_PHASES

_BARS = "▁▂▃▄▅▆▇█"
_RECENT_STEPS = 20  # long enough to hold an evaluation now and then, short enough to follow


class RunReadings:
    """The metrics of all steps so far, of which a console asks what it shows.

    Args:
        total_steps: the step at which the run ends.
        clock: seconds, counting up.
        accuracy_name: what the metric `accuracy` is called.
    """

    def __init__(
        self,
        total_steps: int,
        clock: Callable[[], float] = time.monotonic,
        accuracy_name: str = "accuracy",
    ) -> None:
        self.total_steps = total_steps
        self.accuracy_name = accuracy_name
        self.current_step: int | None = None
        self.rewards: list[float] = []
        self.accuracy: float | None = None
        self.accuracy_step: int | None = None
        self._latest: dict[str, float] = {}
        self._clock = clock
        self._started = clock()
        self._last_end = self._started
        self._durations: deque[float] = deque(maxlen=_RECENT_STEPS)

    def record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of `step`; values that are not finite numbers count as missing."""
        latest: dict[str, float] = {}
        for key, value in metrics.items():
            number = _parse_finite(value)
            if number is not None:
                latest[key] = number
        now = self._clock()
        # Start-up lies before the first step's end, so that step's own time is used.
        duration = (
            now - self._last_end if self.current_step is not None else latest.get("time/step")
        )
        if duration is not None:
            self._durations.append(duration)
        self._last_end = now
        if "reward/mean" in latest:
            self.rewards.append(latest["reward/mean"])
        if "accuracy" in latest:
            self.accuracy = latest["accuracy"]
            self.accuracy_step = int(latest.get("accuracy/step", step))
        self._latest = latest
        self.current_step = step

    def value(self, key: str) -> float | None:
        """Return the metric of the last step; None if that step did not measure it."""
        return self._latest.get(key)

    def shares(self) -> dict[str, float]:
        """Return the last step's share of time by phase, with `other`; empty if not measured."""
        shares = {phase: self._latest.get(f"share/{phase}") for phase in STEP_PHASES[:-1]}
        known = {phase: max(0.0, share) for phase, share in shares.items() if share is not None}
        if known:
            known["other"] = max(0.0, 1.0 - sum(known.values()))
        return known

    def elapsed(self) -> float:
        """Return the seconds since this run began."""
        return self._clock() - self._started

    def seconds_left(self) -> float | None:
        """Return the mean time of recent steps times the remaining steps; None before the first
        step."""
        if self.current_step is None or not self._durations:
            return None
        mean = sum(self._durations) / len(self._durations)
        steps_left = max(0, self.total_steps - self.current_step)
        already = min(self._clock() - self._last_end, mean) if steps_left else 0.0
        return steps_left * mean - already


def render_sparkline(values: list[float], cells: int) -> str:
    """Render the whole history in at most `cells` characters, each the mean of a stretch of it."""
    values = values[:]  # the display's thread reads while the run's thread appends
    if not values or cells < 1:
        return ""
    count = min(cells, len(values))
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return _BARS[3] * count
    return "".join(_BARS[round((mean - low) / (high - low) * (len(_BARS) - 1))] for mean in means)


def format_clock_time(seconds: float | None) -> str:
    """Format seconds: 31 -> '00:31', 3723 -> '1:02:03', None -> '--:--'."""
    if seconds is None:
        return "--:--"
    whole = max(0, round(seconds))
    minutes, second = divmod(whole, 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute:02d}:{second:02d}"


def format_value(value: float | None, form: str) -> str:
    """Format `value` with a format such as `.3f`; '-' if it was not measured."""
    return "-" if value is None else format(value, form)


def _parse_finite(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None

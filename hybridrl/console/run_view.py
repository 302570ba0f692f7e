"""The interface between a run and the console that shows it, and the values that consoles show."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from rich.console import Console

from hybridrl.console.phase_colors import STEP_PHASES
from hybridrl.console.sample_table_text import ShownSample

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
        numbers = {key: _parse_finite(value) for key, value in metrics.items()}
        latest = {key: number for key, number in numbers.items() if number is not None}
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


class RunView(ABC):
    """A console. Use it in a `with`, so that an error restores the terminal.

    Args:
        clock: Seconds, counting up.
        accuracy: What the metric `accuracy` is called.
    """

    def __init__(
        self,
        total_steps: int,
        title: str,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        accuracy: str = "accuracy",
    ) -> None:
        self._readings = RunReadings(total_steps, clock, accuracy)
        self._title, self._console, self._clock = title, console, clock
        self._closed = False

    @abstractmethod
    def phase(self, text: str) -> None:
        """Start a phase, such as `starting 2 workers`; this ends the phase before it."""

    def expect_steps(self, total: int) -> None:
        """Set the number of steps, which is known only when the data is."""
        self._readings.total_steps = total

    @abstractmethod
    def phase_progress(self, done: int, total: int, note: str = "") -> None:
        """Show the progress of the current phase."""

    @abstractmethod
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step, the first being 1; this ends the current phase. Missing metrics are
        shown as '-'.

        Known keys: `reward/mean`, `accuracy` (greedy, of the evaluation set; kept until the next),
        `accuracy/step` (after which step that was; else this one),
        `response/length_mean`, `policy/kl`, `policy/entropy`, `throughput/tokens_per_second`,
        `mismatch/k3`, `time/step` and `share/<phase>`.
        """

    @abstractmethod
    def samples(self, prompt: str, completions: Sequence[ShownSample]) -> None:
        """Show samples of one prompt; any text is safe."""

    @abstractmethod
    def message(self, text: str) -> None:
        """Show lines that stay, above what is redrawn."""

    def close(self, final: str = "") -> None:
        """Stop, and print `final` as the last line. A second call has no effect."""
        if not self._closed:
            self._closed = True
            self._stop(final)

    @abstractmethod
    def _stop(self, final: str) -> None:
        """Stop, and print `final` if there is something in it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _parse_finite(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None

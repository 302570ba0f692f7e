"""A console that prints a line for each step, and how consoles write values."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from rich.console import Console
from rich.text import Text

from hybridrl.console.run_view import RunReadings, RunView
from hybridrl.console.safe_text import sanitize_line, sanitize_lines
from hybridrl.console.sample_table_text import ShownSample, format_sample_count, format_sample_table
from hybridrl.system.formatting import format_seconds
from hybridrl.system.redaction import escape_unencodable

_BARS = "▁▂▃▄▅▆▇█"


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


_PROGRESS_EVERY_S = 5.0
_SAMPLE_CELLS = 120
_PHASES_SHOWN = {"generate": "gen", "score": "score", "train": "train", "sync": "sync"}


class LineConsole(RunView):
    """A console that prints a line per step and never moves the cursor."""

    def __init__(
        self,
        total_steps: int,
        title: str,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
        accuracy: str = "accuracy",
    ) -> None:
        super().__init__(total_steps, title, console, clock, accuracy)
        self._phase = ""
        self._phase_began = 0.0
        self._progress_shown = 0.0
        if title:
            self._line(sanitize_line(title, 200))

    def phase(self, text: str) -> None:
        self._end_phase()
        self._phase = sanitize_line(text, 120)
        self._phase_began = self._progress_shown = self._clock()
        self._line(f"{self._phase} ...")

    def phase_progress(self, done: int, total: int, note: str = "") -> None:
        now = self._clock()
        if now - self._progress_shown >= _PROGRESS_EVERY_S or done >= total:
            self._progress_shown = now
            self._line(
                f"{self._phase} {done}/{total}" + (f" | {sanitize_line(note, 80)}" if note else "")
            )

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._end_phase()
        self._readings.record(step, metrics)
        self._line(format_step_line(self._readings))

    def samples(self, prompt: str, completions: Sequence[ShownSample]) -> None:
        self._line(
            f"  {format_sample_count(completions)} of: {sanitize_line(prompt, _SAMPLE_CELLS)}"
        )
        for line in format_sample_table(completions, _SAMPLE_CELLS):
            self._line(f"  {line}")

    def message(self, text: str) -> None:
        self._line(sanitize_lines(text))

    def _stop(self, final: str) -> None:
        if final:
            self._line(sanitize_lines(final))

    def _end_phase(self) -> None:
        seconds = self._clock() - self._phase_began
        if self._phase and seconds >= 1.0:  # a shorter one needs no second line
            self._line(f"{self._phase}: {format_seconds(seconds)}")
        self._phase = ""

    def _line(self, text: str) -> None:
        # soft_wrap: a log's reader wants whole lines, whatever width rich guesses for a pipe.
        self._console.print(Text(escape_unencodable(text, self._console.encoding)), soft_wrap=True)


def format_step_line(readings: RunReadings) -> str:
    """Format the last step: step 12/60 | reward 0.613 | accuracy 0.71 | ... | 0.52 s | 00:31
    left."""
    value = readings.value
    total = str(readings.total_steps)
    shares = readings.shares()
    parts = [f"step {readings.current_step:>{len(total)}}/{total}"]
    is_supervised = value("reward/mean") is None and value("policy/loss") is not None
    if is_supervised:
        parts.append(f"loss {format_value(value('policy/loss'), '.4f')}")
        if value("pairs/accuracy") is not None:
            parts.append(f"pair accuracy {format_value(value('pairs/accuracy'), '.2f')}")
    else:
        parts.append(f"reward {format_value(value('reward/mean'), '.3f')}")
        if value("cost/mean") is not None:
            parts.append(f"cost {format_value(value('cost/mean'), '.3f')}")
        parts += [
            *([f"{dropped:g} dropped"] if (dropped := value("reward/dropped")) else []),
            f"{readings.accuracy_name} {format_value(readings.accuracy, '.2f')}",
            f"length {format_value(value('response/length_mean'), '.1f')}",
            f"kl {format_value(value('policy/kl'), '.2g')}",
            f"entropy {format_value(value('policy/entropy'), '.2f')}",
            f"{format_value(value('throughput/tokens_per_second'), ',.0f')} tokens/s",
        ]
    parts += [
        " ".join(
            f"{name} {format_value(shares.get(phase), '.0%')}"
            for phase, name in _PHASES_SHOWN.items()
            if shares.get(phase) or not is_supervised  # which neither generates nor scores
        ),
        f"{format_value(value('time/step'), '.2f')} s",
        f"{format_clock_time(readings.seconds_left())} left",
    ]
    return " | ".join(parts)

"""A run on a terminal: a frame at the bottom that is redrawn, with permanent lines above it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Self

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.text import Text

from hybridrl.console.dashboard import (
    render_bar,
    render_phase_shares,
    render_progress,
    render_samples,
    render_values,
)
from hybridrl.console.run_view import RunView
from hybridrl.console.safe_text import sanitize_line, sanitize_lines
from hybridrl.console.sample_table_text import ShownSample
from hybridrl.system.formatting import format_seconds

_FRAMES_PER_SECOND = 4  # the run's own process draws them, so no more than the eye needs
_SAMPLES_SHOWN_S = 3.0  # long enough to be read
_MAX_WIDTH = 120
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class LiveConsole(RunView):
    """A console that redraws progress, metrics, time shares and samples a few times a second.

    A thread of rich draws while the run's thread calls, without a lock: each call replaces whole
    values, so that a frame shows the old ones or the new.
    """

    _phase: tuple[str, float] | None = None
    _progress: tuple[int, int, str] | None = None
    _samples: tuple[int, str, Sequence[ShownSample]] | None = None
    _samples_since = float("-inf")

    @cached_property
    def _live(self) -> Live:
        return Live(self, console=self._console, refresh_per_second=_FRAMES_PER_SECOND)

    def __enter__(self) -> Self:
        self._start()
        return self

    def phase(self, text: str) -> None:
        self._start()
        self._end_phase()
        self._phase = (text, self._clock())

    def phase_progress(self, done: int, total: int, note: str = "") -> None:
        self._progress = (done, total, note)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._start()
        self._end_phase()
        self._readings.record(step, metrics)

    def samples(self, prompt: str, completions: Sequence[ShownSample]) -> None:
        now = self._clock()
        if now - self._samples_since >= _SAMPLES_SHOWN_S:
            self._samples_since = now
            self._samples = (self._readings.current_step or 0, prompt, completions)

    def message(self, text: str) -> None:
        self._console.print(Text(sanitize_lines(text)), soft_wrap=True)

    def _stop(self, final: str) -> None:
        if final:  # after an error the last frame keeps the phase: it says what was going on
            self._phase = self._progress = None
        if self._live.is_started:
            self._live.stop()
        if final:
            self._console.print(Text(sanitize_lines(final), "bold"), soft_wrap=True)

    def _start(self) -> None:
        if not self._closed and not self._live.is_started:
            self._live.start(refresh=True)

    def _end_phase(self) -> None:
        ended, self._phase, self._progress = self._phase, None, None
        if ended and self._readings.current_step is None:  # start-up leaves a trace, steps do not
            text, began = ended
            seconds = format_seconds(self._clock() - began)
            self._console.print(
                Text.assemble(("✓ ", "#58b368"), sanitize_line(text, 120), (f"  {seconds}", "dim")),
                soft_wrap=True,
            )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # One cell less than the terminal: some wrap when the last cell is filled.
        width = min(_MAX_WIDTH, options.max_width - 1)
        yield Group(Text(), *self._lines(width, colour=console.color_system is not None))

    def _lines(self, width: int, colour: bool) -> list[Text]:
        readings, samples = self._readings, self._samples
        phase, progress = self._phase, self._progress
        if readings.current_step is None:
            lines = [Text(sanitize_line(self._title, width), "bold")]
            if phase is not None:
                lines.append(self._phase_words(*phase, None, width))
            if phase is not None and progress is not None:
                lines.append(_render_phase_progress(*progress, width))
            return lines
        # From here on the phase stands beside the title: a line that comes and goes would jump.
        words = Text() if phase is None else self._phase_words(*phase, progress, width // 2)
        heading = Text(sanitize_line(self._title, width - 2 - words.cell_len), "bold")
        heading.pad_right(width - heading.cell_len - words.cell_len)
        heading.append_text(words)
        lines = [heading, render_progress(readings, width), *render_values(readings, width)]
        lines += render_phase_shares(readings, width, colour)
        if samples is not None:
            lines += render_samples(*samples, width)
        return lines

    def _phase_words(
        self, text: str, began: float, progress: tuple[int, int, str] | None, width: int
    ) -> Text:
        end = f"  {format_seconds(self._clock() - began)}"
        if progress is not None:
            end = f"  {progress[0]}/{progress[1]}{end}"
        frame = _SPINNER[int(self._clock() * 8) % len(_SPINNER)]
        words = sanitize_line(text, max(0, width - 2 - len(end)))
        return Text.assemble((frame, "#4c8ed9"), " ", (words, "not bold"), (end, "not bold dim"))


def _render_phase_progress(done: int, total: int, note: str, width: int) -> Text:
    words = f"  {done}/{total}  " + sanitize_line(note, max(0, width - 36))
    fraction = min(1.0, done / total) if total > 0 else 0.0
    return Text.assemble("  ", render_bar(fraction, min(40, width - 2 - cell_len(words))), words)

"""The frame that the live console redraws: pure functions from readings to rich text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.text import Text

from hybridrl.console.line_console import (
    format_clock_time,
    format_value,
    render_sparkline,
)
from hybridrl.console.phase_colors import PHASE_COLORS
from hybridrl.console.run_view import RunReadings
from hybridrl.console.safe_text import sanitize_line
from hybridrl.console.sample_table_text import ShownSample, format_sample_count, format_sample_table

_LABEL_CELLS = 10
_PLAIN_FILLS = {"generate": "█", "score": "░", "train": "▓", "sync": "▒", "other": "·"}


def render_progress(readings: RunReadings, width: int) -> Text:
    """Render a bar of finished steps, the count, and the elapsed and remaining time."""
    done = readings.current_step or 0
    words = (
        f"step {done}/{readings.total_steps}   {format_clock_time(readings.elapsed())} elapsed   "
        f"{format_clock_time(readings.seconds_left())} left"
    )
    fraction = min(1.0, done / readings.total_steps) if readings.total_steps > 0 else 0.0
    return Text.assemble(render_bar(fraction, width - len(words) - 2), "  ", words)


def render_bar(fraction: float, cells: int) -> Text:
    """Render a thin bar, filled to `fraction`."""
    cells = max(4, cells)
    full = int(fraction * cells)
    half = "╸" if fraction * cells - full >= 0.5 else ""
    return Text.assemble(("━" * full + half, "#58b368"), ("─" * (cells - full - len(half)), "dim"))


def render_values(readings: RunReadings, width: int) -> list[Text]:
    """Render the metrics as a table of 4, 2 or 1 columns, the reward with its history."""
    value = readings.value
    accuracy = format_value(readings.accuracy, ".3f")
    when = "" if readings.accuracy_step is None else f"step {readings.accuracy_step}"
    pairs = [("pairs", format_value(value("pairs/accuracy"), ".3f"), "told apart")]
    costs = [("cost", format_value(value("cost/mean"), ".3f"), "")]
    entries = [
        ("reward", format_value(value("reward/mean"), ".3f"), "spark"),
        *(costs if value("cost/mean") is not None else []),
        ("loss", format_value(value("policy/loss"), ".3f"), ""),
        *(pairs if value("pairs/accuracy") is not None else []),
        (readings.accuracy_name, accuracy, when),
        ("length", format_value(value("response/length_mean"), ".1f"), "tokens"),
        ("entropy", format_value(value("policy/entropy"), ".3f"), ""),
        ("KL", format_value(value("policy/kl"), ".2g"), ""),
        ("mismatch", format_value(value("mismatch/k3"), ".2g"), ""),
        ("speed", format_value(value("throughput/tokens_per_second"), ",.0f"), "tokens/s"),
        ("step time", format_value(value("time/step"), ".2f"), "s"),
    ]
    columns = 4 if width >= 116 else 2 if width >= 56 else 1
    cells = width // columns
    lines = []
    for first in range(0, len(entries), columns):
        line = Text()
        for label, number, extra in entries[first : first + columns]:
            room = cells - max(_LABEL_CELLS, len(label)) - 10
            extra_style = "dim"
            if extra == "spark":
                extra, extra_style = render_sparkline(readings.rewards, min(24, room)), "#58b368"
            cell = Text.assemble(
                (f"{label:<{_LABEL_CELLS}}", "dim"),
                (f"{number:>7}", "bold"),
                " ",
                (extra[: max(0, room)], extra_style),
            )
            cell.pad_right(max(0, cells - cell.cell_len))
            line.append_text(cell)
        lines.append(line)
    return lines


def render_phase_shares(readings: RunReadings, width: int, colour: bool) -> list[Text]:
    """Render the time shares of the last step: one stacked bar and its legend."""
    shares = readings.shares()
    if not shares:
        return []
    stack, legend = Text(), Text()
    for phase, cells in zip(shares, split_cells(list(shares.values()), width), strict=True):
        fill = "█" if colour else _PLAIN_FILLS[phase]
        style = PHASE_COLORS[phase] if colour else ""
        stack.append(fill * cells, style)
        name = phase if width >= 72 else {"generate": "gen"}.get(phase, phase)
        legend.append("■ " if colour else fill + " ", style)
        legend.append(f"{name} {shares[phase]:.0%}  ")
    if legend.cell_len + len("of the step") <= width:
        legend.append("of the step", "dim")
    legend.rstrip()
    return [stack, legend]


def split_cells(shares: list[float], width: int) -> list[int]:
    """Split `width` cells by shares; every share above zero gets at least one."""
    total = sum(shares)
    if total <= 0:
        return [0] * len(shares)
    exact = [share / total * width for share in shares]
    cells = [max(int(size), 1 if size > 0.05 else 0) for size in exact]
    while sum(cells) != width:
        step = 1 if sum(cells) < width else -1
        lag = [step * (size - count) for size, count in zip(exact, cells, strict=True)]
        candidates = [i for i, count in enumerate(cells) if step > 0 or count > 1]
        cells[max(candidates, key=lambda i: lag[i])] += step
    return cells


def render_samples(
    step: int, prompt: str, completions: Sequence[ShownSample], width: int
) -> list[Text]:
    """Render samples of a prompt between two rules. There are no side borders, which odd characters
    would break."""
    heading = f"── {format_sample_count(completions)} of step {step} "
    room = width - 4  # two cells spare, for terminals that draw a character wider than rich thinks
    first, *rows = format_sample_table(completions, room)
    return [
        Text(heading + "─" * max(0, width - cell_len(heading)), "dim"),
        Text.assemble(("  prompt  ", "dim"), sanitize_line(prompt, room - 8)),
        Text(f"  {first}", "dim"),
        *(Text(f"  {row}") for row in rows),
        Text("─" * width, "dim"),
    ]

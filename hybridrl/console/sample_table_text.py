"""Samples of one prompt as lines of a table: rewards, advantage and text of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hybridrl.console.safe_text import sanitize_line

_MAX_SAMPLES = 4
_MAX_REWARD_COLUMNS = 4
_COLUMN_CELLS = 9
_FIRST = "reward"


class ShownSample(NamedTuple):
    """A sample as it is shown.

    Attributes:
        answer: Its text.
        reward: NaN: it was dropped.
        parts: What each function and model gave it, by name.
        advantage: Mean over its tokens; None: nothing is known of it.
    """

    answer: str
    reward: float
    parts: Mapping[str, float] = {}
    advantage: float | None = None


def format_sample_table(completions: Sequence[ShownSample], cells: int) -> list[str]:
    """Return a heading and a line for each sample, each at most `cells` terminal cells wide; only
    the best and the worst samples if there are many."""
    best_first = sorted(completions, key=lambda one: (math.isnan(one.reward), -one.reward))
    if len(best_first) > _MAX_SAMPLES:
        best_first = best_first[: _MAX_SAMPLES // 2] + best_first[-(_MAX_SAMPLES // 2) :]
    room = max(0, cells - 30) // (_COLUMN_CELLS + 1)
    names = list(dict.fromkeys(name for one in best_first for name in one.parts))
    if len(names) == 1 and all(
        _format_number(one.parts.get(names[0])) == _format_number(one.reward) for one in best_first
    ):
        names = []
    names = names[: min(_MAX_REWARD_COLUMNS, max(0, room - 2))]
    heading = [_FIRST, *map(_short, names)]
    advantages = any(one.advantage is not None for one in best_first)
    heading += ["advantage"] if advantages else []
    lines = [" ".join(f"{name:>{_COLUMN_CELLS}}" for name in heading) + "  response"]
    for one in best_first:
        numbers = [
            _format_number(one.reward),
            *(_format_partial_reward(one.parts.get(name)) for name in names),
        ]
        if advantages:
            numbers.append("-" if one.advantage is None else f"{one.advantage:+.2f}")
        shown = " ".join(f"{number:>{_COLUMN_CELLS}}" for number in numbers) + "  "
        lines.append(shown + sanitize_line(one.answer, max(4, cells - len(shown))))
    return lines


def format_sample_count(completions: Sequence[ShownSample]) -> str:
    """Return the number of samples in words, such as `8 samples, the best and the worst 2`."""
    count = len(completions)
    if count <= _MAX_SAMPLES:
        return f"{count} sample{'s' * (count != 1)}"
    return f"{count} samples, the best and the worst {_MAX_SAMPLES // 2}"


def _short(name: str) -> str:
    """Return the beginning of a function's name, or of the name of a further number that it gives:
    names of functions often end alike."""
    name = sanitize_line(name.rpartition("/")[2], 99)
    return name if len(name) <= _COLUMN_CELLS else name[: _COLUMN_CELLS - 1] + "…"


def _format_number(value: float | None) -> str:
    if value is None:
        return "-"
    return "dropped" if math.isnan(value) else f"{value:.3g}"


def _format_partial_reward(value: float | None) -> str:
    """Format the reward of one function; "-" for a sample that the function gave none."""
    return "-" if value is None or math.isnan(value) else _format_number(value)

"""The terminal screen of `hybridrl top`, drawn from a run's files alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hybridrl.console.dashboard import bar, value_lines
from hybridrl.console.run_readings import Readings
from hybridrl.console.safe_text import one_line
from hybridrl.report.device_spans import IDLE, DeviceSpan, in_words
from hybridrl.report.run_evidence import Evidence
from hybridrl.report.run_summary import advise_of, learned
from hybridrl.run_files.run_paths import SAMPLES
from hybridrl.run_files.run_reader import RunReader, read_table
from hybridrl.run_files.run_status import RUNNING, state_of
from hybridrl.run_files.summary import accuracy_name
from hybridrl.system.formatting import readable_seconds

BAR_CELLS = 20
DEVICES_SHOWN = 32
STEPS_LOOKED_AT = 5
"""So many of the newest steps say what devices do."""


def screen(run: RunReader, width: int, now: float | None = None) -> RenderableType:
    """Render a run's screen at a moment.

    Args:
        width: Cells.
        now: Seconds since the epoch; None: the time of the clock.
    """
    seen = Evidence(run, STEPS_LOOKED_AT)
    parts: list[RenderableType] = [_title(seen, width)]
    if not seen.rows:
        parts.append(Text(learned(seen)[0], "dim"))
        return Group(*parts)
    parts += value_lines(_readings(seen), width)
    if seen.spans:
        parts += [Text(), _devices(seen, time.time() if now is None else now)]
    if sample := _sample(run):
        parts += [Text(), Text.assemble(("last sample  ", "dim"), one_line(sample, width - 13))]
    parts.append(Text())
    if advice := advise_of(seen):
        best = advice[0]
        parts.append(Text.assemble(("next  ", "dim"), (best.title, "bold"), ". ", best.action))
    else:
        parts.append(Text("next  nothing stands out", "dim"))
    return Group(*parts)


def _title(seen: Evidence, width: int) -> Text:
    state, why = state_of(seen.run.path)
    total = 0 if seen.config is None else seen.config.trainer.steps
    words = f"{seen.run.path}   step {seen.steps}/{total}   {state or 'no state'}"
    if why:
        words += f": {why}"
    if "staleness/mean" in (seen.rows[-1] if seen.rows else {}):
        words += f"   staleness {seen.rows[-1]['staleness/mean']:.2g}"
    return Text(one_line(words, width), "bold")


def _readings(seen: Evidence) -> Readings:
    accuracy = "accuracy" if seen.config is None else accuracy_name(seen.config.reward, short=True)
    readings = Readings(0, lambda: 0.0, accuracy)
    for row in seen.all_rows:
        if "time/step" in row:
            readings.record(row["step"], row)
        elif "accuracy" in row:
            readings.accuracy, readings.accuracy_step = row["accuracy"], row["step"]
    return readings


def _devices(seen: Evidence, now: float) -> Table:
    """Render a row for each device: roles, current activity, busy and idle shares, main cause of
    idleness."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    running = state_of(seen.run.path)[0] == RUNNING
    in_hand = "in hand, by the last step" if running else "at the end"
    for column in ("device", "roles", in_hand, "busy", "idle", "idle most of all"):
        table.add_column(column, header_style="dim")
    for device in seen.devices[:DEVICES_SHOWN]:
        spans = [span for span in seen.spans if span.device == device]
        roles = dict.fromkeys(span.role for span in spans if span.role not in ("", "driver"))
        causes: Mapping[str, float] = seen.idle.get(device, {})
        idle = sum(causes.values())
        because = next(iter(causes), "")
        table.add_row(
            str(device),
            " ".join(roles),
            _at(spans, seen, now) if running else _named(spans[-1]),
            bar(1 - idle, BAR_CELLS),
            f"{idle:.0%}",
            f"{in_words(because)} {causes[because]:.0%}" if because else "",
        )
    if (more := len(seen.devices) - DEVICES_SHOWN) > 0:
        table.add_row("", f"and {more} more")
    return table


def _at(spans: list[DeviceSpan], seen: Evidence, now: float) -> str:
    """Describe what a device did in its last step at the same age as the current step, because
    files show a step only after its end."""
    last = seen.recorded[-1]
    begin, seconds = last.begin - seen.recorded[0].begin, last.end - last.begin
    moment = begin + max(0.0, now - last.end) % max(seconds, 1e-6)
    shown = next((span for span in spans if span.start <= moment < span.end), spans[-1])
    late = now - last.end
    return f"{_named(shown)} ({readable_seconds(late)} since a step)" if late > 0 else _named(shown)


def _named(span: DeviceSpan) -> str:
    return in_words(span.cause) if span.phase == IDLE else f"{span.role}.{span.phase}"


def _sample(run: RunReader) -> str:
    """Return prompt, response and score of the newest stored sample, as one line."""
    files = run.files(SAMPLES, "step-*.parquet")
    if not files:
        return ""
    try:
        rows: list[dict[str, Any]] = read_table(files[-1]).slice(0, 1).to_pylist()
    except (OSError, ValueError):
        return ""
    if not rows:
        return ""
    score = rows[0].get("scores")
    said = "" if score is None else f"   ({score:.3g})"
    return f"{rows[0].get('prompt', '')} → {rows[0].get('response', '')}{said}"

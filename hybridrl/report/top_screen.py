"""The terminal screen of `hybridrl top`, drawn from a run's files alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hybridrl.console.dashboard import render_bar, render_values
from hybridrl.console.run_view import RunReadings
from hybridrl.console.safe_text import sanitize_line
from hybridrl.report.device_spans import IDLE, DeviceSpan, format_cause
from hybridrl.report.run_evidence import RunEvidence
from hybridrl.report.run_summary import find_advice, summarize_learning
from hybridrl.run_files.final_sentence import resolve_accuracy_name
from hybridrl.run_files.run_paths import SAMPLES
from hybridrl.run_files.run_reader import RunReader, read_table
from hybridrl.run_files.run_status import RUNNING, read_run_status
from hybridrl.system.formatting import format_seconds

_BAR_CELLS = 20
_MAX_DEVICES = 32
_NEWEST_STEPS = 5
"""So many of the newest steps say what devices do."""


def render_top_screen(run: RunReader, width: int) -> RenderableType:
    """Render a run's screen as it is now, `width` cells wide."""
    seen = RunEvidence(run, _NEWEST_STEPS)
    parts: list[RenderableType] = [_render_title(seen, width)]
    if not seen.rows:
        parts.append(Text(summarize_learning(seen)[0], "dim"))
        return Group(*parts)
    parts += render_values(_build_readings(seen), width)
    if seen.spans:
        parts += [Text(), _render_devices(seen)]
    if sample := _read_last_sample(run):
        parts += [
            Text(),
            Text.assemble(("last sample  ", "dim"), sanitize_line(sample, width - 13)),
        ]
    parts.append(Text())
    if advice := find_advice(seen):
        best = advice[0]
        parts.append(Text.assemble(("next  ", "dim"), (best.title, "bold"), ". ", best.action))
    else:
        parts.append(Text("next  nothing stands out", "dim"))
    return Group(*parts)


def _render_title(seen: RunEvidence, width: int) -> Text:
    state, why = read_run_status(seen.run.path)
    total = 0 if seen.config is None else seen.config.trainer.steps
    words = f"{seen.run.path}   step {seen.steps}/{total}   {state or 'no state'}"
    if why:
        words += f": {why}"
    if "staleness/mean" in (seen.rows[-1] if seen.rows else {}):
        words += f"   staleness {seen.rows[-1]['staleness/mean']:.2g}"
    return Text(sanitize_line(words, width), "bold")


def _build_readings(seen: RunEvidence) -> RunReadings:
    accuracy = (
        "accuracy" if seen.config is None else resolve_accuracy_name(seen.config.reward, short=True)
    )
    readings = RunReadings(0, lambda: 0.0, accuracy)
    for row in seen.all_rows:
        if "time/step" in row:
            readings.record(row["step"], row)
        elif "accuracy" in row:
            readings.accuracy, readings.accuracy_step = row["accuracy"], row["step"]
    return readings


def _render_devices(seen: RunEvidence) -> Table:
    """Render a row for each device: roles, current activity, busy and idle shares, main cause of
    idleness."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    running = read_run_status(seen.run.path)[0] == RUNNING
    in_hand = "in hand, by the last step" if running else "at the end"
    for column in ("device", "roles", in_hand, "busy", "idle", "idle most of all"):
        table.add_column(column, header_style="dim")
    for device in seen.devices[:_MAX_DEVICES]:
        spans = [span for span in seen.spans if span.device == device]
        roles = dict.fromkeys(span.role for span in spans if span.role not in ("", "driver"))
        causes: Mapping[str, float] = seen.idle.get(device, {})
        idle = sum(causes.values())
        because = next(iter(causes), "")
        table.add_row(
            str(device),
            " ".join(roles),
            _describe_activity(spans, seen) if running else _name_span(spans[-1]),
            render_bar(1 - idle, _BAR_CELLS),
            f"{idle:.0%}",
            f"{format_cause(because)} {causes[because]:.0%}" if because else "",
        )
    if (more := len(seen.devices) - _MAX_DEVICES) > 0:
        table.add_row("", f"and {more} more")
    return table


def _describe_activity(spans: list[DeviceSpan], seen: RunEvidence) -> str:
    """Describe what a device did in its last step at the same age as the current step, because
    files show a step only after its end."""
    last = seen.recorded[-1]
    begin, seconds = last.begin - seen.recorded[0].begin, last.end - last.begin
    late = time.time() - last.end
    moment = begin + max(0.0, late) % max(seconds, 1e-6)
    shown = next((span for span in spans if span.start <= moment < span.end), spans[-1])
    since = f" ({format_seconds(late)} since a step)" if late > 0 else ""
    return f"{_name_span(shown)}{since}"


def _name_span(span: DeviceSpan) -> str:
    return format_cause(span.cause) if span.phase == IDLE else f"{span.role}.{span.phase}"


def _read_last_sample(run: RunReader) -> str:
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

"""The timeline part of a report: what each device did in the newest steps, by role."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from hybridrl.errors import DataError
from hybridrl.report.device_spans import (
    IDLE,
    SPAN_COLORS,
    DeviceSpan,
    build_device_spans,
    format_cause,
    sum_idle_by_cause,
)
from hybridrl.run_files.recorded_steps import RecordedStep
from hybridrl.run_files.run_paths import STEPS
from hybridrl.run_files.run_reader import RunReader

_MAX_STEPS = 20
_MAX_SPANS = 12_000
_PHASES = list(SPAN_COLORS)
_MICROSECONDS = 6


def build_device_timeline(run: RunReader) -> dict[str, Any]:
    """Build the timeline of the newest steps, as many as fit the span limit.

    Returns:
        `steps`: number, start and end of each; `devices`: number, `roles`, and `idle`, its share of
        the time by cause; `spans`: place of its device, of its role (-1: idle), of its phase, of
        its name, then start, seconds, rank and tokens. Seconds count from the first step shown.
        `note`: what is left out, or why there is nothing.
    """
    if not (run.path / STEPS).exists():
        return _empty_timeline("No step has been recorded.")
    try:
        steps = run.steps()
    except DataError as error:
        return _empty_timeline(str(error))
    devices = run.devices()
    count = min(_MAX_STEPS, len(steps))
    spans = build_device_spans(steps, devices, count)
    while len(spans) > _MAX_SPANS and count > 1:
        count = max(1, min(count - 1, count * _MAX_SPANS // len(spans)))
        spans = build_device_spans(steps, devices, count)
    return _build_data(steps, spans, count)


def _empty_timeline(note: str) -> dict[str, Any]:
    return {"steps": [], "devices": [], "spans": [], "phases": [], "note": note}


def _build_data(
    steps: Sequence[RecordedStep], spans: Sequence[DeviceSpan], count: int
) -> dict[str, Any]:
    shown = steps[-count:]
    begin = shown[0].begin
    earlier = begin - steps[0].begin
    by_device: dict[int, list[DeviceSpan]] = defaultdict(list)
    for span in spans:
        by_device[span.device].append(span)
    idle = sum_idle_by_cause(spans)
    names: dict[str, int] = {}
    rows, devices = [], []
    for place, (device, own) in enumerate(by_device.items()):
        roles = list(dict.fromkeys(span.role for span in own if span.role))
        causes = {format_cause(cause): share for cause, share in idle[device].items()}
        devices.append({"device": device, "roles": roles, "idle": causes})
        for span in own:
            name = format_cause(span.cause) if span.phase == IDLE else span.method
            lane = roles.index(span.role) if span.role else -1
            where = place, lane, _PHASES.index(span.phase), names.setdefault(name, len(names))
            start = round(span.start - earlier, _MICROSECONDS)
            seconds = round(span.seconds, _MICROSECONDS)
            rows.append([*where, start, seconds, span.rank, span.tokens])
    return {
        "steps": [
            [one.step, *(round(at - begin, _MICROSECONDS) for at in (one.begin, one.end))]
            for one in shown
        ],
        "devices": devices,
        "spans": rows,
        "names": list(names),
        "phases": list(SPAN_COLORS.items()),
        "note": f"The newest {count} of {len(steps)} recorded steps." if count < len(steps) else "",
    }

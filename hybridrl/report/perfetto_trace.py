"""A trace of a run's device spans for ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridrl.report.device_spans import IDLE, DeviceSpan, format_cause
from hybridrl.system.storage import replace_file, to_json

_WAIT_ROW = "waiting"
"""The row of a device on which it stands what it waited for."""


def write_perfetto_trace(spans: Sequence[DeviceSpan], file: Path) -> None:
    """Write the trace; its first span starts at 0.

    Raises:
        StorageError: if it cannot be written.
    """
    trace = {"displayTimeUnit": "ms", "traceEvents": _build_trace_events(spans)}
    with replace_file(file, "`--out`") as part:
        part.write_text(to_json(trace), encoding="utf-8")


def _build_trace_events(spans: Sequence[DeviceSpan]) -> list[dict[str, Any]]:
    """Return the events of a trace: a process for each device with a thread for each of its roles,
    and one with a row of steps, each of which starts where the one before ended."""
    begin = min((span.start for span in spans), default=0.0)
    run = max((span.device for span in spans), default=-1) + 1
    threads: dict[str, int] = {}
    rows: dict[tuple[int, str], None] = {}
    slices: list[dict[str, Any]] = []

    def add(
        device: int,
        thread: str,
        name: str,
        category: str,
        times: tuple[float, float],
        said: Mapping[str, object],
    ) -> None:
        start, end = (round((seconds - begin) * 1e6) for seconds in times)
        rows[device, thread] = None
        place = {"pid": device, "tid": threads.setdefault(thread, len(threads))}
        what = {"name": name, "cat": category, "args": said}
        slices.append({"ph": "X", **place, **what, "ts": start, "dur": end - start})

    ends: dict[int, float] = {}
    for span in spans:
        ends[span.step] = max(span.end, ends.get(span.step, begin))
    at = begin
    for step in sorted(ends):
        add(run, "steps", f"step {step}", "step", (at, max(at, ends[step])), {})
        at = max(at, ends[step])
    for span in spans:
        times = span.start, span.end
        if span.phase == IDLE:
            said = {"step": span.step, "cause": span.cause}
            add(span.device, _WAIT_ROW, format_cause(span.cause), IDLE, times, said)
            continue
        said = {"step": span.step, "rank": span.rank, "method": span.method, "tokens": span.tokens}
        name = f"{span.phase} ({span.cause})" if span.cause else span.phase
        add(span.device, span.role, name, span.phase, times, said)

    def name_row(kind: str, name: str, device: int, **thread: int) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": device, **thread, "args": {"name": name}}

    names = {device: f"device {device}" for device, _ in sorted(rows)} | {run: "run"}
    return [
        *(name_row("process_name", name, device) for device, name in names.items()),
        *(name_row("thread_name", role, one, tid=threads[role]) for one, role in sorted(rows)),
        *slices,
    ]

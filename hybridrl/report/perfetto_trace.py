"""A trace of a run's device spans for ui.perfetto.dev."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hybridrl.report.device_spans import IDLE, DeviceSpan, format_cause
from hybridrl.system.storage import replace_file, to_json

_WAIT_ROW = "waiting"
"""The row of a device on which it stands what it waited for."""


def write_perfetto_trace(spans: Sequence[DeviceSpan], file: Path) -> None:
    """Write the trace; its first span starts at 0.

    Raises:
        StorageError: if it cannot be written.
    """
    begin = min((span.start for span in spans), default=0.0)
    run = max((span.device for span in spans), default=-1) + 1
    slices = [
        *_build_step_slices(spans, begin, run),
        *(_build_slice(span, begin) for span in spans),
    ]
    trace = {"displayTimeUnit": "ms", "traceEvents": build_trace_events(slices, {run: "run"})}
    with replace_file(file, "`--out`") as part:
        part.write_text(to_json(trace), encoding="utf-8")


def _build_slice(span: DeviceSpan, begin: float) -> TraceSlice:
    times = span.start - begin, span.end - begin
    if span.phase == IDLE:
        said = {"step": span.step, "cause": span.cause}
        return TraceSlice(span.device, _WAIT_ROW, format_cause(span.cause), IDLE, *times, said)
    said = {"step": span.step, "rank": span.rank, "method": span.method, "tokens": span.tokens}
    name = f"{span.phase} ({span.cause})" if span.cause else span.phase
    return TraceSlice(span.device, span.role, name, span.phase, *times, said)


def _build_step_slices(spans: Sequence[DeviceSpan], begin: float, run: int) -> list[TraceSlice]:
    """Build a row of steps, each starting where the one before ended."""
    ends: dict[int, float] = {}
    for span in spans:
        ends[span.step] = max(span.end - begin, ends.get(span.step, 0.0))
    slices, at = [], 0.0
    for step in sorted(ends):
        slices.append(TraceSlice(run, "steps", f"step {step}", "step", at, max(at, ends[step])))
        at = max(at, ends[step])
    return slices


Event = dict[str, object]


class TraceSlice(NamedTuple):
    """An interval in a trace.

    Attributes:
        device, thread: Its row: a process of the trace for each device, a thread in it.
        name, category: What it was; those of a category can be shown or hidden together.
        start, end: Seconds.
        arguments: What is shown of it when it is chosen.
    """

    device: int
    thread: str
    name: str
    category: str
    start: float
    end: float
    arguments: Mapping[str, object] = {}


def build_trace_events(
    slices: Iterable[TraceSlice], names: Mapping[int, str] | None = None
) -> list[Event]:
    """Return the events of a trace, with times in microseconds.

    Args:
        names: Of processes that are not devices, by their numbers.
    """
    slices = list(slices)
    threads = list(dict.fromkeys(one.thread for one in slices))
    events: list[Event] = []
    for device in sorted({one.device for one in slices}):
        name = {"name": (names or {}).get(device, f"device {device}")}
        events.append({"ph": "M", "name": "process_name", "pid": device, "args": name})
    for device, thread in sorted({(one.device, one.thread) for one in slices}):
        at = {"pid": device, "tid": threads.index(thread)}
        events.append({"ph": "M", "name": "thread_name", **at, "args": {"name": thread}})
    for one in slices:
        start, end = round(one.start * 1e6), round(one.end * 1e6)
        events.append(
            {
                "ph": "X",
                "name": one.name,
                "cat": one.category,
                "pid": one.device,
                "tid": threads.index(one.thread),
                "ts": start,
                "dur": end - start,
                "args": dict(one.arguments),
            }
        )
    return events

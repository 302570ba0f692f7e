"""Chrome's trace format, which chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

Event = dict[str, object]


class Slice(NamedTuple):
    """Something that took a time.

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


def events_of(slices: Iterable[Slice], names: Mapping[int, str] | None = None) -> list[Event]:
    """The events of a trace, times in microseconds.

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

"""`steps.jsonl` of a run: what every rank, and the driver, did in each step, and when.

A line of JSON for each step, with the times of calls and their phases by the clocks of their hosts,
in seconds since the step began. `planner.what_if.recorded_graph` makes a graph of them.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from hybridrl.batch.call_record import CallRecord, PhaseSpan
from hybridrl.errors import DataError
from hybridrl.run_files.run_paths import STEPS
from hybridrl.system.bounded_files import MOST_LINE_BYTES, parse_json, read_end, start_near_end
from hybridrl.system.storage import explain_write_errors, replace_file

DATA, DRIVER_EVALUATION, CHECKPOINT, DRIVER_RECORDING = (
    "data",
    "evaluation",
    "checkpoint",
    "keeping",
)
"""What the driver may be at."""
_KEPT_BYTES = 64 << 20
"""Of a file that has grown to twice as much, so much stays: the newest steps."""
NEWEST_STEPS_BYTES = 16 << 20
"""Of a long file: what those look at who want the newest steps, one step at least."""
_TIME_DIGITS = 6
"""Digits of a second that are written."""


class RecordedStep(NamedTuple):
    """The record of one step."""

    step: int
    begin: float
    end: float
    records: Sequence[CallRecord]
    ahead: Mapping[int, float]
    between: Sequence[CallRecord] = ()
    driver: Sequence[PhaseSpan] = ()


class DriverActivity:
    """The driver's spans and calls outside of steps, collected until the next recorded step."""

    def __init__(self) -> None:
        self._spans: list[PhaseSpan] = []
        self._records: list[CallRecord] = []

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Record the time that the block takes as a span of the driver."""
        begin = time.time()
        try:
            yield
        finally:
            self._spans.append(PhaseSpan(what, begin, time.time()))

    def seconds(self, what: str) -> float:
        """Return the seconds spent on something since the last recorded step."""
        return sum(span.end - span.start for span in self._spans if span.phase == what)

    def called(self, records: Sequence[CallRecord]) -> Sequence[CallRecord]:
        """Add the records of calls that belong to no step; return them."""
        self._records += records
        return records

    def take(self) -> tuple[list[CallRecord], list[PhaseSpan]]:
        """Return and clear all spans and records since the last call."""
        taken = self._records, self._spans
        self._records, self._spans = [], []
        return taken


def append_recorded_step(folder: Path, recorded: RecordedStep) -> None:
    """Append the record of a step to that of the run in a folder. Of a file that has become long
    only the newest steps stay.

    Raises:
        StorageError: if that fails.
    """
    path = folder / STEPS
    line = json.dumps(_encode_step(recorded), separators=(",", ":")) + "\n"
    with explain_write_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(line)
        size = file.tell()
    if size > 2 * _KEPT_BYTES:
        with path.open("rb") as long, replace_file(path) as part:
            start_near_end(long, _KEPT_BYTES)
            part.write_bytes(long.read())


def read_recorded_steps(folder: Path, newest_bytes: int | None = None) -> list[RecordedStep]:
    """Return the recorded steps since the run was last started, when call numbers begin again. An
    incomplete last line is left out.

    Args:
        newest_bytes: Of the file, so much of its end is looked at; None: all of it.

    Raises:
        DataError: if there is nothing.
    """
    file = folder / STEPS
    try:
        # One line at least, also where it is longer.
        content = read_end(file, newest_bytes or 2 * _KEPT_BYTES) or read_end(file, MOST_LINE_BYTES)
    except FileNotFoundError:
        raise DataError(
            f"{folder} has no {STEPS}, in which a run records what its ranks did in each step. "
            "Name the folder of a run, such as runs/latest."
        ) from None
    except OSError as error:
        raise DataError(f"{file} could not be read: {error}.") from error
    found: list[RecordedStep] = []
    last = -1
    for number, line in enumerate(content.decode(errors="replace").splitlines(keepends=True), 1):
        try:
            recorded = _decode_step(parse_json(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if found and not line.endswith("\n"):
                break
            raise DataError(f"{file}, line {number}: {error} is no recorded step.") from error
        calls = [record.call for record in (*recorded.between, *recorded.records)]
        if calls and min(calls) <= last:
            found = []
        last = max(calls, default=last)
        found.append(recorded)
    if not found:
        raise DataError(f"{file} has no steps yet.")
    return found


def _encode_step(recorded: RecordedStep) -> dict[str, Any]:
    def since(moment: float) -> float:
        return round(moment - recorded.begin, _TIME_DIGITS)

    return {
        "step": recorded.step,
        "begin": recorded.begin,
        "seconds": since(recorded.end),
        "ahead": {str(host): round(a, _TIME_DIGITS) for host, a in recorded.ahead.items()},
        "calls": [_encode_call(one, since) for one in recorded.records if one.host >= 0],
        "between": [_encode_call(one, since) for one in recorded.between if one.host >= 0],
        "driver": [[span.phase, since(span.start), since(span.end)] for span in recorded.driver],
    }


def _encode_call(one: CallRecord, since: Callable[[float], float]) -> dict[str, Any]:
    return {
        "role": one.role,
        "rank": one.rank,
        "method": one.method,
        "call": one.call,
        "device": one.host,
        "reads": list(one.reads),
        "start": since(one.start),
        "end": since(one.end),
        "waited": None if one.waited is None else round(one.waited, _TIME_DIGITS),
        "tokens": one.tokens,
        **({"beside": True} if one.beside else {}),
        "spans": [
            [s.phase, since(s.start), since(s.end), round(s.waited, _TIME_DIGITS)]
            for s in one.spans
        ],
    }


def _decode_step(data: Mapping[str, Any]) -> RecordedStep:
    begin, step, seconds = float(data["begin"]), data["step"], data["seconds"]
    if type(step) is not int or not 0 < seconds < math.inf:
        raise ValueError(f"step={step!r} of seconds={seconds!r}")
    ahead = {int(host): seconds for host, seconds in data["ahead"].items()}
    return RecordedStep(
        step,
        begin,
        begin + seconds,
        [_decode_call(one, begin) for one in data["calls"]],
        ahead,
        [_decode_call(one, begin) for one in data.get("between", ())],
        [PhaseSpan(phase, begin + s, begin + e) for phase, s, e in data.get("driver", ())],
    )


def _decode_call(one: Mapping[str, Any], begin: float) -> CallRecord:
    if wrong := [name for name in ("call", "rank", "device") if type(one[name]) is not int]:
        raise ValueError(f"{wrong[0]}={one[wrong[0]]!r}")
    spans = [PhaseSpan(phase, begin + s, begin + e, w) for phase, s, e, w in one["spans"]]
    record = CallRecord(one["role"], one["rank"], one["method"])
    record.start, record.end = begin + one["start"], begin + one["end"]
    record.call, record.host, record.reads = one["call"], one["device"], tuple(one["reads"])
    record.waited, record.tokens, record.spans = one["waited"], one["tokens"], spans
    record.beside = bool(one.get("beside"))
    for span in spans:
        record.phases[span.phase] += span.end - span.start
    return record

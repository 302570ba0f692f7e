"""Device spans of a run: what each device did at every moment, or waited for.

A device is busy in the pieces of its calls, but for what it waited in them for slower ranks. What
is left is cut where the reason for waiting changes: a call whose result is needed, an evaluation,
a checkpoint, the data, or the driver itself. So the spans of a device follow each other without a
hole, from the beginning of the first step to the end of the last.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from hybridrl.batch.call_record import DRIVER_ROLE, CallRecord
from hybridrl.console.phase_colors import PHASE_COLORS
from hybridrl.planner.what_if.recorded_graph import (
    OTHER_PHASE,
    CallSegment,
    match_collectives,
    split_call,
)
from hybridrl.run_files.recorded_steps import (
    CHECKPOINT,
    DATA,
    DRIVER_EVALUATION,
    DRIVER_RECORDING,
    RecordedStep,
    read_recorded_steps,
)
from hybridrl.run_files.run_reader import RunReader

GENERATE, SCORE, LOG_PROB, ADVANTAGE, UPDATE, SYNC, SAVE, IDLE = (
    *("generate", "score", "log-prob", "advantage", "update", "sync", "save", "idle"),
)
SPAN_COLORS = {
    GENERATE: PHASE_COLORS["generate"],
    SCORE: PHASE_COLORS["score"],
    LOG_PROB: "#b98a5e",
    ADVANTAGE: "#9377d6",
    UPDATE: PHASE_COLORS["train"],
    SYNC: PHASE_COLORS["sync"],
    SAVE: "#7d8a2e",
    OTHER_PHASE: PHASE_COLORS["other"],
    IDLE: "",
}
"""The colors of phases, in the order in which they are shown."""
WAIT_FOR_PEERS, NO_MORE_WORK = "peers", "nothing to do"
"""Causes of idleness. Others are `DRIVER_ROLE`, those of `BesideSteps`, and calls, which are named
`role.phase`."""
_CAUSE_TEXTS = {
    WAIT_FOR_PEERS: "waiting for slower ranks",
    DATA: "waiting for data",
    DRIVER_EVALUATION: "during an evaluation",
    CHECKPOINT: "during a checkpoint",
    DRIVER_RECORDING: "while figures and samples were kept",
    NO_MORE_WORK: "nothing left to do",
    DRIVER_ROLE: "waiting for the driver",
}
_LEAST_SECONDS = 1e-6
_SAVING = ("save_state", "start_saving", "finish_saving", "save_model")


class DeviceSpan(NamedTuple):
    """A span of time in which a device worked in one phase, or was idle for one cause.

    Attributes:
        device: Its number.
        step: The number of the step that it belongs to; of what is between two steps, the later.
        role, rank, method: Of the call; empty and -1 while the device was between two calls.
        phase: One of `SPAN_COLORS`.
        start, end: Seconds since the first recorded step began, by the driver's clock.
        tokens: That were worked on; the longest span of a call has them all.
        cause: Of idle spans, what it waited for: `WAIT_FOR_PEERS`, `DRIVER_ROLE`, `NO_MORE_WORK`,
            `DATA`, `DRIVER_EVALUATION`, `CHECKPOINT`, `DRIVER_RECORDING`, or `role.phase`. Of
            others, `DRIVER_EVALUATION` or `CHECKPOINT` if they were for one, else empty.
    """

    device: int
    step: int
    role: str
    rank: int
    method: str
    phase: str
    start: float
    end: float
    tokens: int = 0
    cause: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start


def read_device_spans(run_folder: Path, last: int | None = None) -> list[DeviceSpan]:
    """Read the spans of a run's devices, each in the order of time.

    Args:
        last: Of so many of the newest steps; None: of all that are recorded since the run was last
            started.

    Raises:
        DataError: if the run has recorded no steps.
    """
    return build_device_spans(
        read_recorded_steps(run_folder), RunReader(run_folder).devices(), last
    )


def build_device_spans(
    steps: Sequence[RecordedStep], devices: Iterable[int] = (), last: int | None = None
) -> list[DeviceSpan]:
    """Build the device spans of recorded steps, without gaps from the first to the last step.

    Args:
        devices: Those that are to have spans even if no call ran on them.
        last: See `read_device_spans`.
    """
    origin = steps[0].begin
    shown = steps if last is None else steps[-last:]
    context = steps[max(0, len(steps) - len(shown) - 1) :]
    busy = _build_busy_spans(context, origin)
    begin, end = shown[0].begin - origin, shown[-1].end - origin
    reasons = IdleCauses(context, origin)
    found: list[DeviceSpan] = []
    for device in sorted({*devices, *busy}):
        at = begin
        for span, call in busy.get(device, ()):
            if span.end <= begin:
                continue
            if span.start - at > _LEAST_SECONDS:
                found += reasons.idle(device, at, span.start, call)
            if span.end > max(at, span.start):
                found.append(span._replace(start=max(at, span.start)))
                at = span.end
        if end - at > _LEAST_SECONDS:
            found += reasons.idle(device, at, end, None)
    return found


def sum_idle_by_cause(spans: Iterable[DeviceSpan]) -> dict[int, dict[str, float]]:
    """Return each device's idle share by cause, largest first."""
    whole: dict[int, float] = defaultdict(float)
    idle: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        whole[span.device] += span.seconds
        if span.phase == IDLE:
            idle[span.device][span.cause] += span.seconds
    return {
        device: {
            cause: seconds / whole[device]
            for cause, seconds in sorted(idle[device].items(), key=lambda one: -one[1])
        }
        for device in whole
    }


def format_cause(cause: str) -> str:
    """Format a cause of idleness for people."""
    return _CAUSE_TEXTS.get(cause, f"waiting for {cause}")


def _build_busy_spans(
    steps: Sequence[RecordedStep], origin: float
) -> dict[int, list[tuple[DeviceSpan, CallRecord]]]:
    """Build the busy spans of each device with their call records, in the order of time."""
    found: dict[int, list[tuple[DeviceSpan, CallRecord]]] = defaultdict(list)
    for step in steps:
        for records, about in ((step.between, _find_call_causes(step)), (step.records, {})):
            done = [record for record in records if record.host >= 0 and record.end]
            pieces = [split_call(r, origin + step.ahead.get(r.host, 0.0)) for r in done]
            own = match_collectives(done, pieces)[1]
            for record, parts, worked in zip(done, pieces, own, strict=True):
                for span in _split_call(step.step, record, parts, worked):
                    cause = span.cause or about.get(record.call, "")
                    found[record.host].append((span._replace(cause=cause), record))
    for spans in found.values():
        spans.sort(key=lambda one: (one[0].start, one[0].end))
    return found


def _find_call_causes(step: RecordedStep) -> dict[int, str]:
    """Find what each call between two steps was made for, such as an evaluation or a checkpoint;
    empty if unknown."""
    found = {}
    for record in step.between:
        start = record.start - step.ahead.get(record.host, 0.0)
        found[record.call] = next(
            (span.phase for span in step.driver if span.start <= start <= span.end), ""
        )
    return found


def _split_call(
    step: int, record: CallRecord, pieces: Sequence[CallSegment], own: Sequence[float]
) -> Iterator[DeviceSpan]:
    lengths = [piece.end - piece.start for piece in pieces]
    longest = lengths.index(max(lengths))
    named = [piece.phase for piece in pieces if piece.phase != OTHER_PHASE]
    main = name_phase(record, max(named, key=record.phases.__getitem__) if named else OTHER_PHASE)
    for number, (piece, seconds) in enumerate(zip(pieces, own, strict=True)):
        phase = main if piece.phase == OTHER_PHASE else name_phase(record, piece.phase)
        start, end = piece.start, piece.end
        worked = min(end, start + seconds)
        tokens = record.tokens if number == longest else 0
        call = record.host, step, record.role, record.rank, record.method
        yield DeviceSpan(*call, phase, start, worked, tokens)
        if end - worked > _LEAST_SECONDS:  # ranks of a collective end together: it waited at last
            yield DeviceSpan(*call, IDLE, worked, end, cause=WAIT_FOR_PEERS)


def name_phase(record: CallRecord, phase: str) -> str:
    """Map a recorded phase to one of the displayed phases."""
    if record.role == DRIVER_ROLE:
        return ADVANTAGE
    if record.method in _SAVING:
        return SAVE
    if phase == "score":
        return LOG_PROB if "log_prob" in record.method else SCORE
    return {"train": UPDATE, "generate": GENERATE, "sync": SYNC}.get(phase, OTHER_PHASE)


class _CallSpan(NamedTuple):
    """A call of all its ranks, as one span."""

    number: int
    start: float
    end: float
    cause: str
    devices: frozenset[int]


class IdleCauses:
    """The causes of idle time, found from what the driver and other calls did meanwhile.

    Args:
        steps: That were recorded.
        origin: The moment, of the epoch, from which seconds are counted.
    """

    def __init__(self, steps: Sequence[RecordedStep], origin: float) -> None:
        self._windows = [(step.end - origin, step.step) for step in steps]
        self._driver = sorted(
            (span.start - origin, span.end - origin, span.phase)
            for step in steps
            for span in step.driver
        )
        self._calls = sorted(_build_call_spans(steps, origin), key=lambda call: call.start)
        self._starts = [call.start for call in self._calls]
        self._longest = max((call.end - call.start for call in self._calls), default=0.0)

    def idle(
        self, device: int, start: float, end: float, until: CallRecord | None
    ) -> Iterator[DeviceSpan]:
        """Split a time without calls into idle spans, one for each cause.

        Args:
            until: The call that ended it; None: none came.
        """
        first = bisect_left(self._starts, start - self._longest)
        behind = bisect_left(self._starts, end)
        running = [
            call
            for call in self._calls[first:behind]
            if call.end > start and (until is None or call.number < until.call)
        ]
        doing = [one for one in self._driver if one[1] > start and one[0] < end]
        moments = [moment for begin, finish, _ in doing for moment in (begin, finish)]
        moments += [moment for call in running for moment in (call.start, call.end)]
        moments += [moment for moment, _ in self._windows]
        edges = [start, *sorted({moment for moment in moments if start < moment < end}), end]

        def reason(piece: tuple[float, float]) -> tuple[str, int]:
            middle = (piece[0] + piece[1]) / 2
            cause = self._cause(device, middle, until, running, doing)
            window = min(bisect_left(self._windows, (middle, -1)), len(self._windows) - 1)
            return cause, self._windows[window][1]

        for (cause, step), some in groupby(pairwise(edges), key=reason):
            alike = list(some)
            begins, ends = alike[0][0], alike[-1][1]
            yield DeviceSpan(device, step, "", -1, "", IDLE, begins, ends, cause=cause)

    def _cause(
        self,
        device: int,
        moment: float,
        until: CallRecord | None,
        running: Sequence[_CallSpan],
        doing: Sequence[tuple[float, float, str]],
    ) -> str:
        acts = [phase for begin, end, phase in doing if begin <= moment < end]
        if aside := next((act for act in acts if act != DATA), ""):
            return aside
        now = [call for call in running if call.start <= moment < call.end]
        needed = [call for call in now if until is not None and call.number in until.reads]
        if not needed and DATA in acts:
            return DATA
        if until is None and now:
            return NO_MORE_WORK
        for call in [*needed, *now[::-1]]:
            return WAIT_FOR_PEERS if device in call.devices else call.cause
        return DRIVER_ROLE if until is not None or not running else NO_MORE_WORK


def _build_call_spans(steps: Sequence[RecordedStep], origin: float) -> Iterator[_CallSpan]:
    for step in steps:
        by_number: dict[int, list[CallRecord]] = defaultdict(list)
        for record in (*step.records, *step.between):
            by_number[record.call].append(record)
        for number, ranks in by_number.items():
            shifts: Mapping[int, float] = step.ahead
            start = min(rank.start - shifts.get(rank.host, 0.0) for rank in ranks) - origin
            end = max(rank.end - shifts.get(rank.host, 0.0) for rank in ranks) - origin
            first = ranks[0]
            phase = name_phase(
                first, max(first.phases, key=first.phases.__getitem__, default=OTHER_PHASE)
            )
            cause = f"{first.role}.{phase}" if first.role != DRIVER_ROLE else phase
            yield _CallSpan(number, start, end, cause, frozenset(rank.host for rank in ranks))

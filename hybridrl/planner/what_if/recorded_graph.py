"""The graph of what was done, from the records of calls: to be replayed, as it was or changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from hybridrl.batch.call_record import DRIVER_ROLE, CallRecord
from hybridrl.planner.step.graph_replay import NO_PLACE, WorkGraph, WorkNode

OTHER_PHASE = "other"
"""What a call does outside of its phases."""
BESIDE = ", beside"
"""The end of the name of a place that is a device's second thread."""
_MIN_SEGMENT_SECONDS = 1e-4
"""Less between two phases is not worth a node."""
_MIN_WAIT_SECONDS = 1e-3
"""Ranks that waited longer may have waited for each other."""
_SEND_METHOD, _RECEIVE_METHOD = "send_weights", "receive_weights"
"""Methods of two roles that move weights together: the call of the one comes right after that of
the other."""
_END_TOLERANCE = 0.05
"""As a share of what they did: ranks of a collective were seen to end no farther apart."""


class CallSegment(NamedTuple):
    """A segment of a call: one of its phases, or the time between two of them.

    Attributes:
        start, end: Seconds, as in its record.
        waited: Of these, for other ranks.
    """

    phase: str
    start: float
    end: float
    waited: float


def build_recorded_graph(
    records: Sequence[CallRecord],
    begin: float | None = None,
    end: float | None = None,
    offsets: Mapping[int, float] | None = None,
) -> WorkGraph:
    """Build the graph of the calls of one step or of several.

    A call comes after those whose results it was given, and after what ran on its devices before;
    what ran beside other calls has places of its own, behind those of the devices.
    What passed besides until it began is its lag: replayed as it is, the graph takes as long as it
    took.

    Args:
        records: One per call and rank, as an executor gives them.
        begin, end: When the driver began and ended, seconds since the epoch by its clock; None:
            with the first and the last call.
        offsets: Seconds that the clock of a device's host is ahead of the driver's, by device.
    """
    # Hosts work in the order of calls.
    done = sorted((r for r in records if r.host >= 0 and r.end), key=lambda r: (r.call, r.rank))
    shift = {record.host: (offsets or {}).get(record.host, 0.0) for record in done}
    starts = [record.start - shift[record.host] for record in done]
    origin = min([*starts, *([] if begin is None else [begin])], default=0.0)
    places = max((record.host for record in done), default=-1) + 1
    first = min(starts, default=origin) - origin
    names = [f"device {place}" for place in range(places)]
    lanes = {host: places + n for n, host in enumerate(sorted({r.host for r in done if r.beside}))}
    names += [f"device {host}{BESIDE}" for host in lanes]
    nodes = [WorkNode(DRIVER_ROLE, "begin", 0, 0, max(0.0, first))]
    ends = [nodes[0].seconds]
    pieces = [split_call(record, shift[record.host] + origin) for record in done]
    together, own, wire = match_collectives(done, pieces)
    last_of_call: dict[int, list[int]] = {}
    last_of_place: dict[int, int] = {}
    for number, record in enumerate(done):
        after = [node for call in record.reads for node in last_of_call.get(call, ())] or [0]
        place = lanes[record.host] if record.beside else record.host
        before = last_of_place.get(place, 0)
        ready = max(ends[node] for node in (*after, before))
        begins = record.start - shift[record.host] - origin
        lag = max(0.0, begins - ready)
        for segment, piece in enumerate(pieces[number]):
            nodes.append(
                WorkNode(
                    record.role,
                    piece.phase,
                    segment,
                    record.rank,
                    own[number][segment],
                    place,
                    tuple(after),
                    lag,
                    together[number][segment],
                    record.tokens,
                    wire[number][segment],
                )
            )
            ends.append(piece.end)
            after, lag = [len(nodes) - 1], 0.0
        last_of_place[place] = len(nodes) - 1
        last_of_call.setdefault(record.call, []).append(len(nodes) - 1)
    after_all = tuple(node for some in last_of_call.values() for node in some) or (0,)
    rest = 0.0 if end is None else max(0.0, end - origin - max(ends))
    nodes.append(WorkNode(DRIVER_ROLE, "end", 0, 0, rest, after=after_all))
    return WorkGraph(nodes, names)


def split_call(record: CallRecord, zero: float) -> list[CallSegment]:
    """Split a call into its phases and the gaps between them, without overlap.

    Args:
        zero: What its clock showed at the moment from which the pieces are counted: only by one
            clock it can be seen which ranks ended together.
    """
    found: list[CallSegment] = []
    at = record.start
    for span in sorted(record.spans, key=lambda span: span.start):
        start, end = max(at, span.start), min(span.end, record.end)
        if end <= start:
            continue
        if start - at > _MIN_SEGMENT_SECONDS:
            found.append(CallSegment(OTHER_PHASE, at, start, 0.0))
            at = start
        found.append(CallSegment(span.phase, at, end, min(span.waited, end - at)))
        at = end
    if record.end - at > _MIN_SEGMENT_SECONDS or not found:
        found.append(CallSegment(OTHER_PHASE, at, record.end, 0.0))
    else:
        found[-1] = found[-1]._replace(end=record.end)
    rest = (record.waited or 0.0) - sum(piece.waited for piece in found)
    others = [number for number, piece in enumerate(found) if piece.phase == OTHER_PHASE]
    if rest > 0 and others:
        longest = max(others, key=lambda number: found[number].end - found[number].start)
        piece = found[longest]
        found[longest] = piece._replace(waited=min(rest, piece.end - piece.start))
    return [one._replace(start=one.start - zero, end=one.end - zero) for one in found]


def match_collectives(
    records: Sequence[CallRecord], pieces: Sequence[Sequence[CallSegment]]
) -> tuple[list[list[int]], list[list[float]], list[list[float]]]:
    """Match the segments of different ranks that ended together: return for each segment the number
    of its collective, its seconds without waiting for slower ranks, and of these the seconds of the
    link, which are those that the rank that waited least did wait."""
    wire = [[0.0] * len(some) for some in pieces]
    together = [[NO_PLACE] * len(some) for some in pieces]
    own = [[piece.end - piece.start for piece in some] for some in pieces]
    by_call: dict[int, list[int]] = {}
    sent = {record.call for record in records if record.method == _SEND_METHOD}
    for number, record in enumerate(records):
        receives = record.method == _RECEIVE_METHOD and record.call - 1 in sent
        by_call.setdefault(record.call - receives, []).append(number)
    made = 0
    for members in by_call.values():
        if len(members) < 2:
            continue
        for segments in _alike([pieces[number] for number in members]):
            of_ranks = [pieces[n][s] for n, s in zip(members, segments, strict=True)]
            lengths = [piece.end - piece.start for piece in of_ranks]
            apart = max(p.end for p in of_ranks) - min(p.end for p in of_ranks)
            waited = max(piece.waited for piece in of_ranks)
            if waited < _MIN_WAIT_SECONDS:
                continue
            least = min(piece.waited for piece in of_ranks)
            end_together = apart <= max(_MIN_WAIT_SECONDS, _END_TOLERANCE * max(lengths))
            for number, segment, piece in zip(members, segments, of_ranks, strict=True):
                wire[number][segment] = least
                if end_together:
                    together[number][segment] = made
                    own[number][segment] -= piece.waited - least
            made += end_together
    return together, own, wire


def _alike(of_ranks: Sequence[Sequence[CallSegment]]) -> Iterator[tuple[int, ...]]:
    """Yield, for each segment that all ranks have, its index on each rank: the first training of
    one rank matches the first training of the others."""
    places: list[dict[str, list[int]]] = []
    for some in of_ranks:
        places.append({})
        for number, piece in enumerate(some):
            places[-1].setdefault(piece.phase, []).append(number)
    for phase, mine in places[0].items():
        if all(len(others.get(phase, ())) == len(mine) for others in places):
            yield from zip(*(others[phase] for others in places), strict=True)

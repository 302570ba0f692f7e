"""Cutting a plan into rounds of bounded size.

What a rank sends to the same receivers is a *stream*. All streams are cut into as many parts as
there are rounds, so that every rank sends, and receives, about as much in each round, whatever it
sends to whom; and nobody needs to know more of the others than how much the busiest of them has to
do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch

from hybridrl.errors import ConfigError
from hybridrl.layout.boxes import Box, boxes_of_range, extent, volume
from hybridrl.layout.tensor_layout import Move, Plan
from hybridrl.weights.weight_transport import Traffic

AT_ONCE = 4
"""Parts of a bucket: two rounds, of which one is packed or unpacked while the other travels, each
with what is sent and what is received."""


class Stream(NamedTuple):
    """What a rank sends the same to one or more others, in the order of the plan.

    Attributes:
        size: Elements.
    """

    sender: int
    receivers: tuple[int, ...]
    moves: tuple[Move, ...]
    size: int


class Schedule(NamedTuple):
    """How streams are cut.

    Attributes:
        rounds: In so many parts.
        grain: A part may end so many elements early, to end with a row of its tensor.
    """

    rounds: int
    grain: int


class Load(NamedTuple):
    """What a rank has to do in one direction, the busier one.

    Attributes:
        messages: Parts of streams in a round, one for each receiver.
        elements: In all rounds.
    """

    messages: int = 0
    elements: int = 0


def streams_of(moves: Iterable[Move]) -> list[Stream]:
    """The streams, in an order that all ranks agree on."""
    found: defaultdict[tuple[int, tuple[int, ...]], list[Move]] = defaultdict(list)
    for move in moves:
        found[move.sender, move.receivers].append(move)
    return [
        Stream(*ends, tuple(found[ends]), sum(volume(move.box) for move in found[ends]))
        for ends in sorted(found)
    ]


def loads_of(streams: Iterable[Stream]) -> dict[int, Load]:
    """What each rank has to do, as far as these streams tell."""
    messages: defaultdict[tuple[int, bool], int] = defaultdict(int)
    elements: defaultdict[tuple[int, bool], int] = defaultdict(int)
    for stream in streams:
        ends = [(stream.sender, True)] * len(stream.receivers)
        for end in [*ends, *((rank, False) for rank in stream.receivers)]:
            messages[end] += 1
            elements[end] += stream.size
    return {
        rank: Load(
            max(messages[rank, True], messages[rank, False]),
            max(elements[rank, True], elements[rank, False]),
        )
        for rank in {rank for rank, _ in messages}
    }


def busiest(loads: Iterable[Load]) -> Load:
    """The most of everything."""
    found = list(loads)
    most = (max((load[i] for load in found), default=0) for i in range(2))
    return Load(*most)


def room_of(bucket_bytes: int, dtype: torch.dtype) -> int:
    """How many elements a rank may send, and receive, in one round.

    Raises:
        ConfigError: if it is none.
    """
    if bucket_bytes < AT_ONCE * dtype.itemsize:
        raise ConfigError(
            f"bucket_bytes={bucket_bytes} cannot hold what is sent and received in two rounds, an "
            f"element each. Set it to {AT_ONCE * dtype.itemsize} or more."
        )
    return bucket_bytes // (AT_ONCE * dtype.itemsize)


def schedule(most: Load, room: int) -> Schedule:
    """How to cut all streams so that no rank has more than `room` elements in a round.

    Args:
        most: Of the busiest rank.

    Raises:
        ConfigError: if there is not room for an element of each message.
    """
    if most.elements <= room:
        return Schedule(min(1, most.elements), 0)
    if most.messages >= room:
        raise ConfigError(
            f"A rank sends or receives {most.messages} messages at once, and bucket_bytes leaves "
            f"room for {room} elements. Set bucket_bytes to more than {AT_ONCE * most.messages} "
            "elements."
        )
    # An eighth of the room for ending with whole rows, which need fewer copies.
    grain = max(room // 8 // most.messages - 1, 0)
    return Schedule(-(-most.elements // (room - most.messages * (1 + grain))), grain)


def parts_of(stream: Stream, cut: Schedule) -> list[list[Move]]:
    """The moves of each round."""
    found: list[list[Move]] = [[] for _ in range(cut.rounds)]
    index = before = 0
    for move in stream.moves:
        size, row, start = volume(move.box), (extent(move.box) or (1,))[-1], 0
        while start < size:
            stop = min(size, stream.size * (index + 1) // cut.rounds - before)
            if stop < size and stop % row <= cut.grain:
                stop -= stop % row
            if stop > start:
                found[index] += _between(move, start, stop, size)
                start = stop
            if start < size:
                index += 1
        before += size
    return found


def count(plan: Plan, dtype: torch.dtype, bucket_bytes: int) -> dict[int, Traffic]:
    """What executing a whole plan costs each rank that has a part in it."""
    streams = streams_of(plan.moves)
    cut = schedule(busiest(loads_of(streams).values()), room_of(bucket_bytes, dtype))
    held: defaultdict[int, list[int]] = defaultdict(lambda: [0] * cut.rounds)
    for stream in streams:
        for index, moves in enumerate(parts_of(stream, cut)):
            size = sum(volume(move.box) for move in moves)
            held[stream.sender][index] += size * len(stream.receivers)
            for rank in stream.receivers:
                held[rank][index] += size
    copied: defaultdict[int, int] = defaultdict(int)
    for move in plan.copies:
        copied[move.sender] += volume(move.box)
    received, sent, size = plan.received(), plan.sent(), dtype.itemsize
    return {
        rank: Traffic(
            received[rank] * size,
            sent[rank] * size,
            copied[rank] * size,
            cut.rounds,
            most_at_once(held[rank]) * size,
        )
        for rank in sorted(held.keys() | copied.keys())
    }


def most_at_once(sizes: list[int]) -> int:
    """The largest sum of two rounds that follow each other, of the sizes of all."""
    return max((sum(sizes[i : i + 2]) for i in range(len(sizes))), default=0)


def _between(move: Move, start: int, stop: int, size: int) -> list[Move]:
    """A move's elements `[start, stop)` of `size`, in order, in few boxes."""
    if stop - start == size:
        return [move]
    corner = [low for low, _ in move.box]
    inner = boxes_of_range(extent(move.box), start, stop)
    return [move.part(_moved(box, corner)) for box in inner]


def _moved(box: Box, corner: list[int]) -> Box:
    return tuple((low + by, high + by) for (low, high), by in zip(box, corner, strict=True))

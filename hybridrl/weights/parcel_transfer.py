"""Execution of a plan between groups that share no process group, by parcels that others carry.

The plan is made of two layouts with different rank numbers (`TensorLayout.shifted`). Senders make
parcels, anything that can carry bytes brings them - an object store, files - and receivers take
them, in any order. What several receivers need is one parcel, for all of them to read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.errors import ConfigError, LayoutError
from hybridrl.layout.boxes import Box, box_numel, box_shape, flat_range_boxes
from hybridrl.layout.tensor_layout import (
    TensorMove,
    TensorSink,
    TensorSource,
    TransferPlan,
    TransferTraffic,
    count_elements,
    pack_moves,
    unpack_moves,
)

DEFAULT_PARCEL_BYTES = 16 << 20
"""Largest parcel: as large as what processes without a GPU copy best."""

ParcelManifest = Sequence[tuple[tuple[int, ...], int]]
"""A sender's parcels, in order: receivers, and how many parcels in a row are for them."""


class ParcelKey(NamedTuple):
    """The key of a parcel: the rank that sends it, and its number, from 0, among that rank's."""

    sender: int
    number: int


WeightParcel = tuple[ParcelKey, Tensor]
"""The bytes that one rank sends to some others at once, ``[bytes]`` uint8; they are in CPU memory
unless they were asked for elsewhere."""


class ParcelSender:
    """The parcels that one rank sends, packed each time there are new weights.

    Args:
        plan: Between two groups; the rank's part of it is enough.
        parcel_bytes: Size of the largest parcel.

    Attributes:
        rank: The sender.
        manifest: For the receivers.

    Raises:
        LayoutError: if the plan's layouts share rank numbers, so that there is something to copy
            and not to send.
    """

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        dtype: torch.dtype,
        parcel_bytes: int = DEFAULT_PARCEL_BYTES,
    ) -> None:
        if plan.copies:
            raise LayoutError(
                f"The plan copies inside rank {plan.copies[0].sender}; parcels travel between "
                "groups. Plan between layouts with different rank numbers: "
                "`target.shifted(senders)`."
            )
        self.rank, self._dtype = rank, dtype
        streams = [s for s in group_into_streams(plan.moves) if s.sender == rank]
        parts = [_parts(stream, dtype, parcel_bytes) for stream in streams]
        self.manifest: ParcelManifest = [
            (stream.receivers, len(moves)) for stream, moves in zip(streams, parts, strict=True)
        ]
        self._parcels = [moves for of_stream in parts for moves in of_stream]

    def pack(
        self, read: TensorSource, device: torch.device | None = None
    ) -> Iterator[WeightParcel]:
        """Yield the parcels with the current values, in memory of this device (None: CPU)."""
        for number, moves in enumerate(self._parcels):
            buffer = torch.empty(count_elements(moves), dtype=self._dtype, device=device)
            pack_moves(moves, read, buffer)
            yield ParcelKey(self.rank, number), buffer.view(torch.uint8)


class ParcelReceiver:
    """The parcels that one rank receives, and where their values go.

    Args:
        plan, dtype, parcel_bytes: As the senders'.
        manifests: By sender.

    Attributes:
        wanted: Every parcel that the rank needs.

    Raises:
        LayoutError: if the manifests are of another plan.
    """

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        dtype: torch.dtype,
        manifests: Mapping[int, ParcelManifest],
        parcel_bytes: int = DEFAULT_PARCEL_BYTES,
    ) -> None:
        self._rank, self._dtype = rank, dtype
        self._moves: dict[ParcelKey, list[TensorMove]] = {}
        for stream in group_into_streams(plan.moves):
            if rank not in stream.receivers:
                continue
            parts = _parts(stream, dtype, parcel_bytes)
            first = 0
            for receivers, count in manifests[stream.sender]:
                if receivers == stream.receivers and count == len(parts):
                    numbers = range(first, first + count)
                    self._moves |= {
                        ParcelKey(stream.sender, n): moves
                        for n, moves in zip(numbers, parts, strict=True)
                    }
                    break
                first += count
            else:
                raise LayoutError(
                    f"Rank {stream.sender} does not send what rank {rank} needs in {len(parts)} "
                    "parcels. Send with the plan, dtype and parcel_bytes of the receiver."
                )
        self.wanted = sorted(self._moves)

    def take(self, write: TensorSink, parcels: Iterable[WeightParcel]) -> TransferTraffic:
        """Write the values of parcels to their local tensors, in any order.

        Raises:
            LayoutError: if a parcel is missing, comes twice, is not for this rank or has another
                size than the plan says.
        """
        expected = dict(self._moves)
        received = largest = 0
        for key, data in parcels:
            moves = expected.pop(key, None)
            size = count_elements(moves or ()) * self._dtype.itemsize
            if size != data.nbytes or not moves:
                raise LayoutError(
                    f"Parcel {key.number} of rank {key.sender} has {data.nbytes} bytes; rank "
                    f"{self._rank} expected {size}. Hand it every parcel that it wants once."
                )
            unpack_moves(moves, write, data.view(self._dtype))
            received, largest = received + size, max(largest, size)
        if expected:
            sender, number = min(expected)
            raise LayoutError(
                f"{len(expected)} parcels for rank {self._rank} never came, the first of them "
                f"parcel {number} of rank {sender}. Hand every parcel of every sender to those "
                "that want it."
            )
        return TransferTraffic(received=received, rounds=1, buffer=largest)

    def elements(self, place: ParcelKey) -> int:
        """Return the number of elements of a wanted parcel."""
        return count_elements(self._moves[place])

    def put(self, write: TensorSink, place: ParcelKey, values: Tensor) -> None:
        unpack_moves(self._moves[place], write, values)


def _parts(stream: Stream, dtype: torch.dtype, parcel_bytes: int) -> list[list[TensorMove]]:
    """Return the moves of each parcel of a stream."""
    cut: RoundSchedule = schedule(RankLoad(1, stream.size), max(2, parcel_bytes // dtype.itemsize))
    return [moves for moves in split_stream(stream, cut) if moves]


AT_ONCE = 4
"""Parts of a bucket: two rounds, of which one is packed or unpacked while the other travels, each
with what is sent and what is received."""


class Stream(NamedTuple):
    """The moves that one rank sends to the same receivers, in the order of the plan.

    Attributes:
        size: Elements.
    """

    sender: int
    receivers: tuple[int, ...]
    moves: tuple[TensorMove, ...]
    size: int


class RoundSchedule(NamedTuple):
    """The number of rounds into which streams are cut, and how much a part may be shortened.

    Attributes:
        rounds: In so many parts.
        grain: A part may end so many elements early, to end with a row of its tensor.
    """

    rounds: int
    grain: int


class RankLoad(NamedTuple):
    """The messages and elements of a rank in its busier direction.

    Attributes:
        messages: Parts of streams in a round, one for each receiver.
        elements: In all rounds.
    """

    messages: int = 0
    elements: int = 0


def group_into_streams(moves: Iterable[TensorMove]) -> list[Stream]:
    """Group moves into streams, in an order that is the same on all ranks."""
    found: defaultdict[tuple[int, tuple[int, ...]], list[TensorMove]] = defaultdict(list)
    for move in moves:
        found[move.sender, move.receivers].append(move)
    return [
        Stream(*ends, tuple(found[ends]), count_elements(found[ends])) for ends in sorted(found)
    ]


def compute_rank_loads(streams: Iterable[Stream]) -> dict[int, RankLoad]:
    """Compute the load of each rank, as far as these streams show it."""
    messages: defaultdict[tuple[int, bool], int] = defaultdict(int)
    elements: defaultdict[tuple[int, bool], int] = defaultdict(int)
    for stream in streams:
        ends = [(stream.sender, True)] * len(stream.receivers)
        for end in [*ends, *((rank, False) for rank in stream.receivers)]:
            messages[end] += 1
            elements[end] += stream.size
    return {
        rank: RankLoad(
            max(messages[rank, True], messages[rank, False]),
            max(elements[rank, True], elements[rank, False]),
        )
        for rank in {rank for rank, _ in messages}
    }


def compute_round_capacity(bucket_bytes: int, dtype: torch.dtype) -> int:
    """Return how many elements a rank may send, and receive, in one round.

    Raises:
        ConfigError: if it is none.
    """
    if bucket_bytes < AT_ONCE * dtype.itemsize:
        raise ConfigError(
            f"bucket_bytes={bucket_bytes} cannot hold what is sent and received in two rounds, an "
            f"element each. Set it to {AT_ONCE * dtype.itemsize} or more."
        )
    return bucket_bytes // (AT_ONCE * dtype.itemsize)


def schedule(most: RankLoad, room: int) -> RoundSchedule:
    """Compute into how many rounds to cut all streams so that no rank exceeds `room` elements in a
    round.

    Args:
        most: Of the busiest rank.

    Raises:
        ConfigError: if there is not room for an element of each message.
    """
    if most.elements <= room:
        return RoundSchedule(min(1, most.elements), 0)
    if most.messages >= room:
        raise ConfigError(
            f"A rank sends or receives {most.messages} messages at once, and bucket_bytes leaves "
            f"room for {room} elements. Set bucket_bytes to more than {AT_ONCE * most.messages} "
            "elements."
        )
    # An eighth of the room for ending with whole rows, which need fewer copies.
    grain = max(room // 8 // most.messages - 1, 0)
    return RoundSchedule(-(-most.elements // (room - most.messages * (1 + grain))), grain)


def split_stream(stream: Stream, cut: RoundSchedule) -> list[list[TensorMove]]:
    """Return the moves of a stream in each round."""
    found: list[list[TensorMove]] = [[] for _ in range(cut.rounds)]
    index = before = 0
    for move in stream.moves:
        size, row, start = box_numel(move.box), (box_shape(move.box) or (1,))[-1], 0
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


def cut_into_rounds(
    moves: Iterable[TensorMove], group: dist.ProcessGroup, room: int
) -> list[list[tuple[Stream, list[TensorMove]]]]:
    """Cut the streams of this rank's moves into rounds, of which all ranks of the group have as
    many. Collective.

    Args:
        room: Elements that a rank may send, and receive, in one round.

    Returns:
        Of each round the streams, in the same order on all ranks, each with its moves.
    """
    streams = group_into_streams(moves)
    most = torch.tensor(compute_rank_loads(streams).get(group.rank(), RankLoad()))
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    cut = schedule(RankLoad(*most.tolist()), room)
    parts = [(stream, split_stream(stream, cut)) for stream in streams]
    return [[(stream, moves[index]) for stream, moves in parts] for index in range(cut.rounds)]


def max_adjacent_sum(sizes: list[int]) -> int:
    """Return the largest sum of two consecutive sizes."""
    return max((sum(sizes[i : i + 2]) for i in range(len(sizes))), default=0)


def _between(move: TensorMove, start: int, stop: int, size: int) -> list[TensorMove]:
    """Return a move's elements `[start, stop)` of `size` as moves of few boxes, in order."""
    if stop - start == size:
        return [move]
    corner = [low for low, _ in move.box]
    inner = flat_range_boxes(box_shape(move.box), start, stop)
    return [move.part(_moved(box, corner)) for box in inner]


def _moved(box: Box, corner: list[int]) -> Box:
    return tuple((low + by, high + by) for (low, high), by in zip(box, corner, strict=True))

"""Executing a plan between groups that share no process group: parcels that others carry.

The plan is made of two layouts with different rank numbers (`Layout.shifted`). Senders make
parcels, anything that can carry bytes brings them - an object store, files - and receivers take
them, in any order. What several receivers need is one parcel, for all of them to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.errors import LayoutError
from hybridrl.layout.boxes import volume
from hybridrl.layout.tensor_layout import Move, Plan
from hybridrl.weights.transfer_rounds import Load, Schedule, Stream, parts_of, schedule, streams_of
from hybridrl.weights.weight_transport import Read, Traffic, Write, pack, unpack

PARCEL_BYTES = 16 << 20
"""Largest parcel: as large as what processes without a GPU copy best."""

Manifest = Sequence[tuple[tuple[int, ...], int]]
"""A sender's parcels, in order: receivers, and how many parcels in a row are for them."""


class Place(NamedTuple):
    """Which parcel: the rank that sends it, and its number among that rank's."""

    sender: int
    number: int


class Parcel(NamedTuple):
    """What one rank sends others at once.

    Attributes:
        number: Among the sender's, from 0.
        data: Its bytes, ``[bytes]`` uint8, in CPU memory unless it was asked for elsewhere.
    """

    sender: int
    number: int
    data: Tensor


class Sender:
    """What one rank sends, cut into parcels; packed as often as there are new weights.

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
        self, plan: Plan, rank: int, dtype: torch.dtype, parcel_bytes: int = PARCEL_BYTES
    ) -> None:
        if plan.copies:
            raise LayoutError(
                f"The plan copies inside rank {plan.copies[0].sender}; parcels travel between "
                "groups. Plan between layouts with different rank numbers: "
                "`target.shifted(senders)`."
            )
        self.rank, self._dtype = rank, dtype
        streams = [s for s in streams_of(plan.moves) if s.sender == rank]
        parts = [_parts(stream, dtype, parcel_bytes) for stream in streams]
        self.manifest: Manifest = [
            (stream.receivers, len(moves)) for stream, moves in zip(streams, parts, strict=True)
        ]
        self._parcels = [moves for of_stream in parts for moves in of_stream]

    def pack(self, read: Read, device: torch.device | None = None) -> Iterator[Parcel]:
        """The parcels with the values of now, one by one, in memory of this device (None: CPU)."""
        for number, moves in enumerate(self._parcels):
            buffer = torch.empty(_volume(moves), dtype=self._dtype, device=device)
            pack(moves, read, buffer)
            yield Parcel(self.rank, number, buffer.view(torch.uint8))


class Receiver:
    """What one rank takes, from whom.

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
        plan: Plan,
        rank: int,
        dtype: torch.dtype,
        manifests: Mapping[int, Manifest],
        parcel_bytes: int = PARCEL_BYTES,
    ) -> None:
        self._rank, self._dtype = rank, dtype
        self._moves: dict[Place, list[Move]] = {}
        for stream in streams_of(plan.moves):
            if rank not in stream.receivers:
                continue
            parts = _parts(stream, dtype, parcel_bytes)
            first = 0
            for receivers, count in manifests[stream.sender]:
                if receivers == stream.receivers and count == len(parts):
                    numbers = range(first, first + count)
                    self._moves |= {
                        Place(stream.sender, n): moves
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

    def take(self, write: Write, parcels: Iterable[Parcel]) -> Traffic:
        """Writes parcels to their places, in the order in which they come.

        Raises:
            LayoutError: if a parcel is missing, comes twice, is not for this rank or has another
                size than the plan says.
        """
        expected = dict(self._moves)
        received = largest = 0
        for sender, number, data in parcels:
            moves = expected.pop(Place(sender, number), None)
            size = _volume(moves or ()) * self._dtype.itemsize
            if size != data.nbytes or not moves:
                raise LayoutError(
                    f"Parcel {number} of rank {sender} has {data.nbytes} bytes; rank {self._rank} "
                    f"expected {size}. Hand it every parcel that it wants once."
                )
            unpack(moves, write, data.view(self._dtype))
            received, largest = received + size, max(largest, size)
        if expected:
            sender, number = min(expected)
            raise LayoutError(
                f"{len(expected)} parcels for rank {self._rank} never came, the first of them "
                f"parcel {number} of rank {sender}. Hand every parcel of every sender to those "
                "that want it."
            )
        return Traffic(received=received, rounds=1, buffer=largest)

    def elements(self, place: Place) -> int:
        """Of a wanted parcel."""
        return _volume(self._moves[place])

    def put(self, write: Write, place: Place, values: Tensor) -> None:
        """Writes the values of one wanted parcel."""
        unpack(self._moves[place], write, values)


def _parts(stream: Stream, dtype: torch.dtype, parcel_bytes: int) -> list[list[Move]]:
    """The moves of each parcel of a stream."""
    cut: Schedule = schedule(Load(1, stream.size), max(2, parcel_bytes // dtype.itemsize))
    return [moves for moves in parts_of(stream, cut) if moves]


def _volume(moves: Iterable[Move]) -> int:
    return sum(volume(move.box) for move in moves)

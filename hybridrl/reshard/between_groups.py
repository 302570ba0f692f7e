"""Executing a plan between groups that share no process group: parcels that others carry.

The plan is made of two layouts with different rank numbers (`Layout.shifted`). Senders make
parcels, anything that can carry bytes brings them - an object store, files - and receivers take
them, in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.core.boxes import volume
from hybridrl.core.layout import Move, Plan
from hybridrl.errors import LayoutError
from hybridrl.reshard.parcels import (
    DEFAULT_BUCKET_BYTES,
    Read,
    Traffic,
    Write,
    bucket_elements,
    pack,
    rounds,
    unpack,
)


class Parcel(NamedTuple):
    """What one rank sends another in one round.

    Attributes:
        data: Its bytes, in CPU memory, ``[bytes]`` uint8.
    """

    round: int
    sender: int
    receiver: int
    data: Tensor


def send_parcels(
    plan: Plan,
    rank: int,
    read: Read,
    dtype: torch.dtype,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Iterator[Parcel]:
    """Makes the parcels of a sender one by one, none larger than half a bucket.

    Raises:
        LayoutError: if the plan's layouts share rank numbers, so that there is something to copy
            and not to send.
    """
    if plan.copies:
        raise LayoutError(
            f"The plan copies inside rank {plan.copies[0].sender}; parcels travel between groups. "
            "Plan between layouts with different rank numbers: `target.shifted(senders)`."
        )
    for (index, sender, receiver), moves in _parcels(plan, dtype, bucket_bytes).items():
        if sender == rank:
            buffer = torch.empty(sum(volume(move.box) for move in moves), dtype=dtype)
            pack(moves, read, buffer)
            yield Parcel(index, sender, receiver, buffer.view(torch.uint8))


def take_parcels(
    plan: Plan,
    rank: int,
    write: Write,
    parcels: Iterable[Parcel],
    dtype: torch.dtype,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Traffic:
    """Writes the parcels of a receiver to their places, in the order in which they come.

    Args:
        plan, dtype, bucket_bytes: The senders'.

    Raises:
        LayoutError: if a parcel is missing, comes twice, is not for this rank or has another size
            than the plan says.
    """
    expected = {
        key: moves for key, moves in _parcels(plan, dtype, bucket_bytes).items() if key[2] == rank
    }
    received = largest = 0
    indices = {key[0] for key in expected}
    for index, sender, receiver, data in parcels:
        moves = expected.pop((index, sender, receiver), None)
        size = sum(volume(move.box) for move in moves or ()) * dtype.itemsize
        if size != data.nbytes or not moves:
            raise LayoutError(
                f"Parcel {index} from rank {sender} to rank {receiver} has {data.nbytes} bytes; "
                f"rank {rank} expected {size}. Send every parcel once, with the plan, dtype and "
                "bucket_bytes of the receiver."
            )
        unpack(moves, write, data.view(dtype))
        received, largest = received + size, max(largest, size)
    if expected:
        index, sender, _ = min(expected)
        raise LayoutError(
            f"{len(expected)} parcels for rank {rank} never came, the first of them parcel {index} "
            f"from rank {sender}. Hand every parcel of every sender to its receiver."
        )
    return Traffic(received=received, rounds=len(indices), buffer=largest)


def parcel_keys(
    plan: Plan, dtype: torch.dtype, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> list[tuple[int, int, int]]:
    """Round, sender and receiver of every parcel, in the same order everywhere."""
    return sorted(_parcels(plan, dtype, bucket_bytes))


def _parcels(
    plan: Plan, dtype: torch.dtype, bucket_bytes: int
) -> dict[tuple[int, int, int], list[Move]]:
    """Moves by (round, sender, receiver)."""
    found: dict[tuple[int, int, int], list[Move]] = {}
    for index, moves in enumerate(rounds(plan, bucket_elements(bucket_bytes, dtype))):
        for move in moves:
            found.setdefault((index, move.sender, move.receiver), []).append(move)
    return found

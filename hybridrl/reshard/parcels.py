"""Cutting a plan into rounds of bounded size, and tensors into the bytes of a round.

Every rank computes the same rounds from the same plan, so that nothing but values is ever sent. A
*parcel* is what one rank sends another in one round: the values of their moves, one after the
other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.core.boxes import Box, extent, volume
from hybridrl.core.layout import Move, Place, Plan
from hybridrl.errors import ConfigError

Read = Callable[[str], Tensor]
"""Name of a local tensor of the source layout to the tensor itself."""

Write = Callable[[str, tuple[int, ...], Tensor], None]
"""(name of a local tensor of the target layout, start, values) puts values there. The values are
valid during the call only."""

DEFAULT_BUCKET_BYTES = 32 << 20
"""What bounds the memory of a transition beyond the weights themselves: large enough that the
latency of a round does not count, small enough that every round after the first finds its memory
warm (256 MiB take three times as long on CPUs)."""

_CLOSED = 15 / 16
"""A round that is this full for a rank is not tried again: saves time for a little room."""


@dataclass(frozen=True)
class Traffic:
    """What one rank did in a transition, in bytes on the wire.

    Attributes:
        received, sent: From and to other ranks.
        copied: From its own old tensors to its own new ones.
        rounds: Exchanges, the same number on all ranks.
        buffer: Most memory for what is sent and received, at one moment.
    """

    received: int = 0
    sent: int = 0
    copied: int = 0
    rounds: int = 0
    buffer: int = 0


def into(tensors: Mapping[str, Tensor]) -> Write:
    """Writes into these tensors, in place; casts where their dtype is another."""

    def write(name: str, start: tuple[int, ...], values: Tensor) -> None:
        view(tensors[name], start, tuple(values.shape)).copy_(values)

    return write


def view(tensor: Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """The part of `tensor` of this shape that begins at `start`."""
    return tensor[tuple(slice(at, at + n) for at, n in zip(start, shape, strict=True))]


def bucket_elements(bucket_bytes: int, dtype: torch.dtype) -> int:
    """How many elements fit into a bucket.

    Raises:
        ConfigError: if it cannot hold one to send and one to receive.
    """
    elements = bucket_bytes // dtype.itemsize
    if elements < 2:
        raise ConfigError(
            f"bucket_bytes={bucket_bytes} cannot hold one element to send and one to receive. "
            f"Set it to {2 * dtype.itemsize} or more; {DEFAULT_BUCKET_BYTES} suits most models."
        )
    return elements


def split(move: Move, most: int) -> Iterator[Move]:
    """The move in parts of at most `most` elements, cut along its longest dim."""
    return (move.part(box) for box in _split(move.box, most))


def _split(box: Box, most: int) -> Iterator[Box]:
    size = volume(box)
    if size <= most:
        yield box
        return
    dim = max(range(len(box)), key=lambda dim: extent(box)[dim])
    start, stop = box[dim]
    rows = max(most // (size // (stop - start)), 1)
    for low in range(start, stop, rows):
        part = (*box[:dim], (low, min(low + rows, stop)), *box[dim + 1 :])
        yield from _split(part, most)


def rounds(plan: Plan, bucket: int) -> list[list[Move]]:
    """The plan's moves in rounds, large ones split, nearly in the plan's order.

    In a round every rank sends at most half a bucket of elements and receives at most half a
    bucket, so that both directions of its link are at work. The moves of a round stand in the order
    of senders and receivers.
    """
    half = bucket // 2
    found: list[list[Move]] = []
    load: defaultdict[tuple[int, bool, int], int] = defaultdict(int)
    first_open: defaultdict[tuple[int, bool], int] = defaultdict(int)
    for whole in plan.moves:
        ends = ((whole.sender, True), (whole.receiver, False))
        for move in split(whole, half):
            size = volume(move.box)
            at = max(first_open[end] for end in ends)
            while max(load[*end, at] for end in ends) + size > half:
                at += 1
            if at == len(found):
                found.append([])
            found[at].append(move)
            for end in ends:
                load[*end, at] += size
                while load[*end, first_open[end]] > _CLOSED * half:
                    first_open[end] += 1
    return [sorted(moves, key=lambda move: (move.sender, move.receiver)) for moves in found]


def count(plan: Plan, dtype: torch.dtype, bucket_bytes: int) -> dict[int, Traffic]:
    """What executing the plan costs each rank that has a part in it."""
    exchanges = rounds(plan, bucket_elements(bucket_bytes, dtype))
    buffer: defaultdict[int, int] = defaultdict(int)
    for moves in exchanges:
        load: defaultdict[int, int] = defaultdict(int)
        for move in moves:
            load[move.sender] += volume(move.box)
            load[move.receiver] += volume(move.box)
        for rank, elements in load.items():
            buffer[rank] = max(buffer[rank], elements)
    copied: defaultdict[int, int] = defaultdict(int)
    for move in plan.copies:
        copied[move.receiver] += volume(move.box)
    received, sent, size = plan.received(), plan.sent(), dtype.itemsize
    return {
        rank: Traffic(
            received[rank] * size,
            sent[rank] * size,
            copied[rank] * size,
            len(exchanges),
            buffer[rank] * size,
        )
        for rank in sorted(buffer.keys() | copied.keys())
    }


@torch.no_grad()
def pack(moves: Iterable[Move], read: Read, buffer: Tensor) -> None:
    """Writes the moves' values into a flat buffer, cast to its dtype, one after the other."""
    at = 0
    for move in moves:
        size = volume(move.box)
        values = _values(read, move.source, move.box)
        buffer[at : at + size].view(values.shape).copy_(values)
        at += size


@torch.no_grad()
def unpack(moves: Iterable[Move], write: Write, buffer: Tensor) -> None:
    """Writes what `pack` put into the buffer to the moves' targets."""
    at = 0
    for move in moves:
        size = volume(move.box)
        write(*move.target, buffer[at : at + size].view(extent(move.box)))
        at += size


@torch.no_grad()
def copy(moves: Iterable[Move], read: Read, write: Write, dtype: torch.dtype, bucket: int) -> int:
    """Copies inside one rank, rounded to `dtype` as if they had been sent. Returns the elements."""
    copied = 0
    for whole in moves:
        # What is not `dtype` yet needs memory to be cast: a bucket, no more.
        for move in split(whole, bucket):
            write(*move.target, _values(read, move.source, move.box).to(dtype))
            copied += volume(move.box)
    return copied


def _values(read: Read, source: Place, box: Box) -> Tensor:
    return view(read(source.tensor), source.start, extent(box))

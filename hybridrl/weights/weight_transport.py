"""The interface between weight transports and tensors: sources, sinks and flat buffers of moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.layout.boxes import Box, Place, box_numel, box_shape, split_box
from hybridrl.layout.tensor_layout import TensorMove, TransferPlan

TensorSource = Callable[[str], Tensor]
"""Name of a local tensor of the source layout to the tensor itself."""

TensorSink = Callable[[str, tuple[int, ...], Tensor], None]
"""(name of a local tensor of the target layout, start, values) puts values there. The values are
valid during the call only."""


@dataclass(frozen=True)
class TransferTraffic:
    """The traffic of one rank in one transfer, in bytes on the wire.

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


def make_tensor_sink(tensors: Mapping[str, Tensor]) -> TensorSink:
    """Return a sink that copies values into these tensors, cast to their dtype."""

    def write(name: str, start: tuple[int, ...], values: Tensor) -> None:
        slice_at(tensors[name], start, tuple(values.shape)).copy_(values)

    return write


def slice_at(tensor: Tensor, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    """Return the part of `tensor` with this shape that begins at `start`."""
    return tensor[tuple(slice(at, at + n) for at, n in zip(start, shape, strict=True))]


@torch.no_grad()
def pack_moves(moves: Iterable[TensorMove], read: TensorSource, buffer: Tensor) -> None:
    """Write the values of moves into a flat buffer, cast to its dtype, one after the other."""
    at = 0
    for move in moves:
        size = box_numel(move.box)
        values = _values(read, move.source, move.box)
        buffer[at : at + size].view(values.shape).copy_(values)
        at += size


@torch.no_grad()
def unpack_moves(moves: Iterable[TensorMove], write: TensorSink, buffer: Tensor) -> None:
    """Write the values in a buffer of `pack_moves` to the targets of the moves."""
    at = 0
    for move in moves:
        size = box_numel(move.box)
        write(*move.target, buffer[at : at + size].view(box_shape(move.box)))
        at += size


@torch.no_grad()
def copy_moves(
    moves: Iterable[TensorMove],
    read: TensorSource,
    write: TensorSink,
    dtype: torch.dtype,
    most: int,
) -> int:
    """Copy values inside one process, rounded to `dtype` as if they had been sent, and return the
    number of elements.

    Args:
        most: Elements that may be in memory a second time: those of one cast.
    """
    copied = 0
    for whole in moves:
        for move in map(whole.part, split_box(whole.box, most)):
            write(*move.target, _values(read, move.source, move.box).to(dtype))
            copied += box_numel(move.box)
    return copied


def copy_all(
    plan: TransferPlan,
    reads: Mapping[int, TensorSource],
    writes: Mapping[int, TensorSink],
    dtype: torch.dtype,
    most: int,
) -> None:
    """Execute a plan whose ranks all live in this process; see `copy_moves`."""
    for move in (*plan.copies, *plan.moves):
        for receiver in move.receivers:
            copy_moves([move], reads[move.sender], writes[receiver], dtype, most)


def _values(read: TensorSource, source: Place, box: Box) -> Tensor:
    return slice_at(read(source.tensor), source.start, box_shape(box))

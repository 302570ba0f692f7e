"""Tensor layouts, which say which part of every tensor each rank holds, the transfer plans between
them, and the moves of a plan from one tensor to another.

Bringing weights from training to generation, weights between separate groups, checkpoints on
another number of ranks and elastic restarts are all a plan (`layout.transfer_planner`) between two
layouts, executed by another transport. All sizes are in elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.errors import LayoutError
from hybridrl.layout.box_table import BoxTable
from hybridrl.layout.boxes import (
    Box,
    Part,
    Piece,
    PieceTable,
    Place,
    RankPieces,
    box_numel,
    make_disjoint,
    split_box,
    subtract_boxes,
)


class TensorMove(NamedTuple):
    """A box of a global tensor to send from rank `sender` to all `receivers`, which store it at the
    same offset of their local tensors."""

    name: str
    box: Box
    sender: int
    receivers: tuple[int, ...]
    source: Place
    target: Place

    def part(self, box: Box) -> TensorMove:
        """Return the same move restricted to a smaller box inside this one."""
        source = Piece(self.box, *self.source).at(box)
        target = Piece(self.box, *self.target).at(box)
        return TensorMove(self.name, box, self.sender, self.receivers, source, target)


@dataclass(frozen=True)
class TensorLayout:
    """A map from ranks to the pieces of every tensor that they hold.

    Attributes:
        shapes: The global tensors, by their names in a checkpoint.
        pieces: By rank, then by global name. A rank that holds nothing may be missing; pieces of
            one rank may hold the same elements twice, as tied or fused parameters do.
    """

    shapes: Mapping[str, tuple[int, ...]]
    pieces: Mapping[int, RankPieces]

    def of(self, rank: int) -> TensorLayout:
        """Return the layout of one rank alone."""
        here = self.pieces.get(rank)
        return TensorLayout(self.shapes, {} if here is None else {rank: here})

    @cached_property
    def table(self) -> PieceTable:
        """The pieces as a table of all tensors."""
        if isinstance(self.pieces, PieceTable):
            return self.pieces
        return PieceTable.of(self.shapes, self.pieces)

    def shifted(self, by: int) -> TensorLayout:
        """Return the layout with ranks numbered from `by`, for a plan between separate worker
        groups."""
        return TensorLayout(self.shapes, {rank + by: here for rank, here in self.pieces.items()})

    def renamed(self, names: Mapping[str, str]) -> TensorLayout:
        """Return the layout of the tensors named in `names`, under their new names and in its
        order."""
        parts = {
            new: Part(name, self.shapes[name], "whole", lambda piece: piece)
            for name, new in names.items()
        }
        return self.parts(parts)

    def beside(self, other: TensorLayout) -> TensorLayout:
        """Return the tensors of this layout and of another one, whose ranks are the same."""
        return TensorLayout({**self.shapes, **other.shapes}, self.table.beside(other.table))

    def parts(self, parts: Mapping[str, Part]) -> TensorLayout:
        """Return the layout of tensors derived from those of this layout, by name."""
        shapes = {name: part.shape for name, part in parts.items()}
        return TensorLayout(shapes, self.table.parts(parts))


@dataclass(frozen=True)
class TransferPlan:
    """The moves and copies that bring tensors from one layout to another.

    Attributes:
        moves: Between ranks.
        copies: Inside one rank, from its old to its new tensors.
    """

    moves: tuple[TensorMove, ...]
    copies: tuple[TensorMove, ...]

    def of(self, rank: int) -> TransferPlan:
        """Return the moves and copies that one rank takes part in."""
        moves = (m for m in self.moves if m.sender == rank or rank in m.receivers)
        return TransferPlan(tuple(moves), tuple(m for m in self.copies if m.sender == rank))


def merge_layouts(layouts: Iterable[TensorLayout]) -> TensorLayout:
    """Merge several layouts into one, such as one from every rank.

    Raises:
        LayoutError: if two of them give a tensor different shapes, or speak of the same rank.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[int, RankPieces] = {}
    for layout in layouts:
        for name, shape in layout.shapes.items():
            check_same_shape(name, shapes.setdefault(name, shape), shape)
        if twice := pieces.keys() & layout.pieces.keys():
            raise LayoutError(f"Two layouts say what rank {min(twice)} holds; expected one.")
        pieces.update(layout.pieces)
    return TensorLayout(shapes, pieces)


def check_same_shape(name: str, first: Sequence[int], second: Sequence[int]) -> None:
    """Raise `LayoutError` if two layouts give a tensor different shapes."""
    if tuple(first) != tuple(second):
        raise LayoutError(
            f"Tensor `{name}` has shape {tuple(first)} in one layout and {tuple(second)} in the "
            "other; layouts describe the same global tensors."
        )


_NOTHING: RankPieces = {}


def compute_peak_elements(*layouts: TensorLayout) -> dict[int, int]:
    """Return for each rank the number of elements that it holds if it holds all these layouts at
    once, shared elements counted once: the peak of a transfer from one to the other without its
    buffers. For one layout, what it holds."""
    ranks = sorted({rank for layout in layouts for rank in layout.pieces})
    return {rank: _count(layout.pieces.get(rank, _NOTHING) for layout in layouts) for rank in ranks}


def compute_redundant_elements(source: TensorLayout, target: TensorLayout) -> dict[int, int]:
    """Return for each rank the number of elements of the source layout that the target layout does
    not hold there: the cost of keeping the source beside the target."""
    found = {}
    for rank, here in source.pieces.items():
        kept = target.pieces.get(rank, _NOTHING)
        found[rank] = sum(
            box_numel(part)
            for name, pieces in here.items()
            for box in make_disjoint(piece.box for piece in pieces)
            for part in subtract_boxes(box, [piece.box for piece in kept.get(name, ())])
        )
    return found


def _count(together: Iterable[RankPieces]) -> int:
    boxes: defaultdict[str, list[Box]] = defaultdict(list)
    for of_rank in together:
        for name, pieces in of_rank.items():
            boxes[name] += [piece.box for piece in pieces]
    return sum(box_numel(box) for of_name in boxes.values() for box in make_disjoint(of_name))


TensorSource = Callable[[str], Tensor]
"""Name of a local tensor of the source layout to the tensor itself."""

TensorSink = Callable[[BoxTable, Tensor], None]
"""(boxes in local tensors of the target layout, their values one after the other) puts values
there. The values are valid during the call only."""


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


def count_elements(moves: Iterable[TensorMove]) -> int:
    """Count the elements that moves bring to one receiver."""
    return sum(box_numel(move.box) for move in moves)


def make_tensor_sink(tensors: Mapping[str, Tensor]) -> TensorSink:
    """Return a sink that copies values into these tensors, cast to their dtype."""
    return lambda table, values: table.write(tensors.__getitem__, values)


def pack_moves(moves: Iterable[TensorMove], read: TensorSource, buffer: Tensor) -> None:
    """Write the values of moves into a flat buffer, cast to its dtype, one after the other."""
    moves = list(moves)
    BoxTable([move.source for move in moves], [move.box for move in moves]).read(read, buffer)


def unpack_moves(moves: Iterable[TensorMove], write: TensorSink, buffer: Tensor) -> None:
    """Write the values in a buffer of `pack_moves` to the targets of the moves."""
    moves = list(moves)
    write(BoxTable([move.target for move in moves], [move.box for move in moves]), buffer)


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
        most: Elements that may be in memory a second time.
    """
    copied = held = 0
    together: list[TensorMove] = []

    def copy() -> None:
        if together:
            buffer = torch.empty(held, dtype=dtype, device=read(together[0].source.tensor).device)
            pack_moves(together, read, buffer)
            unpack_moves(together, write, buffer)

    for whole in moves:
        for move in map(whole.part, split_box(whole.box, most)):
            size = box_numel(move.box)
            if held + size > most:
                copy()
                together, held = [], 0
            together.append(move)
            copied, held = copied + size, held + size
    copy()
    return copied

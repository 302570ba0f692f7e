"""Pieces: the parts of global tensors that ranks hold, and where in their memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybridrl.core.boxes import Box, boxes_of_range, volume


class Place(NamedTuple):
    """Where a box begins in a local tensor."""

    tensor: str
    start: tuple[int, ...]


class Piece(NamedTuple):
    """A part of a global tensor in the memory of a rank.

    Attributes:
        box: Which part. It may be empty.
        tensor: Name of the local tensor that holds it. It may differ from the global name: a
            fused parameter holds pieces of several tensors.
        start: Where the box begins in the local tensor, which has as many dims.
    """

    box: Box
    tensor: str
    start: tuple[int, ...]

    def at(self, box: Box) -> Place:
        """Where a smaller box inside this one begins."""
        inner = zip(self.start, self.box, box, strict=True)
        return Place(self.tensor, tuple(at + low - start for at, (start, _), (low, _) in inner))


OfRank = Mapping[str, tuple[Piece, ...]]
"""By global name what one rank holds."""


def local_pieces(name: str, box: Box) -> tuple[Piece, ...]:
    """The pieces of a rank whose local tensor, of the same name, is this box; none if it is empty.

    With `boxes.shard_box` the pieces of a DTensor or of a tensor-parallel shard.
    """
    return (Piece(box, name, (0,) * len(box)),) if volume(box) else ()


def flat_pieces(name: str, shape: Sequence[int], start: int, stop: int) -> tuple[Piece, ...]:
    """The pieces of a rank that holds elements ``[start, stop)`` of the flattened tensor.

    Each box is one run of the flat shard; as a local tensor of its own shape, a view of that run,
    it is called ``{name}/0``, ``{name}/1`` and so on.
    """
    boxes = boxes_of_range(shape, start, stop)
    return tuple(Piece(box, f"{name}/{i}", (0,) * len(box)) for i, box in enumerate(boxes))


@dataclass(frozen=True, eq=False)
class BoxTable(Mapping[int, OfRank]):
    """By rank the pieces of tensors that are held as `local_pieces`: one box each, or none.

    Layers are cut alike, so a model has few different columns of boxes, however many tensors and
    ranks it has: 70 billion parameters on 1,024 ranks take 4 MB.

    Attributes:
        ranks: Those that hold anything, ascending.
        columns: Different ways in which a tensor lies: for each of `ranks` its box, or None if it
            holds nothing.
        tensors: By global name the local name, and which of the columns is the tensor's.
    """

    ranks: tuple[int, ...]
    columns: tuple[tuple[Box | None, ...], ...]
    tensors: Mapping[str, tuple[str, int]]

    def __getitem__(self, rank: int) -> OfRank:
        if rank not in self.ranks:
            raise KeyError(rank)
        return _Row(self, self.ranks.index(rank))

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def holders(self, name: str) -> dict[int, tuple[Piece, ...]]:
        """By rank the piece of one tensor, of those ranks that hold any of it."""
        local, column = self.tensors[name]
        pairs = zip(self.ranks, self.columns[column], strict=True)
        return {rank: held for rank, box in pairs if (held := _pieces(local, box))}

    def shifted(self, by: int) -> BoxTable:
        """The same on ranks numbered from `by`."""
        return BoxTable(tuple(rank + by for rank in self.ranks), self.columns, self.tensors)

    def renamed(self, names: Mapping[str, str]) -> BoxTable:
        """The tensors that have a new global name in `names`, under it and in its order."""
        tensors = {new: self.tensors[name] for name, new in names.items()}
        return BoxTable(self.ranks, self.columns, tensors)


@dataclass(frozen=True, eq=False)
class _Row(Mapping[str, tuple[Piece, ...]]):
    """What one rank of a table holds, made when it is asked for."""

    table: BoxTable
    place: int

    def __getitem__(self, name: str) -> tuple[Piece, ...]:
        local, column = self.table.tensors[name]
        return _pieces(local, self.table.columns[column][self.place])

    def __iter__(self) -> Iterator[str]:
        return iter(self.table.tensors)

    def __len__(self) -> int:
        return len(self.table.tensors)


def _pieces(local: str, box: Box | None) -> tuple[Piece, ...]:
    return () if box is None else local_pieces(local, box)

"""Pieces: the parts of global tensors that ranks hold, and where in their memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hybridrl.layout.boxes import Box, volume


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


class Part(NamedTuple):
    """A tensor that is all, or a box, of another one.

    Attributes:
        of: The other one's global name.
        shape: Of the part.
        kind: The same for parts that are made alike.
        piece: What of a piece of the whole is in the part, as a piece of it; None: nothing. It may
            add to the name of the local tensor.
    """

    of: str
    shape: tuple[int, ...]
    kind: Hashable
    piece: Callable[[Piece], Piece | None]

    def pieces(self, held: Iterable[Piece]) -> tuple[Piece, ...]:
        """What is in the part of all that a rank holds of the whole."""
        return tuple(piece for piece in map(self.piece, held) if piece is not None)


OfRank = Mapping[str, tuple[Piece, ...]]
"""By global name what one rank holds."""


def local_pieces(name: str, box: Box) -> tuple[Piece, ...]:
    """The pieces of a rank whose local tensor, of the same name, is this box; none if it is
    empty."""
    return (Piece(box, name, (0,) * len(box)),) if volume(box) else ()


@dataclass(frozen=True, eq=False)
class PieceTable(Mapping[int, OfRank]):
    """By rank the pieces of tensors, of which many lie alike.

    A model's layers are cut alike, so there are few different columns, however many tensors and
    ranks it has: 70 billion parameters on 1,024 ranks take 10 MiB.

    Attributes:
        ranks: Those that hold anything, ascending.
        columns: Different ways in which a tensor lies: for each of `ranks` its pieces, with the end
            of the local tensor's name.
        tensors: By global name the beginning of the local names, and which of the columns it is.
    """

    ranks: tuple[int, ...]
    columns: tuple[tuple[tuple[Piece, ...], ...], ...]
    tensors: Mapping[str, tuple[str, int]]

    def __getitem__(self, rank: int) -> OfRank:
        return _Row(self, self._places[rank])

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    def holders(self, name: str) -> dict[int, tuple[Piece, ...]]:
        """By rank the pieces of one tensor, of those ranks that hold any of it."""
        begin, column = self.tensors[name]
        pairs = zip(self.ranks, self.columns[column], strict=True)
        return {rank: _named(begin, pieces) for rank, pieces in pairs if pieces}

    def tensor(self, name: str, rank: int, number: int) -> str:
        """The local tensor of one of the pieces of a rank."""
        begin, column = self.tensors[name]
        return begin + self.columns[column][self._places[rank]][number].tensor

    def shifted(self, by: int) -> PieceTable:
        """The same on ranks numbered from `by`."""
        return PieceTable(tuple(rank + by for rank in self.ranks), self.columns, self.tensors)

    def parts(self, parts: Mapping[str, Part]) -> PieceTable:
        """See `Layout.parts`."""
        columns: dict[tuple[int, Hashable], int] = {}
        found: list[tuple[tuple[Piece, ...], ...]] = []
        tensors = {}
        for name, part in parts.items():
            begin, column = self.tensors[part.of]
            if (column, part.kind) not in columns:
                columns[column, part.kind] = len(found)
                found.append(tuple(map(part.pieces, self.columns[column])))
            tensors[name] = (begin, columns[column, part.kind])
        return PieceTable(self.ranks, tuple(found), tensors)

    def beside(self, other: PieceTable) -> PieceTable:
        """See `Layout.beside`."""
        assert self.ranks == other.ranks
        first = len(self.columns)
        moved = {name: (begin, first + column) for name, (begin, column) in other.tensors.items()}
        return PieceTable(self.ranks, (*self.columns, *other.columns), {**self.tensors, **moved})

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, rank in enumerate(self.ranks)}


@dataclass(frozen=True, eq=False)
class _Row(Mapping[str, tuple[Piece, ...]]):
    """What one rank of a table holds, made when it is asked for."""

    table: PieceTable
    place: int

    def __getitem__(self, name: str) -> tuple[Piece, ...]:
        begin, column = self.table.tensors[name]
        return _named(begin, self.table.columns[column][self.place])

    def __iter__(self) -> Iterator[str]:
        return iter(self.table.tensors)

    def __len__(self) -> int:
        return len(self.table.tensors)


def _named(begin: str, pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    return tuple(Piece(piece.box, begin + piece.tensor, piece.start) for piece in pieces)

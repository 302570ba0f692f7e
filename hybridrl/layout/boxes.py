"""Boxes: parts of a tensor that are a range in every dim.

What one rank holds of a tensor is a few boxes, however the tensor was cut. All functions are pure
and count in elements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from hybridrl.errors import ConfigError

Box = tuple[tuple[int, int], ...]
"""``[start, stop)`` of each dim; ``()`` is the one element of a scalar."""

Cut = Callable[[int, int, int], tuple[int, int]]
"""(length, index, count) to the range that part `index` of `count` holds."""


def whole(shape: Iterable[int]) -> Box:
    """The box that holds all of a tensor."""
    return tuple((0, length) for length in shape)


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """Number of elements."""
    return math.prod([stop - start for start, stop in box])


def intersection(first: Box, second: Box) -> Box | None:
    """The elements that two boxes of one tensor share; None if there are none."""
    shared = []
    for (start, stop), (other_start, other_stop) in zip(first, second, strict=True):
        low = start if start > other_start else other_start
        high = stop if stop < other_stop else other_stop
        if low >= high:
            return None
        shared.append((low, high))
    return tuple(shared)


def relative(box: Box, outer: Box) -> Box:
    """A box counted from the first corner of one that it lies in."""
    pairs = zip(box, outer, strict=True)
    return tuple((start - origin, stop - origin) for (start, stop), (origin, _) in pairs)


def subtract(box: Box, hole: Box) -> list[Box]:
    """Disjoint boxes, two per dim at most, of what is in `box` and not in `hole`."""
    shared = intersection(box, hole)
    if shared is None:
        return [box] if volume(box) else []
    left = []
    for dim, ((start, stop), (low, high)) in enumerate(zip(box, shared, strict=True)):
        # Before this dim the boxes have the hole's ranges, after it those of the whole.
        left += [
            (*shared[:dim], side, *box[dim + 1 :])
            for side in ((start, low), (high, stop))
            if side[0] < side[1]
        ]
    return left


def subtract_all(box: Box, holes: Iterable[Box]) -> list[Box]:
    """Disjoint boxes of what is in `box` and in none of `holes`."""
    left = [box] if volume(box) else []
    for hole in holes:
        left = [part for piece in left for part in subtract(piece, hole)]
    return left


def disjoint(boxes: Iterable[Box]) -> list[Box]:
    """Disjoint boxes that together hold what any of `boxes` holds."""
    found: list[Box] = []
    for box in boxes:
        found += subtract_all(box, found)
    return found


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Elements ``[start, stop)`` of the flattened tensor: at most ``2 * ndim - 1`` boxes.

    The boxes come in the order of the elements and each is one run of them, so a flat shard is
    these boxes one after the other.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ConfigError(
            f"Elements {start} to {stop} are not a range of a tensor of shape {tuple(shape)}."
        )
    return _boxes_of_range(tuple(shape), start, stop)


def _boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if start == stop:
        return []
    if not shape:
        return [()]
    inner = shape[1:]
    row = math.prod(inner)
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        return _in_row(first, _boxes_of_range(inner, head, tail))
    boxes = []
    if head:
        boxes += _in_row(first, _boxes_of_range(inner, head, row))
        first += 1
    if first < last:
        boxes.append(((first, last), *whole(inner)))
    return boxes + _in_row(last, _boxes_of_range(inner, 0, tail))


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [((row, row + 1), *box) for box in boxes]


def runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """Where a box lies in the flattened tensor: (first element, number of elements) of each run, in
    order and as few as there are."""
    if not volume(box):
        return
    last = len(shape)  # the dims from here on are whole, so a run goes through them
    while last and box[last - 1] == (0, shape[last - 1]):
        last -= 1
    if not last:
        yield 0, volume(box)
        return
    strides = [math.prod(shape[dim + 1 :]) for dim in range(last)]
    start, stop = box[last - 1]
    found = [start * strides[-1]]  # a list at a time: of a tensor that is cut in columns a million
    for side, stride in zip(box[: last - 1], strides, strict=False):
        found = [at + place * stride for at in found for place in range(*side)]
    count = (stop - start) * strides[-1]
    for at in found:
        yield at, count


def windows(box: Box, most: int) -> Iterator[Box]:
    """The box in parts of at most `most` elements, at least 1, in the order of its elements: each
    is cut along the first dims, so that it has the longest runs."""
    size = volume(box)
    if size <= most:
        if size:
            yield box
        return
    dim = next(dim for dim, (start, stop) in enumerate(box) if stop - start > 1)
    start, stop = box[dim]
    rows = max(most // (size // (stop - start)), 1)
    for low in range(start, stop, rows):
        yield from windows((*box[:dim], (low, min(low + rows, stop)), *box[dim + 1 :]), most)


def chunk_range(length: int, index: int, count: int) -> tuple[int, int]:
    """The rule of `torch.chunk`, and so of DTensor and FSDP2: every part has ``ceil(length /
    count)`` elements until none are left; the last parts may be smaller or empty."""
    size = -(-length // count)
    return min(index * size, length), min((index + 1) * size, length)


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

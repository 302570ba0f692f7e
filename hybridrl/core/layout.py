"""Which rank holds which part of every tensor, and what must move from one layout to another.

Bringing weights from training to generation, weights between separate groups, checkpoints on
another number of ranks and elastic restarts are all `plan(source, target)`, executed by another
transport. Nothing here touches a tensor; all sizes are in elements.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hybridrl.core.boxes import Box, boxes_of_range, intersection, subtract, subtract_all, volume
from hybridrl.errors import LayoutError


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


class Place(NamedTuple):
    """Where a box begins in a local tensor."""

    tensor: str
    start: tuple[int, ...]


class Move(NamedTuple):
    """A box of a global tensor that rank `sender` has and rank `receiver` needs."""

    name: str
    box: Box
    sender: int
    receiver: int
    source: Place
    target: Place

    def part(self, box: Box) -> Move:
        """The same move of a smaller box inside this one."""
        source = Piece(self.box, *self.source).at(box)
        target = Piece(self.box, *self.target).at(box)
        return Move(self.name, box, self.sender, self.receiver, source, target)


_OfRank = Mapping[str, tuple[Piece, ...]]
_Need = tuple[Box, int, Piece]


@dataclass(frozen=True)
class Layout:
    """Which part of every tensor each rank holds.

    Attributes:
        shapes: The global tensors, by their names in a checkpoint.
        pieces: By rank, then by global name. A rank that holds nothing may be missing; pieces of
            one rank may hold the same elements twice, as tied or fused parameters do.
    """

    shapes: Mapping[str, tuple[int, ...]]
    pieces: Mapping[int, Mapping[str, tuple[Piece, ...]]]

    def shifted(self, by: int) -> Layout:
        """The same layout on ranks numbered from `by`, for a plan between separate groups."""
        return Layout(self.shapes, {rank + by: here for rank, here in self.pieces.items()})

    def renamed(self, names: Mapping[str, str]) -> Layout:
        """The tensors that have a new name in `names`, under it and in its order."""
        pieces = {
            rank: {new: here[name] for name, new in names.items() if name in here}
            for rank, here in self.pieces.items()
        }
        return Layout({new: self.shapes[name] for name, new in names.items()}, pieces)

    def to_json(self) -> str:
        """The layout as JSON text."""
        pieces = {str(rank): dict(here) for rank, here in self.pieces.items()}
        return json.dumps({"shapes": dict(self.shapes), "pieces": pieces})

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """The layout that `to_json` wrote."""
        read = json.loads(text)
        return cls(
            {name: tuple(shape) for name, shape in read["shapes"].items()},
            {
                int(rank): {name: tuple(map(_piece, pieces)) for name, pieces in here.items()}
                for rank, here in read["pieces"].items()
            },
        )


@dataclass(frozen=True)
class Plan:
    """What brings tensors from one layout to another.

    Attributes:
        moves: Between two ranks.
        copies: Inside one rank, from its old to its new tensors.
    """

    moves: tuple[Move, ...]
    copies: tuple[Move, ...]

    def received(self) -> Counter[int]:
        """Elements that each rank gets from others."""
        found: Counter[int] = Counter()
        for move in self.moves:
            found[move.receiver] += volume(move.box)
        return found

    def sent(self) -> Counter[int]:
        """Elements that each rank gives to others."""
        found: Counter[int] = Counter()
        for move in self.moves:
            found[move.sender] += volume(move.box)
        return found

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps({"moves": self.moves, "copies": self.copies})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote."""
        read = json.loads(text)
        return cls(tuple(map(_move, read["moves"])), tuple(map(_move, read["copies"])))


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


def join(layouts: Iterable[Layout]) -> Layout:
    """One layout of what several say, such as every rank of itself.

    Raises:
        LayoutError: if two of them give a tensor different shapes, or speak of the same rank.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[int, _OfRank] = {}
    for layout in layouts:
        for name, shape in layout.shapes.items():
            _check_shape(name, shapes.setdefault(name, shape), shape)
        if twice := pieces.keys() & layout.pieces.keys():
            raise LayoutError(f"Two layouts say what rank {min(twice)} holds; expected one.")
        pieces.update(layout.pieces)
    return Layout(shapes, pieces)


def plan(source: Layout, target: Layout) -> Plan:
    """What to move so that every element of `target` is written once.

    An element that a rank has is copied there; any other is sent by one rank that has it, so no
    plan moves less. (A target that holds an element in two places on one rank gets it twice.)
    Where several ranks have a box, those that need it are dealt over them so that all senders end
    at the same number of elements; low ranks serve low ranks, which keeps the traffic of replicas
    that stand side by side inside each of them. Equal layouts give equal plans.

    Raises:
        LayoutError: if the source lacks a tensor or a part of it, or has it in another shape.
    """
    moves: list[Move] = []
    copies: list[Move] = []
    load: Counter[int] = Counter()
    for name, shape in sorted(target.shapes.items()):
        if name not in source.shapes:
            raise LayoutError(f"The source layout has no tensor `{name}`, which the target needs.")
        _check_shape(name, source.shapes[name], shape)
        here = {rank: of_rank.get(name, ()) for rank, of_rank in sorted(source.pieces.items())}
        atoms = _atoms(here)
        needs: list[list[_Need]] = [[] for _ in atoms]
        for receiver in sorted(target.pieces):
            for piece in target.pieces[receiver].get(name, ()):
                left = [piece.box] if volume(piece.box) else []
                for own in here.get(receiver, ()):
                    for box in left:
                        shared = intersection(box, own.box)
                        if shared is not None:
                            copies.append(_between(name, shared, receiver, own, receiver, piece))
                    left = [part for box in left for part in subtract(box, own.box)]
                for box in left:
                    missing = volume(box)
                    for (atom, _), wanted in zip(atoms, needs, strict=True):
                        shared = intersection(box, atom)
                        if shared is not None:
                            wanted.append((shared, receiver, piece))
                            missing -= volume(shared)
                    if missing:
                        lost = subtract_all(box, [atom for atom, _ in atoms])[0]
                        raise LayoutError(
                            f"No rank of the source layout holds {list(lost)} of tensor `{name}`, "
                            f"which rank {receiver} of the target layout needs."
                        )
        for (_, holders), wanted in zip(atoms, needs, strict=True):
            for sender, (box, receiver, piece) in _deal(wanted, holders, load):
                moves.append(_between(name, box, sender, holders[sender], receiver, piece))
    return Plan(tuple(moves), tuple(copies))


def _atoms(here: Mapping[int, tuple[Piece, ...]]) -> list[tuple[Box, dict[int, Piece]]]:
    """Disjoint boxes of everything that is held, each with the ranks that hold all of it."""
    by_box: dict[Box, dict[int, Piece]] = {}
    for rank, pieces in here.items():
        for piece in pieces:
            if volume(piece.box):
                by_box.setdefault(piece.box, {}).setdefault(rank, piece)
    atoms: list[tuple[Box, dict[int, Piece]]] = []
    for box, holders in sorted(by_box.items()):
        refined = []
        new = [box]
        for atom, others in atoms:
            shared = intersection(atom, box)
            if shared is None:
                refined.append((atom, others))
                continue
            refined += [(part, others) for part in subtract(atom, box)]
            refined.append((shared, others | holders))
            new = [part for piece in new for part in subtract(piece, atom)]
        atoms = refined + [(part, holders) for part in new]
    return [(box, dict(sorted(holders.items()))) for box, holders in atoms]


def _deal(
    wanted: Sequence[_Need], holders: Mapping[int, Piece], load: Counter[int]
) -> Iterator[tuple[int, _Need]]:
    """Gives every need of a box a sender, and adds to the senders' `load`."""
    level = sum(load[rank] for rank in holders) + sum(volume(box) for box, _, _ in wanted)
    for need in wanted:
        size = volume(need[0])
        # The first who stays at or below the level at which all would have sent the same.
        below = (rank for rank in holders if (load[rank] + size) * len(holders) <= level)
        sender = next(below, None)
        if sender is None:
            order = [(load[rank], abs(rank - need[1]), rank) for rank in holders]
            sender = min(order)[-1]
        load[sender] += size
        yield sender, need


def _between(name: str, box: Box, sender: int, source: Piece, receiver: int, target: Piece) -> Move:
    return Move(name, box, sender, receiver, source.at(box), target.at(box))


def _check_shape(name: str, first: Sequence[int], second: Sequence[int]) -> None:
    if tuple(first) != tuple(second):
        raise LayoutError(
            f"Tensor `{name}` has shape {tuple(first)} in one layout and {tuple(second)} in the "
            "other; layouts describe the same global tensors."
        )


def _box(read: Any) -> Box:
    return tuple((start, stop) for start, stop in read)


def _piece(read: Any) -> Piece:
    box, tensor, start = read
    return Piece(_box(box), tensor, tuple(start))


def _move(read: Any) -> Move:
    name, box, sender, receiver, source, target = read
    places = [Place(tensor, tuple(start)) for tensor, start in (source, target)]
    return Move(name, _box(box), sender, receiver, places[0], places[1])

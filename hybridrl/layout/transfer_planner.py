"""The planner of transfers between two layouts, for all ranks or for one.

A rank of a thousand works out its own moves only, and all ranks agree without a word: who sends
what depends on nothing but the ranks that hold a cell and those that need it, and all of these see
it. Tensors that lie alike are looked at once, and ranks that need the same are treated as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from hybridrl.errors import LayoutError
from hybridrl.layout.boxes import (
    Box,
    Piece,
    Place,
    RankPieces,
    box_numel,
    intersect_boxes,
    subtract_box,
    subtract_boxes,
)
from hybridrl.layout.tensor_layout import TensorLayout, TensorMove, TransferPlan, check_same_shape


def plan_transfer(
    source: TensorLayout, target: TensorLayout, rank: int | None = None
) -> TransferPlan:
    """Plan the moves and copies that write every element of `target` once.

    An element that a rank has is copied there; any other is sent by one rank that has it, so no
    plan moves less. (A target that holds an element in two places on one rank gets it twice.)
    Where several ranks have a cell, those that need it are dealt over them so that all send as
    much of what these ranks have; low ranks serve low ranks, which keeps the traffic of replicas
    that stand side by side inside each of them. Equal layouts give equal plans.

    Args:
        rank: Whose part of the plan is wanted, `plan_transfer(source, target).of(rank)`; None: all
            of it.

    Raises:
        LayoutError: if the source lacks a tensor or a part of it, or has it in another shape. All
            ranks raise it.
    """
    planner = _TransferPlanner(source, target, rank)
    for name, shape in sorted(target.shapes.items()):
        if name not in source.shapes:
            raise LayoutError(f"The source layout has no tensor `{name}`, which the target needs.")
        check_same_shape(name, source.shapes[name], shape)
        planner.look_at(name)
    return planner.plan()


class _RankClass(NamedTuple):
    """Ranks, in ascending order, that need the same pieces."""

    ranks: tuple[int, ...]
    pieces: RankPieces


class _CellNeed(NamedTuple):
    """Ranks that need a cell at the same offset.

    Attributes:
        alike, piece: The class of the first of them, and which of its pieces has the place.
        receivers: Those that do not hold the cell, in the order of classes.
        own: Those that do.
    """

    alike: int
    piece: int
    start: tuple[int, ...]
    receivers: tuple[int, ...]
    own: tuple[int, ...]


class _CellTransfer(NamedTuple):
    """A cell with its senders and the ranks that need it.

    Attributes:
        sources: By holder, in the order in which they are dealt: which of its pieces has the cell,
            and where.
        peers: The same number for all cells that have these holders and these needs.
    """

    box: Box
    size: int
    sources: dict[int, tuple[int, tuple[int, ...]]]
    needs: tuple[_CellNeed, ...]
    wanting: int
    peers: int


@dataclass
class _AssignedElements:
    """A count of elements over all cells with the same senders and receivers: in total, and
    assigned so far."""

    total: int = 0
    before: int = 0


class _TransferPlanner:
    def __init__(self, source: TensorLayout, target: TensorLayout, rank: int | None) -> None:
        self._source = source
        self._rank = rank
        self._classes = _group_ranks_by_need(target)
        self._class_of = {r: i for i, alike in enumerate(self._classes) for r in alike.ranks}
        self._known: dict[Hashable, list[_CellTransfer]] = {}
        self._peers: dict[Hashable, int] = {}
        self._receivers: dict[Hashable, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._slices: dict[Hashable, tuple[int, ...]] = {}
        self._dealt: dict[int, _AssignedElements] = {}
        self._jobs: list[tuple[str, list[_CellTransfer]]] = []

    def look_at(self, name: str) -> None:
        """Add the cells of a tensor to the plan."""
        tensors: dict[str, int] = {}  # by number: layers are alike but for their names
        wanted = tuple(
            tuple(
                (piece.box, piece.start, tensors.setdefault(piece.tensor, len(tensors)))
                for piece in alike.pieces.get(name, ())
            )
            for alike in self._classes
        )
        kind = (self._source.table.tensors[name][1], wanted)  # the column: which pieces it has
        if kind not in self._known:
            self._known[kind] = self._jobs_of(name)
        jobs = self._known[kind]
        for job in jobs:
            if job.wanting and len(job.sources) > 1:
                self._dealt.setdefault(job.peers, _AssignedElements()).total += job.size
        self._jobs.append((name, jobs))

    def plan(self) -> TransferPlan:
        """Return the plan for all tensors added so far."""
        moves: list[TensorMove] = []
        copies: list[TensorMove] = []
        for name, jobs in self._jobs:
            places: dict[Place, Place] = {}  # one object for many moves
            for job in jobs:
                box = job.box
                for sender, low, high in self._shares(job):
                    source = self._source_place(name, job, sender, places)
                    for need, receivers in self._between(job, low, high):
                        if self._rank in (None, sender) or self._rank in receivers:
                            target = self._target_place(name, need, places)
                            moves.append(TensorMove(name, box, sender, receivers, source, target))
                for need in job.needs:
                    for own in need.own:
                        if self._rank in (None, own):
                            source = self._source_place(name, job, own, places)
                            target = self._target_place(name, need, places)
                            copies.append(TensorMove(name, box, own, (own,), source, target))
        return TransferPlan(tuple(moves), tuple(copies))

    def _jobs_of(self, name: str) -> list[_CellTransfer]:
        held = self._source.table.holders(name)
        boxes = {rank: [piece.box for piece in pieces] for rank, pieces in held.items()}
        pieces = [
            (number, index, piece)
            for number, alike in enumerate(self._classes)
            for index, piece in enumerate(alike.pieces.get(name, ()))
        ]
        cells = find_cells(boxes, [piece.box for _, _, piece in pieces])
        self._check_found(name, cells, pieces)
        own = None if self._rank is None else self._class_of.get(self._rank)
        found = []
        for cell in cells:
            needed = [pieces[number] for number in cell.wanted]
            if self._rank is None or self._rank in cell.holders or own in {n for n, *_ in needed}:
                found.append(self._job(cell, needed, held))
        return found

    def _job(
        self,
        cell: TensorCell,
        needed: list[tuple[int, int, Piece]],
        held: Mapping[int, tuple[Piece, ...]],
    ) -> _CellTransfer:
        # Holders and receivers in the same order: each serves its like before others.
        last = len(self._classes)
        holders = sorted(cell.holders, key=lambda rank: (self._class_of.get(rank, last), rank))
        sources = {}
        for rank in holders:
            inside = (intersect_boxes(cell.box, piece.box) == cell.box for piece in held[rank])
            index = next(number for number, is_inside in enumerate(inside) if is_inside)
            sources[rank] = (index, held[rank][index].at(cell.box).start)
        places: dict[Place, list[tuple[int, int]]] = {}
        for number, index, piece in needed:
            places.setdefault(piece.at(cell.box), []).append((number, index))
        needs = tuple(
            _CellNeed(*found[0], start, *self._receivers_of(tuple(n for n, _ in found), cell))
            for (_, start), found in places.items()
        )
        key = (tuple(holders), tuple(number for number, *_ in needed))
        peers = self._peers.setdefault(key, len(self._peers))
        wanting = sum(len(need.receivers) for need in needs)
        return _CellTransfer(cell.box, box_numel(cell.box), sources, needs, wanting, peers)

    def _receivers_of(
        self, numbers: tuple[int, ...], cell: TensorCell
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ranks of these classes that do not hold the cell, and those that do."""
        key = (numbers, cell.holders)
        if key not in self._receivers:
            ranks = [rank for number in numbers for rank in self._classes[number].ranks]
            holders = set(cell.holders)
            others = tuple(rank for rank in ranks if rank not in holders)
            own = tuple(rank for rank in ranks if rank in holders)
            self._receivers[key] = others, own
        return self._receivers[key]

    def _shares(self, job: _CellTransfer) -> Iterator[tuple[int, int, int]]:
        """Yield for each sender the range `[low, high)` of receivers that it serves for a cell.

        All cells of the same peers are laid in one line, receiver by receiver, which is cut into as
        many equal parts as there are holders; a cell goes to the part in which its middle lies.
        """
        count, holders = job.wanting, len(job.sources)
        if not count:
            return
        if holders == 1:
            yield next(iter(job.sources)), 0, count
            return
        dealt = self._dealt[job.peers]
        middle = 2 * dealt.before + job.size
        dealt.before += job.size
        low = 0
        for index, sender in enumerate(job.sources, 1):
            line = 2 * dealt.total * count * index
            high = -((middle * holders - line) // (2 * dealt.total * holders))
            high = count if index == holders else min(max(high, 0), count)
            if low < high:
                yield sender, low, high
            low = high

    def _between(
        self, job: _CellTransfer, low: int, high: int
    ) -> Iterator[tuple[_CellNeed, tuple[int, ...]]]:
        """Yield the receivers `[low, high)` of a cell, grouped by need."""
        first = 0
        for need in job.needs:
            start, stop = max(low - first, 0), min(high - first, len(need.receivers))
            first += len(need.receivers)
            if start >= stop:
                continue
            if stop - start == len(need.receivers):
                yield need, need.receivers
                continue
            key = (id(need.receivers), start, stop)  # they live as long as the planner
            if key not in self._slices:
                self._slices[key] = need.receivers[start:stop]
            yield need, self._slices[key]

    def _source_place(
        self, name: str, job: _CellTransfer, rank: int, places: dict[Place, Place]
    ) -> Place:
        index, start = job.sources[rank]
        place = Place(self._source.table.tensor(name, rank, index), start)
        return places.setdefault(place, place)

    def _target_place(self, name: str, need: _CellNeed, places: dict[Place, Place]) -> Place:
        place = Place(self._classes[need.alike].pieces[name][need.piece].tensor, need.start)
        return places.setdefault(place, place)

    def _check_found(
        self, name: str, cells: list[TensorCell], pieces: list[tuple[int, int, Piece]]
    ) -> None:
        found: Counter[int] = Counter()
        for cell in cells:
            for number in cell.wanted:
                found[number] += box_numel(cell.box)
        for number, (alike, _, piece) in enumerate(pieces):
            if found[number] < box_numel(piece.box):
                lost = subtract_boxes(piece.box, [cell.box for cell in cells])[0]
                raise LayoutError(
                    f"No rank of the source layout holds {list(lost)} of tensor `{name}`, "
                    f"which rank {self._classes[alike].ranks[0]} of the target layout needs."
                )


def _group_ranks_by_need(target: TensorLayout) -> list[_RankClass]:
    """Group the ranks of a layout by the pieces that they need, in the order of their first
    rank."""
    seen: dict[int, tuple[RankPieces, list[int]]] = {}  # by object: many ranks share one
    ranks: dict[Hashable, list[int]] = {}
    pieces: list[RankPieces] = []
    for rank in sorted(target.pieces):
        here = target.pieces[rank]
        if id(here) not in seen:
            key = tuple(sorted((name, held) for name, held in here.items() if held))
            if key not in ranks:
                ranks[key] = []
                pieces.append(here)
            seen[id(here)] = here, ranks[key]
        seen[id(here)][1].append(rank)
    return [
        _RankClass(tuple(alike), here) for alike, here in zip(ranks.values(), pieces, strict=True)
    ]


class TensorCell(NamedTuple):
    """A part of a tensor with the ranks that hold it and the boxes that need it.

    Attributes:
        holders: The ranks that hold all of it; no other holds any of it.
        wanted: Which of the wanted boxes it lies in; in the others there is none of it.
    """

    box: Box
    holders: tuple[int, ...]
    wanted: tuple[int, ...]


def find_cells(held: Mapping[int, Sequence[Box]], wanted: Sequence[Box]) -> list[TensorCell]:
    """Return the cells of everything that is both held and wanted. They are disjoint, sorted, and
    do not depend on the order of the ranks.

    Args:
        held: By rank.
    """
    distinct = sorted({box for box in wanted if box_numel(box)})
    numbers: dict[Box, list[int]] = {box: [] for box in distinct}
    for number, box in enumerate(wanted):
        if box in numbers:
            numbers[box].append(number)
    found = []
    for atom, holders in _atoms(held):
        parts: list[tuple[Box, tuple[int, ...]]] = [(atom, ())]
        for box in distinct:
            if intersect_boxes(atom, box) is None:
                continue
            cut = []
            for part, inside in parts:
                if (shared := intersect_boxes(part, box)) is not None:
                    cut.append((shared, (*inside, *numbers[box])))
                    cut += [(rest, inside) for rest in subtract_box(part, box)]
                else:
                    cut.append((part, inside))
            parts = cut
        found += [
            TensorCell(part, holders, tuple(sorted(inside))) for part, inside in parts if inside
        ]
    return sorted(found)


def _atoms(held: Mapping[int, Sequence[Box]]) -> list[tuple[Box, tuple[int, ...]]]:
    """Return disjoint boxes that cover everything held, each with the ranks that hold all of it."""
    by_box: dict[Box, list[int]] = {}
    for rank in sorted(held):
        for box in dict.fromkeys(held[rank]):
            if box_numel(box):
                by_box.setdefault(box, []).append(rank)
    if _is_grid(list(by_box)):
        return [(box, tuple(holders)) for box, holders in sorted(by_box.items())]
    atoms: list[tuple[Box, frozenset[int]]] = []
    for box, ranks in sorted(by_box.items()):
        holders = frozenset(ranks)
        refined = []
        new = [box]
        for atom, others in atoms:
            shared = intersect_boxes(atom, box)
            if shared is None:
                refined.append((atom, others))
                continue
            refined += [(part, others) for part in subtract_box(atom, box)]
            refined.append((shared, others | holders))
            new = [part for piece in new for part in subtract_box(piece, atom)]
        atoms = refined + [(part, holders) for part in new]
    return [(box, tuple(sorted(holders))) for box, holders in atoms]


def _is_grid(boxes: list[Box]) -> bool:
    """Return whether boxes form a grid: in every dim, different ranges are disjoint. That is
    sufficient for different boxes to be disjoint, not necessary; boxes from even cuts satisfy
    it."""
    for ranges in zip(*boxes, strict=True):
        ordered = sorted(set(ranges))
        if any(stop > start for (_, stop), (start, _) in pairwise(ordered)):
            return False
    return True

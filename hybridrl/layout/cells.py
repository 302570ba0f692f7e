"""Cells: parts of a tensor that are held as a whole by the same ranks and needed as a whole by the
same ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from hybridrl.layout.boxes import Box, box_numel, intersect_boxes, subtract_box


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

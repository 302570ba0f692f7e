"""How much of the tensors each rank has in memory, in elements.

The figures by which the HybridFlow paper (Sheng et al., EuroSys 2025, Table 2) compares ways to
bring weights from training to generation. What a rank holds twice counts once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from hybridrl.layout.boxes import Box, disjoint, subtract_all, volume
from hybridrl.layout.tensor_layout import Layout
from hybridrl.layout.tensor_pieces import OfRank

_NOTHING: OfRank = {}


def peak(*layouts: Layout) -> dict[int, int]:
    """Elements on each rank that has all these layouts at once, sharing what they have in common:
    the peak of a change from one to another, without its buffers. Of one layout: what it holds."""
    ranks = sorted({rank for layout in layouts for rank in layout.pieces})
    return {rank: _count(layout.pieces.get(rank, _NOTHING) for layout in layouts) for rank in ranks}


def redundant(source: Layout, target: Layout) -> dict[int, int]:
    """Elements on each rank of the source layout that are no part of what the target layout keeps
    there: what it costs to hold the first beside the second."""
    found = {}
    for rank, here in source.pieces.items():
        kept = target.pieces.get(rank, _NOTHING)
        found[rank] = sum(
            volume(part)
            for name, pieces in here.items()
            for box in disjoint(piece.box for piece in pieces)
            for part in subtract_all(box, [piece.box for piece in kept.get(name, ())])
        )
    return found


def _count(together: Iterable[OfRank]) -> int:
    boxes: defaultdict[str, list[Box]] = defaultdict(list)
    for of_rank in together:
        for name, pieces in of_rank.items():
            boxes[name] += [piece.box for piece in pieces]
    return sum(volume(box) for of_name in boxes.values() for box in disjoint(of_name))

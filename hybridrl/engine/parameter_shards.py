"""The shards of parameters as an optimizer sees them that needs whole matrices: which box of which
parameter each rank of a pipeline stage holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import torch.distributed as dist
from torch import nn

from hybridrl.layout.boxes import Box, Piece
from hybridrl.parallel.parameter_layout import build_training_layout
from hybridrl.parallel.process_group import ParallelMesh
from hybridrl.parallel.tensor_parallel import ParameterCut


class ParameterShards:
    """The parameters of this rank's pipeline stage and their layout over the ranks that share them.
    Making it is collective.

    Args:
        parameters: This rank's, by name, sharded.
        cuts: Of those that are cut over tensor-parallel ranks.

    Attributes:
        group: The ranks of the stage; None: this one is alone.
        place: The number of this rank among them.
        ranks: How many there are.
        device: Where it computes.
        names: By parameter.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        cuts: Mapping[str, ParameterCut],
        mesh: ParallelMesh,
    ) -> None:
        self.group, self.device = mesh.stage_group, mesh.device
        self.place = 0 if self.group is None else dist.get_rank(self.group)
        self.ranks = 1 if self.group is None else self.group.size()
        self.names = {parameter: name for name, parameter in parameters.items()}
        self.layout = build_training_layout(parameters, cuts, self.group)
        self._pieces: dict[nn.Parameter, tuple[tuple[Piece, int], ...]] = {}

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Return the shape of the whole parameter."""
        return self.layout.shapes[self.names[parameter]]

    def pieces(self, parameter: nn.Parameter) -> tuple[tuple[Piece, int], ...]:
        """Return the pieces of a parameter that this rank holds, each with the number of ranks that
        hold it."""
        if parameter not in self._pieces:
            held = self.layout.table.holders(self.names[parameter])
            copies = Counter(piece.box for pieces in held.values() for piece in pieces)
            mine = held.get(self.place, ())
            self._pieces[parameter] = tuple((piece, copies[piece.box]) for piece in mine)
        return self._pieces[parameter]


def assign_matrices(
    shapes: Mapping[str, tuple[int, ...]], ranks: int
) -> Mapping[int, Mapping[str, Box]]:
    """Assign matrices to ranks so that all take about as long to orthogonalise theirs: whole ones,
    the costliest first, and of several in one tensor an equal number to each rank.

    Returns:
        By rank the box of each tensor of which it has any.
    """
    found: dict[int, dict[str, Box]] = {rank: {} for rank in range(ranks)}
    loads = [0.0] * ranks
    costs = {n: s[-1] * s[-2] * min(s[-2:]) for n, s in shapes.items()}
    for name in sorted(shapes, key=lambda name: (-costs[name], name)):
        for start, matrices, rank in _deal(shapes[name], loads):
            box = tuple((0, size) for size in shapes[name])
            if len(box) > 2:
                box = ((start, start + matrices), *box[1:])
            found[rank][name] = box
            loads[rank] += costs[name] * matrices
    return found


def _deal(shape: tuple[int, ...], loads: list[float]) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of matrices in a tensor, as (first, number, rank), the idlest ranks first."""
    order = sorted(range(len(loads)), key=lambda rank: (loads[rank], rank))
    if len(shape) == 2:
        yield 0, 1, order[0]
        return
    each, more = divmod(shape[0], len(loads))
    at = 0
    for number, rank in enumerate(order):
        if count := each + (number < more):
            yield at, count, rank
            at += count

"""The layout of a model that is cut over a mesh: which part of every parameter each rank holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hybridrl.core.boxes import chunk_range, volume, whole
from hybridrl.core.layout import Layout, Piece, join, local_pieces
from hybridrl.parallel.mesh import ParallelMesh
from hybridrl.parallel.tensor import Cut


def training_layout(
    parameters: Mapping[str, nn.Parameter], cuts: Mapping[str, Cut], mesh: ParallelMesh
) -> Layout:
    """The layout over all ranks of `mesh`. Collective.

    Args:
        parameters: This rank's, under the names of a checkpoint, sharded by FSDP or not.
        cuts: Of those that are cut over tensor-parallel ranks.
    """
    index = mesh.index("tp")
    shapes, pieces = {}, {}
    for name, parameter in parameters.items():
        cut = cuts.get(name)
        shapes[name] = whole_shape(parameter, cut)
        pieces[name] = pieces_of(name, parameter, cut, index)
    mine = Layout(shapes, {mesh.place: pieces})
    if (group := mesh.group()) is None:
        return mine
    found: list[Layout | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return join(layout for layout in found if layout is not None)


def pieces_of(name: str, parameter: nn.Parameter, cut: Cut | None, index: int) -> tuple[Piece, ...]:
    """What this rank holds of a parameter: tensor parallelism cuts first, FSDP what is left."""
    held = list(whole(parameter.shape))  # of what tensor parallelism has left
    if isinstance(parameter, DTensor):
        places = parameter.device_mesh.get_coordinate()
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                start, stop = held[placement.dim]
                count = parameter.device_mesh.size(axis)
                low, high = chunk_range(stop - start, places[axis], count)
                held[placement.dim] = (start + low, start + high)
    if cut is None:
        return local_pieces(name, tuple(held))
    found, at = [], 0
    for start, stop in cut.bounds[index]:
        low, high = (max(at, min(side, at + stop - start)) for side in held[cut.dim])
        box, place = list(held), [0] * len(held)
        box[cut.dim] = (low - at + start, high - at + start)
        place[cut.dim] = low - held[cut.dim][0]
        if volume(tuple(box)):
            found.append(Piece(tuple(box), name, tuple(place)))
        at += stop - start
    return tuple(found)


def whole_shape(parameter: nn.Parameter, cut: Cut | None) -> tuple[int, ...]:
    """Of a parameter, however it is cut."""
    return tuple(parameter.shape) if cut is None else cut.shape

"""The layout of a model that is cut over a mesh: which part of every parameter each rank holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hybridrl.core.boxes import Box, chunk_range
from hybridrl.core.layout import Layout, join, local_pieces
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
        shapes[name] = tuple(parameter.shape) if cut is None else cut.shape
        pieces[name] = local_pieces(name, box_of(parameter, cut, index))
    mine = Layout(shapes, {mesh.place: pieces})
    if (group := mesh.group()) is None:
        return mine
    found: list[Layout | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return join(layout for layout in found if layout is not None)


def box_of(parameter: nn.Parameter, cut: Cut | None, index: int) -> Box:
    """What this rank holds of a parameter: tensor parallelism cuts first, FSDP what is left."""
    shape = parameter.shape if cut is None else cut.shape
    box = [(0, size) for size in shape]
    if cut is not None and cut.dim is not None:
        box[cut.dim] = cut.bounds[index]
    if isinstance(parameter, DTensor):
        places = parameter.device_mesh.get_coordinate()
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                start, stop = box[placement.dim]
                count = parameter.device_mesh.size(axis)
                low, high = chunk_range(stop - start, places[axis], count)
                box[placement.dim] = (start + low, start + high)
    return tuple(box)

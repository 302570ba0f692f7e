"""The layout of a model that is cut over a mesh: which part of every parameter each rank holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from hybridrl.core.boxes import Box, chunk_range
from hybridrl.core.layout import Layout, join
from hybridrl.core.pieces import BoxTable
from hybridrl.parallel.mesh import ParallelMesh
from hybridrl.parallel.tensor import Cut
from hybridrl.parallel.values import all_values


def training_layout(
    parameters: Mapping[str, nn.Parameter], cuts: Mapping[str, Cut], mesh: ParallelMesh
) -> Layout:
    """The layout over all ranks of `mesh`. Collective.

    Args:
        parameters: This rank's, under the names of a checkpoint, sharded by FSDP or not.
        cuts: Of those that are cut over tensor-parallel ranks.
    """
    index, shapes, boxes = mesh.index("tp"), {}, {}
    for name, parameter in parameters.items():
        cut = cuts.get(name)
        shapes[name] = tuple(parameter.shape) if cut is None else cut.shape
        boxes[name] = box_of(parameter, cut, index)
    if (group := mesh.group()) is None:
        return Layout(shapes, table_of(shapes, numbers_of(shapes, boxes)[None]))
    # Pipeline stages have parameters of their own.
    stages = {id(each): each for each in all_values(shapes, group)}
    shapes = join(Layout(each, {}) for each in stages.values()).shapes
    mine = numbers_of(shapes, boxes)
    found = torch.empty(group.size() * len(mine), dtype=torch.int64)
    dist.all_gather_into_tensor(found, mine, group=group)
    return Layout(shapes, table_of(shapes, found.view(group.size(), -1)))


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


def numbers_of(shapes: Mapping[str, tuple[int, ...]], boxes: Mapping[str, Box]) -> Tensor:
    """The boxes of one rank one after the other, each after a 1; zeros where it has none."""
    found: list[int] = []
    for name, shape in shapes.items():
        if name in boxes:
            found += (1, *(at for span in boxes[name] for at in span))
        else:
            found += (0,) * (1 + 2 * len(shape))
    return torch.tensor(found)


def table_of(shapes: Mapping[str, tuple[int, ...]], numbers: Tensor) -> BoxTable:
    """What `numbers_of` says of all ranks, `[ranks, numbers]`."""
    columns: dict[bytes, int] = {}
    boxes: list[tuple[Box | None, ...]] = []
    tensors, start = {}, 0
    for name, shape in shapes.items():
        column = numbers[:, start : start + 1 + 2 * len(shape)].contiguous()
        start += 1 + 2 * len(shape)
        key = column.numpy().tobytes()
        if key not in columns:
            columns[key] = len(boxes)
            boxes.append(tuple(_box(row) for row in column.tolist()))
        tensors[name] = (name, columns[key])
    return BoxTable(tuple(range(len(numbers))), tuple(boxes), tensors)


def _box(row: list[int]) -> Box | None:
    is_held, *edges = row
    return tuple(zip(edges[::2], edges[1::2], strict=True)) if is_held else None

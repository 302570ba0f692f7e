"""The tensor layout of a model that is cut over a mesh: which part of every parameter each rank
holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from hybridrl.layout.boxes import (
    Piece,
    PieceTable,
    box_numel,
    chunk_range,
    full_box,
    make_local_pieces,
)
from hybridrl.layout.tensor_layout import TensorLayout, merge_layouts
from hybridrl.parallel.collectives import all_gather_distinct
from hybridrl.parallel.tensor_parallel import ParameterCut

_Held = tuple[Piece, ...]


def build_training_layout(
    parameters: Mapping[str, nn.Parameter],
    cuts: Mapping[str, ParameterCut],
    group: dist.ProcessGroup | None,
) -> TensorLayout:
    """Build the layout of a model over the ranks of `group`. Collective.

    Args:
        parameters: This rank's, under the names of a checkpoint, sharded by FSDP or not.
        cuts: Of those that are cut over tensor-parallel ranks.
        group: All ranks of the mesh, or those of a pipeline stage; None: this rank is alone.
    """
    shapes, pieces = {}, {}
    for name, parameter in parameters.items():
        cut = cuts.get(name)
        shapes[name] = full_shape(parameter, cut)
        pieces[name] = find_parameter_pieces("", parameter, cut)
    mine = PackedRankPieces.of_pieces(pieces)
    if group is None:
        return merge_rank_pieces([shapes], [mine])
    found: list[PackedRankPieces | None] = [None] * group.size()
    dist.all_gather_object(found, mine, group=group)
    return merge_rank_pieces(
        all_gather_distinct(shapes, group), [said for said in found if said is not None]
    )


class PackedRankPieces(NamedTuple):
    """The pieces of one rank's parameters with equal ones stored once, since layers are sharded
    alike.

    Attributes:
        kinds: Different pieces, whatever the name of the parameter.
        of: Which of these each parameter is.
    """

    kinds: tuple[_Held, ...]
    of: npt.NDArray[np.int32]

    @classmethod
    def of_pieces(cls, pieces: Mapping[str, _Held]) -> PackedRankPieces:
        """Build from pieces whose local tensors have no name."""
        kinds: dict[_Held, int] = {}
        of = [kinds.setdefault(held, len(kinds)) for held in pieces.values()]
        return cls(tuple(kinds), np.array(of, np.int32))


def merge_rank_pieces(
    shapes: Sequence[Mapping[str, tuple[int, ...]]], ranks: Sequence[PackedRankPieces]
) -> TensorLayout:
    """Build the layout of all ranks from the pieces of each.

    Args:
        shapes: Of each rank's parameters; one object where they are the same, as they are but for
            those of other pipeline stages.
        ranks: What each says of these.
    """
    stages = {id(stage): stage for stage in shapes}
    every = merge_layouts(TensorLayout(stage, {}) for stage in stages.values()).shapes
    place = {name: number for number, name in enumerate(every)}
    columns_of = {key: [place[name] for name in stage] for key, stage in stages.items()}
    kinds: dict[_Held, int] = {(): 0}
    held = np.zeros((len(ranks), len(every)), np.int32)  # by rank and parameter
    for rank, (stage, said) in enumerate(zip(shapes, ranks, strict=True)):
        numbers = np.array([kinds.setdefault(kind, len(kinds)) for kind in said.kinds], np.int32)
        held[rank, columns_of[id(stage)]] = numbers[said.of]
    pieces = list(kinds)
    columns: dict[bytes, int] = {}
    found, tensors = [], {}
    for name, number in place.items():
        column = held[:, number]
        key = column.tobytes()
        if key not in columns:
            columns[key] = len(found)
            found.append(tuple(pieces[kind] for kind in column.tolist()))
        tensors[name] = (name, columns[key])
    return TensorLayout(every, PieceTable(tuple(range(len(ranks))), tuple(found), tensors))


def find_parameter_pieces(
    name: str, parameter: nn.Parameter, cut: ParameterCut | None
) -> tuple[Piece, ...]:
    """Return the pieces of a parameter that this rank holds: tensor parallelism cuts first, then
    FSDP cuts the rest."""
    held = list(full_box(parameter.shape))  # of what tensor parallelism has left
    if isinstance(parameter, DTensor):
        places = parameter.device_mesh.get_coordinate()
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                start, stop = held[placement.dim]
                count = parameter.device_mesh.size(axis)
                low, high = chunk_range(stop - start, places[axis], count)
                held[placement.dim] = (start + low, start + high)
    if cut is None:
        return make_local_pieces(name, tuple(held))
    found, at = [], 0
    for start, stop in cut.mine:
        low, high = (max(at, min(side, at + stop - start)) for side in held[cut.dim])
        box, place = list(held), [0] * len(held)
        box[cut.dim] = (low - at + start, high - at + start)
        place[cut.dim] = low - held[cut.dim][0]
        if box_numel(tuple(box)):
            found.append(Piece(tuple(box), name, tuple(place)))
        at += stop - start
    return tuple(found)


def full_shape(parameter: nn.Parameter, cut: ParameterCut | None) -> tuple[int, ...]:
    """Return the shape of the full parameter, however it is cut."""
    return tuple(parameter.shape) if cut is None else cut.shape

"""What all ranks of a large job hold, worked out by one of them: the others cannot be asked."""

from dataclasses import replace
from unittest.mock import patch

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from weight_transitions import shard_box

from hybridrl.layout.boxes import Piece, box_shape, full_box
from hybridrl.layout.tensor_layout import TensorLayout
from hybridrl.layout.training_mesh import DATA_AXES
from hybridrl.parallel.parameter_layout import (
    PackedRankPieces,
    find_parameter_pieces,
    full_shape,
    merge_rank_pieces,
)

CUT = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0),
    **dict.fromkeys(("embed_tokens", "lm_head"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}
"""Which dim vLLM cuts of a weight; of experts, which have one dim more, the next one. A weight that
is fused of two is cut in both halves."""


def training_layout_of(engine):
    """As every rank's engine would say."""
    mesh = engine.mesh.mesh
    parameters = dict(engine.model.inner.named_parameters())
    shapes = {name: full_shape(p, engine.cuts.get(name)) for name, p in parameters.items()}
    alike = {}  # parameters that are cut alike lie alike
    for name, parameter in parameters.items():
        key = parameter.shape, engine.cuts.get(name)
        alike.setdefault(str(key), []).append(name)
    places = {rank: place for data in mesh.groups(*DATA_AXES) for place, rank in enumerate(data)}
    said = []
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)
        tp = at["tp"].index if "tp" in at else 0
        copy, shard = divmod(places[rank], engine.mesh.data_ranks // engine.mesh.copies)
        here = [copy, shard] if engine.mesh.copies > 1 else [shard]
        with patch.object(DeviceMesh, "get_coordinate", lambda _, here=here: here):
            found = {}
            for names in alike.values():
                cut = engine.cuts.get(names[0])
                own = None if cut is None else replace(cut, rank=tp)
                one = find_parameter_pieces("", parameters[names[0]], own)
                found |= dict.fromkeys(names, one)
        said.append(PackedRankPieces.of_pieces({name: found[name] for name in parameters}))
    assert all(isinstance(p, DTensor) for p in parameters.values())
    return merge_rank_pieces([shapes] * len(said), said)


def generation_layout_of(shapes, ranks, tp):
    """As vLLM holds a model on every `tp` consecutive ranks."""
    alike = [_part(shapes, index, tp) for index in range(tp)]
    return TensorLayout(shapes, {rank: alike[rank % tp] for rank in range(ranks)})


def _part(shapes, index, tp):
    found = {}
    for name, shape in shapes.items():
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        dim = CUT.get(leaf) if len(shape) < 3 else (1 if leaf == "gate_up_proj" else 2)
        if dim is None or tp == 1:
            boxes = [full_box(shape)]
        elif leaf == "gate_up_proj":
            boxes = [_half(shape, dim, half, index, tp) for half in range(2)]
        else:
            boxes = [shard_box(shape, [(dim, index, tp)])]
        pieces, at = [], 0
        for box in boxes:
            start = [0] * len(box)
            if dim is not None:
                start[dim] = at
                at += box_shape(box)[dim]
            pieces.append(Piece(box, name, tuple(start)))
        found[name] = tuple(pieces)
    return found


def _half(shape, dim, half, index, tp):
    size = shape[dim] // 2 // tp
    start = half * shape[dim] // 2 + index * size
    return tuple((start, start + size) if d == dim else (0, n) for d, n in enumerate(shape))


def memory_of(pieces, dtype, device):
    """The tensors that hold a rank's pieces."""
    found = {}
    for held in pieces.values():
        ends = [
            [at + n for at, n in zip(piece.start, box_shape(piece.box), strict=True)]
            for piece in held
        ]
        shape = [max(sides) for sides in zip(*ends, strict=True)]
        found[held[0].tensor] = torch.empty(shape, dtype=dtype, device=device)
    return found

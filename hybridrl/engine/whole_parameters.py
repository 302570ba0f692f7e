"""Parameters that are cut in any way, put together on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from hybridrl.layout.boxes import whole
from hybridrl.layout.tensor_layout import Layout
from hybridrl.layout.tensor_pieces import local_pieces
from hybridrl.layout.transfer_planner import plan
from hybridrl.parallel.parallel_mesh import ParallelMesh
from hybridrl.weights.collective_reshard import reshard
from hybridrl.weights.weight_transport import into


def whole_parameters(
    layout: Layout, parts: Mapping[str, Tensor], mesh: ParallelMesh
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter whole on every rank, in the precision of the parts, one at a time.
    Collective.

    Args:
        layout: Of all ranks of `mesh`, more than one.
        parts: What this rank holds, by name.
    """
    dtype = next(iter(parts.values())).dtype
    for name, shape in layout.shapes.items():
        everything = {name: local_pieces(name, whole(shape))}
        target = Layout({name: shape}, dict.fromkeys(layout.pieces, everything))
        steps = plan(layout.renamed({name: name}), target, mesh.place)
        tensor = torch.empty(shape, dtype=dtype, device=mesh.device)
        write = into({name: tensor})
        reshard(steps, parts.__getitem__, write, dtype, mesh.device, mesh.group())
        yield name, tensor

"""The gradients of a model whose parameters are cut over a mesh: summed, measured and clipped."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridrl.parallel.mesh import ParallelMesh


class Gradients:
    """Gradients after a backward.

    Args:
        model: Its parameters are sharded over `mesh.fsdp`.
        mesh: The ranks that train it.
        copies: By parameter, how many places of the mesh, beside FSDP's, hold the same elements;
            those not named: one.
        partial: Parameters whose gradient is a sum over ranks that hold the same elements, each
            with the group to sum over.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: ParallelMesh,
        copies: dict[nn.Parameter, int],
        partial: list[tuple[nn.Parameter, dist.ProcessGroup]],
    ) -> None:
        self._mesh = mesh
        self._partial = partial
        self._by_copies: dict[int, list[nn.Parameter]] = defaultdict(list)
        for parameter in model.parameters():
            self._by_copies[copies.get(parameter, 1) * mesh.copies].append(parameter)

    def finish(self) -> None:
        """Sums what ranks with the same elements have each a part of."""
        for parameter, group in self._partial:
            if parameter.grad is not None:
                dist.all_reduce(_local(parameter.grad), group=group)

    def norm(self) -> float:
        """The norm of the whole gradient; the same on every rank. Every element counts once,
        however many ranks hold it."""
        total = torch.zeros((), dtype=torch.float64)
        for copies, parameters in self._by_copies.items():
            gradients = [_local(p.grad) for p in parameters if p.grad is not None]
            if gradients:
                total += torch.nn.utils.get_total_norm(gradients).double().cpu() ** 2 / copies
        if (group := self._mesh.group()) is not None:
            dist.all_reduce(total, group=group)
        return float(total.sqrt())

    def scale(self, factor: float) -> None:
        """Multiplies all of them."""
        for parameters in self._by_copies.values():
            for parameter in parameters:
                if parameter.grad is not None:
                    _local(parameter.grad).mul_(factor)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

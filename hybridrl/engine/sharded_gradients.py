"""The gradients of a model whose parameters are cut over a mesh: summed, measured and clipped."""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hybridrl.parallel.parallel_mesh import ParallelMesh
from hybridrl.parallel.tensor_parallel import Cut


class Gradients:
    """Gradients after a backward.

    Args:
        model: Its parameters are sharded over `mesh.fsdp`.
        mesh: The ranks that train it.
        copies: By parameter, how many places of the mesh, beside FSDP's, hold the same elements;
            those not named: one.
        partial: Parameters whose gradient is to be summed over the tensor-parallel ranks that hold
            the same elements, each with its cut; None where all hold all.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: ParallelMesh,
        copies: dict[nn.Parameter, int],
        partial: list[tuple[nn.Parameter, Cut | None]],
    ) -> None:
        self._mesh = mesh
        self._partial = partial
        self._by_copies: dict[int, list[nn.Parameter]] = defaultdict(list)
        for parameter in model.parameters():
            self._by_copies[copies.get(parameter, 1) * mesh.copies].append(parameter)

    def finish(self) -> None:
        """Sums what ranks with the same elements have each a part of."""
        group, index = self._mesh.group("tp"), self._mesh.index("tp")
        for parameter, cut in self._partial:
            if parameter.grad is None:
                continue
            local = _local(parameter.grad)
            parts = [()] if cut is None else sorted(set(cut.bounds))
            mine = 0 if cut is None else parts.index(cut.bounds[index])
            # All parts side by side: the ranks of each need no group of their own.
            sums = local.new_zeros(len(parts), *local.shape)
            sums[mine] = local
            dist.all_reduce(sums, group=group)
            local.copy_(sums[mine])

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

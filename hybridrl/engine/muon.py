"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon): matrices step by their
momentum, orthogonalised; what is no matrix of a layer steps by AdamW."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from hybridrl.engine.parameter_shards import ParameterShards, assign_matrices
from hybridrl.layout.boxes import Box, box_shape, make_local_pieces
from hybridrl.layout.tensor_layout import TensorLayout, make_tensor_sink
from hybridrl.layout.transfer_planner import plan_transfer
from hybridrl.parallel.process_group import to_local
from hybridrl.weights.collective_reshard import CollectiveReshard

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_PRECISION = torch.bfloat16
"""Of orthogonalizing, and so of what travels."""
_SMALLEST_NORM = 1e-7
_ADAMW_RMS = 0.2
"""Root mean square of AdamW's updates, in learning rates."""


@torch.no_grad()
def orthogonalize(matrix: Tensor, steps: int) -> Tensor:
    """Return roughly the nearest semi-orthogonal matrix, by steps of Newton and Schulz: singular
    values of the result lie about 1.

    Args:
        matrix: bfloat16, or several of them, `[matrices, rows, columns]`.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    several = x.ndim > 2
    add = torch.baddbmm if several else torch.addmm
    norm = x.norm(dim=(-2, -1), keepdim=True) if several else x.norm()
    x = x / norm.clamp(min=_SMALLEST_NORM)
    for _ in range(steps):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


class WholeMatrices:
    """Matrices of which every rank of a stage has shards, gathered on one rank each and scattered
    again. Making it is collective.

    Args:
        names: Of the parameters.
    """

    def __init__(self, shards: ParameterShards, names: Sequence[str]) -> None:
        shapes = {name: shards.layout.shapes[name] for name in names}
        assigned = assign_matrices(shapes, shards.ranks)
        self._mine: Mapping[str, Box] = assigned[shards.place]
        self._device = shards.device
        self._transfers: tuple[CollectiveReshard, CollectiveReshard] | None = None
        if (group := shards.group) is not None:
            cut = shards.layout.renamed({name: name for name in names})
            pieces = {
                rank: {name: make_local_pieces(name, box) for name, box in boxes.items()}
                for rank, boxes in assigned.items()
            }
            whole, place = TensorLayout(shapes, pieces), shards.place
            plans = plan_transfer(cut, whole, place), plan_transfer(whole, cut, place)
            there, back = (
                CollectiveReshard(plan, _PRECISION, self._device, group) for plan in plans
            )
            self._transfers = there, back

    def orthogonalize(self, local: Mapping[str, Tensor], steps: int) -> None:
        """Replace this rank's shards of the matrices by those of the orthogonalised ones.
        Collective."""
        whole = {
            name: torch.empty(box_shape(box), dtype=_PRECISION, device=self._device)
            for name, box in self._mine.items()
        }
        if self._transfers is None:
            for matrix in local.values():
                matrix.copy_(orthogonalize(matrix.to(self._device), steps))
            return
        there, back = self._transfers
        there(local.__getitem__, make_tensor_sink(whole))
        for name, matrix in whole.items():
            whole[name] = orthogonalize(matrix, steps)
        back(whole.__getitem__, make_tensor_sink(local))


class Muon(Optimizer):
    """Muon for the hidden matrices of a sharded model, and AdamW for its other parameters.

    With B the mean of the gradients G, decayed by `momentum`, a matrix of m rows and n columns
    steps by the learning rate times 0.2 sqrt(max(m, n)) O: O is (1 - momentum) G + momentum B,
    orthogonalised, or B with `nesterov=False`. The factor makes its root mean square that of
    AdamW's updates, so that AdamW's learning rate and decay carry over (Moonshot AI 2025,
    arXiv:2502.16982, eq. 4). Momentum is sharded as weights are; to be orthogonalised, each matrix
    is gathered on one rank, in bfloat16.

    Args:
        matrices: Parameter groups of hidden matrices.
        others: Those of all other parameters.
        adamw: AdamW's own arguments.
    """

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        others: list[dict[str, Any]],
        shards: ParameterShards,
        adamw: Mapping[str, Any],
        *,
        lr: float,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
    ) -> None:
        self._shards, self._momentum, self._nesterov = shards, momentum, nesterov
        self._steps = ns_steps
        self._gathers: dict[tuple[str, ...], WholeMatrices] = {}
        named = [{**group, "by_adamw": False} for group in matrices]
        named += [{**group, "by_adamw": True} for group in others]
        super().__init__(named, {"lr": lr})
        self._adamw: AdamW | None = None
        if others:
            own = [group for group in self.param_groups if group["by_adamw"]]
            self._adamw = AdamW(own, lr=lr, **adamw)
            self._adamw.state = self.state
            # The same groups, so that a schedule's rates are those of both.
            first = len(self.param_groups) - len(own)
            self.param_groups[first:] = self._adamw.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step all parameters that have a gradient. Collective over the stage's ranks."""
        assert closure is None, "gradients are there already"
        adamw = [group for group in self.param_groups if group["by_adamw"]]
        if self._adamw is not None and adamw:
            self._adamw.param_groups = adamw
            self._adamw.step()
        groups = [group for group in self.param_groups if not group["by_adamw"]]
        learned = {
            self._shards.names[p]: (p, group)
            for group in groups
            for p in group["params"]
            if p.grad is not None
        }
        if not learned:
            return
        updates = {name: self._update(p).to(_PRECISION) for name, (p, _) in learned.items()}
        self._gather(tuple(updates)).orthogonalize(updates, self._steps)
        for name, (p, group) in learned.items():
            rate, weight = group["lr"], to_local(p)
            longest = max(self._shards.shape(p)[-2:])
            weight.mul_(1 - rate * group["weight_decay"])
            weight.add_(updates.pop(name), alpha=-rate * _ADAMW_RMS * math.sqrt(longest))

    def _update(self, parameter: nn.Parameter) -> Tensor:
        """Add the gradient of a parameter to its momentum; return what is to be orthogonalised."""
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        gradient, mean = to_local(parameter.grad), to_local(state["momentum_buffer"])
        mean.lerp_(gradient, 1 - self._momentum)
        return gradient.lerp(mean, self._momentum) if self._nesterov else mean

    def _gather(self, names: tuple[str, ...]) -> WholeMatrices:
        if names not in self._gathers:
            self._gathers[names] = WholeMatrices(self._shards, names)
        return self._gathers[names]

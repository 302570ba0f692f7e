"""Adafactor (Shazeer and Stern 2018, arXiv:1804.04235) for parameters of which each rank has a
part, with the numbers of `torch.optim.Adafactor`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hybridrl.engine.parameter_shards import ParameterShards
from hybridrl.layout.box_table import slice_at
from hybridrl.layout.boxes import Box, Piece, box_shape
from hybridrl.models.optimizer_states import statistic_shape
from hybridrl.parallel.collectives import reduce_over
from hybridrl.parallel.process_group import to_local

_SMALLEST_SHARE = torch.finfo(torch.float32).eps
_SMALLEST_SIZE = 1e-3
_ROWS, _COLUMNS = "row_var", "col_var"


class Adafactor(Optimizer):
    """Adafactor: a parameter steps by the learning rate times its own size, divided by the root of
    squared gradients. Of these a matrix keeps a mean of each row and of each column, as every rank
    that has a part of it does.

    With t the count of steps and X the parameter, the size of a step is max(0.001, rms(X)) times
    min(lr, 1 / sqrt(t)); updates U are divided by max(1, rms(U) / `d`); the new share of a mean is
    t ** `beta2_decay`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        shards: ParameterShards,
        *,
        lr: float,
        beta2_decay: float,
        d: float,
    ) -> None:
        self._shards, self._decay, self._longest = shards, beta2_decay, d
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step all parameters that have a gradient, whose gradients become their updates.
        Collective over the stage's ranks."""
        assert closure is None, "gradients are there already"
        learned = [
            (p, group) for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        if not learned:
            return
        sums = [self._count(p) for p, _ in learned]
        device = self._shards.device
        flat = torch.cat([part.flatten().to(device) for parts in sums for part in parts])
        reduce_over(self._shards.group, flat)
        found = iter(flat.split([p.numel() for s in sums for p in s]))
        sizes = [self._divide(p, parts, found) for (p, _), parts in zip(learned, sums, strict=True)]
        lengths = torch.stack([self._square_sum(p, to_local(p.grad)) for p, _ in learned])
        updates = reduce_over(self._shards.group, lengths.to(device)).tolist()
        for (p, group), size, length in zip(learned, sizes, updates, strict=True):
            rate, count = group["lr"], float(self.state[p]["step"])
            elements = math.prod(self._shards.shape(p))
            step = max(_SMALLEST_SIZE, (size / elements) ** 0.5) * min(rate, count**-0.5)
            step /= max(1.0, (length / elements) ** 0.5 / self._longest)
            weight = to_local(p)
            weight.mul_(1 - rate * group["weight_decay"])
            weight.add_(to_local(p.grad), alpha=-step)

    def _boxes(
        self, parameter: nn.Parameter, *tensors: Tensor
    ) -> Iterator[tuple[Piece, int, list[Tensor]]]:
        """Yield each piece of a parameter, how many ranks hold it, and that part of each tensor."""
        for piece, copies in self._shards.pieces(parameter):
            shape = box_shape(piece.box)
            yield piece, copies, [slice_at(to_local(t), piece.start, shape) for t in tensors]

    def _square_sum(self, parameter: nn.Parameter, values: Tensor) -> Tensor:
        """Return this rank's share of the sum of squares of the whole tensor."""
        found = values.new_zeros(())
        for _, copies, (part,) in self._boxes(parameter, values):
            found += part.square().sum() / copies
        return found

    def _count(self, parameter: nn.Parameter) -> list[Tensor]:
        """Return this rank's share of the sums of squares: of the weights, and of the gradients of
        each row and each column of the whole matrix."""
        sums = [self._square_sum(parameter, to_local(parameter))]
        if parameter.ndim > 1:
            shape, gradient = self._shards.shape(parameter), to_local(parameter.grad)
            rows, columns = (
                gradient.new_zeros(statistic_shape(n, shape)) for n in (_ROWS, _COLUMNS)
            )
            for piece, copies, (part,) in self._boxes(parameter, gradient):
                square = part.square()
                _along(rows, piece.box, -1).add_(square.sum(-1, keepdim=True), alpha=1 / copies)
                _along(columns, piece.box, -2).add_(square.sum(-2, keepdim=True), alpha=1 / copies)
            sums += [rows, columns]
        return sums

    def _divide(
        self, parameter: nn.Parameter, sums: list[Tensor], found: Iterator[Tensor]
    ) -> float:
        """Add new squares to the means, and divide this rank's gradient by their root.

        Args:
            sums: What `_count` gave.
            found: The same of all ranks together, flat.

        Returns:
            The sum of squares of the whole parameter.
        """
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            if parameter.ndim > 1:
                state |= {
                    n: torch.zeros_like(s) for n, s in zip((_ROWS, _COLUMNS), sums[1:], strict=True)
                }
            else:
                state["variance"] = torch.zeros_like(parameter)
        state["step"] += 1
        share = float(state["step"]) ** self._decay
        gradient, size = to_local(parameter.grad), next(found).item()
        if parameter.ndim < 2:
            variance = to_local(state["variance"]).lerp_(gradient.square(), share)
            gradient.mul_(variance.clamp(min=_SMALLEST_SHARE**2).rsqrt())
            return size
        shape = self._shards.shape(parameter)
        rows, columns = state[_ROWS], state[_COLUMNS]
        for mean, length in ((rows, shape[-1]), (columns, shape[-2])):
            mean.lerp_(next(found).view_as(mean).to(mean.device) / length, share)
        total = rows.mean(dim=-2, keepdim=True).clamp(min=_SMALLEST_SHARE)
        for piece, _, (part,) in self._boxes(parameter, gradient):
            row, column = _along(rows, piece.box, -1), _along(columns, piece.box, -2)
            squares = (row @ column).div_(_along(total, piece.box, -1, -2))
            part.mul_(squares.clamp_(min=_SMALLEST_SHARE**2).rsqrt_())
        return size


def _along(tensor: Tensor, box: Box, *single: int) -> Tensor:
    """Return the part of a tensor at a box, all of the dims `single`, which have one element."""
    dims = {dim % tensor.ndim for dim in single}
    places = (slice(None) if d in dims else slice(*side) for d, side in enumerate(box))
    return tensor[tuple(places)]

"""Linear maps of one tensor whose gradient is another map that autograd would not find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TensorMap = Callable[[Tensor], Tensor]


def apply_linear_map(x: Tensor, change: TensorMap, of_gradient: TensorMap) -> Tensor:
    """Return `change(x)`, whose backward gives `of_gradient` of its gradient. What the two maps
    hold lives as long as the graph."""
    return _LinearMap.apply(x, change, of_gradient)


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, change: TensorMap, of_gradient: TensorMap) -> Tensor:
        ctx.of_gradient = of_gradient
        return change(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.of_gradient(grad), None, None

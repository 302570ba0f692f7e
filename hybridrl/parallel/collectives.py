"""Collectives that autograd knows, in pairs: what one does forward, the other does backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def copy_to_all(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """`x`, alike on every rank, which each goes on to use in its own way: gradients are summed."""
    return _Copy.apply(x, group)


def sum_over(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of every rank's `x`, which all go on to use alike: its gradient is each one's."""
    return _Sum.apply(x, group)

"""Gathering what a model says of response tokens from the ranks that hold their parts of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Reading:
    """On which rank the model says something of which response token.

    Attributes:
        mine: int64, the response tokens of this rank, ascending.
        local: Where among this rank's tokens each of them is read.
        most: Response tokens of the rank that has most of them.
        slots: `[response tokens]`: each one's place when the ranks' parts, padded to `most`,
            follow each other.
    """

    mine: Tensor
    local: Tensor
    most: int
    slots: Tensor

    @classmethod
    def of(cls, read_at: Tensor, places: list[Tensor], rank: int, device: torch.device) -> Reading:
        """For response tokens that are read at `read_at` in the packed row, of which each rank has
        `places`; both on the CPU."""
        counts = torch.tensor([len(held) for held in places])
        order = torch.cat(places)
        owners, locals_ = torch.empty_like(order), torch.empty_like(order)
        owners[order] = torch.arange(len(places)).repeat_interleave(counts)
        locals_[order] = torch.cat([torch.arange(len(held)) for held in places])
        owner = owners[read_at]
        read = owner.bincount(minlength=len(places))
        most = int(read.max())
        by_owner = owner.argsort(stable=True)
        number = torch.arange(len(owner)) - (read.cumsum(0) - read)[owner[by_owner]]
        slots = torch.empty_like(owner)
        slots[by_owner] = owner[by_owner] * most + number
        mine = (owner == rank).nonzero().squeeze(1)
        return cls(mine.to(device), locals_[read_at[mine]].to(device), most, slots.to(device))


def gather_tokens(values: Tensor, reading: Reading, group: dist.ProcessGroup) -> Tensor:
    """`[this rank's response tokens, numbers]` of every rank as `[response tokens, numbers]` in
    their usual order. Collective; backward is not: each rank takes the gradient of its own part,
    because all work out the same loss."""
    return _GatherTokens.apply(values, reading, group)


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, reading: Reading, group: dist.ProcessGroup) -> Tensor:
        ctx.mine = reading.mine
        padded = values.new_zeros(reading.most, values.shape[1])
        padded[: len(values)] = values
        gathered = values.new_empty(dist.get_world_size(group) * reading.most, values.shape[1])
        if reading.most:
            dist.all_gather(list(gathered.split(reading.most)), padded, group=group)
        return gathered.index_select(0, reading.slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(0, ctx.mine), None, None

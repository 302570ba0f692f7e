"""Ring attention: each rank keeps its queries while keys and values travel around the ring.

Every rank starts with its own keys and values and passes on what it has; the transfer runs while
the block at hand is computed. Outputs of blocks are merged by their `lse`. Only visible blocks are
computed (see `AttentionBlock.between`), which the zigzag makes even work at every step. Forward
keeps the rank's own queries, keys, values, its output and `lse`; backward sends keys and values
around once more, and after each of them the gradient that the ranks on its way have added up, which
so comes home.

Bytes sent by the ranks of a ring of N together, for T tokens, with K key-value heads of size D in
a type of b bytes:

    forward    2 T K D b (N - 1)
    backward   2 T K D (b + 4) (N - 1)      gradients travel in float32

Sources: "Ring Attention with Blockwise Transformers for Near-Infinite Context" (Liu, Zaharia and
Abbeel, 2023); the merge as in USP (Fang and Zhao, 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.models.prompt_trees import PromptTrees
from hybridrl.parallel.block_attention import (
    AttentionBlock,
    block_attention_backward,
    block_attention_forward,
    merge_correction,
)
from hybridrl.parallel.zigzag import RingRow


@dataclass(frozen=True, eq=False)
class RingPlan:
    """The blocks that a rank of the ring computes and the transfers that it makes, for one packed
    row.

    Attributes:
        group: The ring.
        rank: This rank's place in it.
        sizes: Tokens of each ring rank's row.
        blocks: What this rank's queries see of each ring rank's keys: of those of their samples,
            and of shared prompts.
    """

    group: dist.ProcessGroup
    rank: int
    sizes: list[int]
    blocks: list[list[AttentionBlock]]

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup,
        rows: list[RingRow],
        device: torch.device,
        trees: PromptTrees | None = None,
    ) -> RingPlan:
        """Build the plan of this rank for the `rows` of the ring."""
        rank = dist.get_rank(group)
        mine, blocks = rows[rank], []
        for source, row in enumerate(rows):
            found = [AttentionBlock.between(mine, row, rank - source, device)]
            if trees is not None:
                ranges = trees.find_responses(mine.places), trees.find_prompts(row.places)
                found.append(AttentionBlock.of_ranges(*ranges, mine, row, device))
            blocks.append([block for block in found if block is not None])
        return cls(group, rank, [len(row.places) for row in rows], blocks)

    def source(self, step: int) -> int:
        """Return the ring rank whose keys this rank has after `step` transfers."""
        return (self.rank - step) % len(self.sizes)

    def pass_on(self, tensor: Tensor, tokens: int) -> _RingTransfer:
        """Start sending `tensor` to the next rank, and receiving one of `tokens` rows from the
        previous rank."""
        ring = len(self.sizes)
        received = tensor.new_empty(tokens, *tensor.shape[1:])
        following, previous = (self.rank + 1) % ring, (self.rank - 1) % ring
        parts = [(dist.isend, tensor, following), (dist.irecv, received, previous)]
        # Both ends know the sizes: of nothing nothing is sent.
        operations = [
            dist.P2POp(operation, part, group=self.group, group_peer=peer)
            for operation, part, peer in parts
            if part.numel()
        ]
        works = dist.batch_isend_irecv(operations) if operations else []
        return _RingTransfer(tensor, received, works)


@dataclass(frozen=True, eq=False)
class _RingTransfer:
    """A transfer in flight; the sent tensor must live until it is done."""

    sent: Tensor
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def ring_attention(qkv: Tensor, heads: int, plan: RingPlan, scale: float) -> Tensor:
    """Compute causal attention inside each sample of a packed row that the ranks of a ring hold
    together. Collective, forward and backward.

    Args:
        qkv: `[tokens, heads + 2 * key-value heads, head_dim]`: this rank's queries, keys, values.
        heads: Heads of the queries.

    Returns:
        `[tokens, heads, head_dim]`.
    """
    return _RingAttention.apply(qkv, heads, plan, scale)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, plan: RingPlan, scale: float) -> Tensor:
        q, kv = qkv[:, :heads], qkv[:, heads:].contiguous()
        # Each query sees itself, so the first block gives every one of them something to merge.
        out = q.new_zeros(q.shape, dtype=torch.float32)
        lse = q.new_zeros(q.shape[:2], dtype=torch.float32)
        steps = len(plan.sizes)
        for step in range(steps):
            more = step + 1 < steps
            transfer = plan.pass_on(kv, plan.sizes[plan.source(step + 1)]) if more else None
            for number, block in enumerate(plan.blocks[plan.source(step)]):
                k, v = _rows(kv, block.keys).chunk(2, dim=1)
                found = block_attention_forward(_rows(q, block.queries), k, v, block, scale)
                if step == number == 0:
                    out, lse = found
                else:
                    merged = _rows(out, block.queries), _rows(lse, block.queries)
                    for whole, change in zip(
                        (out, lse), merge_correction(*merged, *found), strict=True
                    ):
                        _add(whole, change, block.queries)
            if transfer:
                kv = transfer.wait()
        out = out.to(qkv.dtype)
        ctx.save_for_backward(qkv, out, lse)
        ctx.heads, ctx.plan, ctx.scale = heads, plan, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        qkv, out, lse = ctx.saved_tensors
        heads, plan, steps = ctx.heads, ctx.plan, len(ctx.plan.sizes)
        q, kv = qkv[:, :heads], qkv[:, heads:].contiguous()
        grad_q = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        grad_own = torch.zeros(kv.shape, dtype=torch.float32, device=q.device)
        arriving = None
        for step in range(steps):
            more = step + 1 < steps
            following = plan.sizes[plan.source(step + 1)]
            transfer = plan.pass_on(kv, following) if more else None
            grad_kv = grad_own if step == 0 else torch.zeros_like(kv, dtype=torch.float32)
            for block in plan.blocks[plan.source(step)]:
                k, v = _rows(kv, block.keys).chunk(2, dim=1)
                of_queries = (_rows(x, block.queries) for x in (grad, q))
                merged = (_rows(x, block.queries) for x in (out, lse))
                part_q, *part_kv = block_attention_backward(
                    *of_queries, k, v, *merged, block, ctx.scale
                )
                _add(grad_q, part_q, block.queries)
                _add(grad_kv, torch.cat(part_kv, dim=1), block.keys)
            if arriving:
                grad_kv += arriving.wait()
            if step:
                # To the rank that has these keys next, or after the last step to their owner.
                arriving = plan.pass_on(grad_kv, following)
            if transfer:
                kv = transfer.wait()
        if arriving:
            grad_own += arriving.wait()
        return torch.cat([grad_q, grad_own], dim=1).to(qkv.dtype), None, None, None


def _rows(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def _add(x: Tensor, part: Tensor, rows: Tensor | None) -> None:
    if rows is None:
        x += part
    else:
        x.index_add_(0, rows, part)

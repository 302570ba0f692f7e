"""The KL between a model and a teacher's likeliest tokens, without `[tokens, vocabulary]`.

The tokens that the teacher's list leaves out count as one event, so that nothing is renormalised:
what is left out can only make the divergence smaller (the data processing inequality), and a list
of the whole vocabulary gives it exactly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.models.log_probs import (
    LogitScale,
    VocabularyShard,
    compute_head_gradients,
    compute_products,
    differentiate_logits,
    find_local_rows,
    prepare_operand,
    split_tokens,
)

_MAX_LOG_RATIO = 60.0
"""Nats between two probabilities whose ratio float32 still has room for."""
_MIN_REST = 1e-7
"""Of a teacher's probability for all tokens beyond its list: what float32 tells from 1."""


class TopTokens(NamedTuple):
    """A teacher's likeliest tokens, with their log-probabilities.

    Attributes:
        ids: `[tokens, k]`, no token twice.
        log_probs: `[tokens, k]`, float32, at the temperature of the model that learns.
    """

    ids: Tensor
    log_probs: Tensor


@torch.no_grad()
def find_top_tokens(
    hidden: Tensor,
    weight: Tensor,
    k: int,
    temperature: float = 1.0,
    vocabulary: VocabularyShard | None = None,
    soft_cap: float | None = None,
) -> TopTokens:
    """Return the k likeliest tokens of each distribution; fewer if there are fewer.

    Args:
        hidden, weight, temperature, vocabulary, soft_cap: As of `token_log_probs`.
    """
    states, table = prepare_operand(hidden), prepare_operand(weight)
    scale = LogitScale(temperature, soft_cap)
    width = min(k, len(weight))
    values = hidden.new_empty(len(hidden), width, dtype=torch.float32)
    ids = torch.empty_like(values, dtype=torch.int64)
    log_sum = values.new_empty(len(hidden), 1)
    for chunk in split_tokens(hidden, weight):
        logits = scale.apply(compute_products(states[chunk], table.T))
        values[chunk], ids[chunk] = logits.topk(width, dim=1)
        log_sum[chunk] = logits.logsumexp(1, keepdim=True)
    if vocabulary is not None:
        values, ids = _gather_top_tokens(values, ids + vocabulary.start, vocabulary.group)
        log_sum = _gathered(log_sum, vocabulary.group).logsumexp(1, keepdim=True)
        values, best = values.topk(min(k, values.shape[1]), dim=1)
        ids = ids.gather(1, best)
    return TopTokens(ids, values - log_sum)


def teacher_kl_loss(
    hidden: Tensor,
    weight: Tensor,
    candidates: TopTokens,
    kind: str,
    temperature: float = 1.0,
    vocabulary: VocabularyShard | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """Compute the KL of each distribution and the teacher's, `[tokens]`, float32; differentiable.

    Args:
        candidates: What is known of the teacher's. Ids that the model does not have count as tokens
            beyond the list.
        kind: `reverse`, KL(model, teacher), or `forward`, KL(teacher, model). Gu et al. 2024,
            arXiv:2306.08543, compare the two.
        hidden, weight, temperature, vocabulary, soft_cap: As of `token_log_probs`.
    """
    scale = LogitScale(temperature, soft_cap)
    return _Divergence.apply(hidden, weight, *candidates, kind, scale, vocabulary)


class _Divergence(torch.autograd.Function):
    """An autograd function of the KL, over the listed tokens and one event for all others."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        teacher: Tensor,
        kind: str,
        scale: LogitScale,
        vocabulary: VocabularyShard | None,
    ) -> Tensor:
        local, mine = find_local_rows(ids, slice(0, len(weight)), vocabulary)
        largest = hidden.new_empty(len(hidden), dtype=torch.float32)
        # By token: the sum of exp(z) of all, and of those beyond the list, z less the largest.
        sums = largest.new_empty(len(hidden), 2)
        listed = largest.new_empty(ids.shape)
        states, table = prepare_operand(hidden), prepare_operand(weight)
        for chunk in split_tokens(hidden, weight):
            logits = scale.apply(compute_products(states[chunk], table.T))
            largest[chunk] = logits.amax(1)
            logits -= largest[chunk, None]
            own = logits.gather(1, local[chunk])
            listed[chunk] = torch.where(mine[chunk], own, -torch.inf)
            sums[chunk, 0] = logits.exp().sum(1)
            sums[chunk, 1] = _mask_listed(logits, local[chunk], mine[chunk]).exp_().sum(1)
        if vocabulary is not None:
            mine_largest, largest = largest, largest.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=vocabulary.group)
            shift = mine_largest - largest
            sums *= shift.exp()[:, None]
            listed += shift[:, None]
            dist.all_reduce(sums, group=vocabulary.group)
            dist.all_reduce(listed, dist.ReduceOp.MAX, group=vocabulary.group)
        # Tokens that only the teacher has, such as rows to fill its vocabulary up, are beyond.
        teacher = torch.where(listed.isneginf(), -torch.inf, teacher)
        log_sum = sums[:, 0].log()
        # The last event is that of all other tokens.
        log_p = torch.cat([listed, sums[:, 1:].log()], 1) - log_sum[:, None]
        rest = (1 - teacher.exp().sum(1, keepdim=True)).clamp_min(_MIN_REST).log()
        log_q = torch.cat([teacher, rest], 1)
        p, gap = log_p.exp(), torch.where(log_p.isneginf(), 0.0, log_p - log_q)
        if kind == "reverse":
            total = (p * gap).sum(1)
            coefficients = gap - total[:, None]
        else:
            q = log_q.exp()
            total = -(q * gap).sum(1)
            # By p, as of the others, a listed token's could be infinite.
            beyond = 1 - (-gap[:, -1:]).clamp_max(_MAX_LOG_RATIO).exp()
            coefficients = torch.cat([(p - q)[:, :-1], beyond], 1)
        ctx.save_for_backward(hidden, weight, ids, coefficients, largest, log_sum)
        ctx.kind, ctx.scale, ctx.vocabulary = kind, scale, vocabulary
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, ids, coefficients, largest, log_sum = ctx.saved_tensors

        def of_products(chunk: slice, block: slice, products: Tensor) -> Tensor:
            local, mine = find_local_rows(ids[chunk], block, ctx.vocabulary)

            def of_logits(log_softmax: Tensor) -> Tensor:
                listed = coefficients[chunk, :-1]
                if ctx.kind == "reverse":
                    listed = listed * log_softmax.gather(1, local).exp()
                found = _mask_listed(log_softmax, local, mine).exp_()
                found.mul_(coefficients[chunk, -1:]).scatter_add_(1, local, listed * mine)
                return found.mul_(grad[chunk, None])

            return differentiate_logits(
                products, ctx.scale, largest[chunk], log_sum[chunk], of_logits
            )

        grads = compute_head_gradients(
            hidden, weight, ctx.vocabulary, of_products, with_weight=ctx.needs_input_grad[1]
        )
        return *grads, None, None, None, None, None


def _mask_listed(logits: Tensor, rows: Tensor, mine: Tensor) -> Tensor:
    """Set the logits of the listed tokens that are this rank's to minus infinity, in place."""
    return logits.scatter_add_(1, rows, torch.where(mine, -torch.inf, 0.0))


def _gather_top_tokens(
    values: Tensor, ids: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Gather the top tokens of all ranks side by side, padded where a rank has fewer rows."""
    most = torch.tensor([values.shape[1]], device=values.device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=group)
    room = (0, int(most) - values.shape[1])
    values = torch.nn.functional.pad(values, room, value=-torch.inf)
    return _gathered(values, group), _gathered(torch.nn.functional.pad(ids, room), group)


def _gathered(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather `[tokens, columns]` of all ranks side by side."""
    parts = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(parts, mine.contiguous(), group=group)
    return torch.cat(parts, 1)

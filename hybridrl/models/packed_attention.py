"""Attention over packed samples, registered through transformers' public attention interface.

This is the one place where the engine touches a model's arithmetic: the models are transformers'
own, and any whose attention goes through that interface works. On CUDA half precision runs on
variable-length flash attention. Elsewhere samples of similar length are laid out as
rectangles for torch's scaled-dot-product attention; only attention sees the padding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from hybridrl.models.flash_attention import (
    FlashCase,
    PromptCase,
    flash_backward,
    flash_forward,
)
from hybridrl.models.linear_map import apply_linear_map
from hybridrl.models.packed_samples import AttentionBucket, PackingMetadata
from hybridrl.system.device_traits import fits_flash

_SINK_DIMS = 8
"""Kernels want heads of a multiple of 8 dims."""
PACKED_ATTENTION = "hybridrl_packed"
"""Value of `attn_implementation` that selects this attention."""


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packing: PackingMetadata,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention inside each packed sample, on all rows of a forward.

    Args:
        query: `[rows, heads, tokens, head_dim]`, of one packed row, or of a sample in each; key and
            value have the key-value heads.
        packing: Bounds of the samples in all rows, one after the other; passed to the model's
            forward as a keyword.
        s_aux: `[heads]`, the attention sinks: a score of each head for looking at nothing.

    Returns:
        `[rows, tokens, heads, head_dim]`.

    Raises:
        ValueError: for scores that are bounded, whatever they are: those of a small model may lie
            too far below the bound to show it.
    """
    if softcap is not None:
        raise ValueError(f"its scores have a soft cap, attn_logit_softcapping={softcap}")
    rows = len(query)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    window = sliding_window if sliding_window and sliding_window < packing.longest else None
    if packing.trees is not None:  # a sample is longer than its parts
        window = sliding_window
    if packing.split is not None:
        out = packing.split.attend(q, k, v, scaling, window)
    else:
        out = causal_attention(q, k, v, packing, scaling, window, s_aux)
    return out.unflatten(0, (rows, -1)), None


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packing: PackingMetadata,
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor | None = None,
    prompt: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute causal attention inside each packed sample whose tokens are all on this rank.

    Args:
        q: `[tokens, heads, head_dim]`; k and v have the key-value heads, and those of v may be
            less wide.
        scale: Of the scores; 1 / sqrt(head_dim) if None.
        window: How many tokens a query sees, itself included; None for all before it.
        sinks: See `packed_attention`.
        prompt: Keys and values before those of every sample, which all of these see; not with
            flash attention.

    Returns:
        `[tokens, heads, width of v]`.

    Raises:
        ValueError: for a window over a shared prompt.
    """
    trees = packing.trees
    if trees is not None and window is not None:
        raise ValueError(
            f"its attention has windows of {window} tokens, with which samples cannot share a "
            "prompt: set actor.share_prefixes=false"
        )
    if fits_flash(q):
        width = v.shape[-1]  # the kernels want that of the keys, which latent attention makes wider
        v = F.pad(v, (0, k.shape[-1] - width))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        bounds = (packing.cu_seqlens, packing.longest)
        case = FlashCase(*bounds, *bounds, True, scale, window)
        above = None if trees is None else trees.prompt_case(scale)
        return _FlashAttention.apply(q, k, v, sinks, case, above)[..., :width]
    if trees is not None:
        return _tree_attention(q, k, v, packing, scale, sinks)
    buckets = packing.buckets
    if len(buckets) == 1:
        return _rectangle(q, k, v, buckets[0], scale, window, sinks, prompt)
    output = q.new_zeros(*q.shape[:-1], v.shape[-1])
    for bucket in buckets:
        part = _rectangle(
            *(x.index_select(0, bucket.source) for x in (q, k, v)),
            *(bucket, scale, window, sinks, prompt),
        )
        output = output.index_copy(0, bucket.source, part)
    return output


def _tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packing: PackingMetadata,
    scale: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute `causal_attention` of a packed row with trees, without a kernel for samples of any
    length."""
    sizes, others, trees = packing.tree_parts
    queries, keys, values = (x.split(sizes) for x in (q, k, v))
    alone = [n for n in range(len(sizes)) if n % 3 != 2]
    parts = (torch.cat([x[n] for n in alone]) for x in (queries, keys, values))
    found = causal_attention(*parts, others, scale, None, sinks)
    pieces = list(found.split([sizes[n] for n in alone]))
    for number, responses in enumerate(trees):
        at = 3 * number + 2
        own, prompt = (queries[at], keys[at], values[at]), (keys[at - 1], values[at - 1])
        pieces.insert(at, causal_attention(*own, responses, scale, None, sinks, prompt))
    return torch.cat(pieces)


class _FlashAttention(torch.autograd.Function):
    """An autograd function of flash attention. A sink adds to the denominator of the softmax alone:
    the output becomes smaller and `lse`, which is all that the backward needs of it, larger."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        case: FlashCase,
        above: PromptCase | None = None,
    ) -> torch.Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = flash_forward(q, k, v, case)
        if above is not None:
            out, lse = _merge_prompts(q, k, v, above, out, lse)
        if sinks is not None:
            without = lse
            lse = torch.logaddexp(without, sinks[:, None].float())
            out = (out * (without - lse).exp().T[..., None]).to(out.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.case, ctx.above = case, above
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        q, k, v, sinks, out, lse = ctx.saved_tensors
        grads = flash_backward(grad.contiguous(), q, k, v, out, lse, ctx.case)
        if (above := ctx.above) is not None:
            queries, keys, bounds = above
            of_queries, of_keys = (
                [x[at] for x in xs] for xs, at in (((grad, q, out), queries), ((k, v), keys))
            )
            parts = flash_backward(
                *of_queries[:2], *of_keys, of_queries[2], lse[:, queries].contiguous(), bounds
            )
            for whole, part, places in zip(grads, parts, (queries, keys, keys), strict=True):
                whole.index_add_(0, places, part)
        if sinks is None:
            return *grads, None, None, None
        shares = (sinks[:, None].float() - lse).exp()
        of_sinks = -(shares * (grad.float() * out.float()).sum(-1).T).sum(1)
        return *grads, of_sinks.to(sinks.dtype), None, None


def _merge_prompts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    above: PromptCase,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and `lse` of attention, including what responses see of their prompts. The
    given tensors are not changed, because activation checkpointing may keep them."""
    queries, keys, bounds = above
    part, part_lse = flash_forward(q[queries], k[keys], v[keys], bounds)
    own, own_lse = out[queries].float(), lse[:, queries]
    share = torch.sigmoid(part_lse - own_lse).T[..., None]
    merged = (own + share * (part.float() - own)).to(out.dtype)
    merged_lse = torch.logaddexp(own_lse, part_lse)
    return out.index_copy(0, queries, merged), lse.index_copy(1, queries, merged_lse)


def _rectangle(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bucket: AttentionBucket,
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor | None = None,
    prompt: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute the attention of one bucket, `[real tokens, heads, head_dim]` in and out. Right
    padding needs no mask, because a causal query never looks to its right."""
    size = bucket.rows * bucket.longest
    full = size == len(q)
    scatter = partial(_scatter, places=bucket.target, size=size)
    select = partial(torch.index_select, dim=0, index=bucket.target)
    dense = [
        (x if full else apply_linear_map(x, scatter, select))
        .view(bucket.rows, bucket.longest, *x.shape[1:])
        .transpose(1, 2)
        for x in (q, k, v)
    ]
    mask, seen = None, 0
    if prompt is not None:
        seen = len(prompt[0])
        dense[1:] = [
            torch.cat([x.transpose(0, 1).expand(bucket.rows, -1, -1, -1), part], 2)
            for x, part in zip(prompt, dense[1:], strict=True)
        ]
    if prompt is not None or window is not None or sinks is not None:
        mask = torch.ones(bucket.longest, seen + bucket.longest, dtype=torch.bool, device=q.device)
        mask = mask.tril(seen) if window is None else mask.tril().triu(1 - window)
    if sinks is not None:
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        dense, mask = _with_sink_key(*dense, sinks / scale), F.pad(mask, (1, 0), value=True)
    out = F.scaled_dot_product_attention(
        *dense,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=dense[0].shape[1] != dense[1].shape[1],
    )[..., : v.shape[-1]]
    flat = out.transpose(1, 2).flatten(0, 1)
    return flat if full else apply_linear_map(flat, select, scatter)


def _with_sink_key(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, products: torch.Tensor
) -> list[torch.Tensor]:
    """Prepend a key whose product with every query of a head is given, and whose value is zero. All
    are `[rows, heads, tokens, head_dim]`; the result has keys for each head, and `_SINK_DIMS` more
    dims: a 1 in the first of a query meets the product there in that key."""
    heads = q.shape[1]
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    ones = q.new_ones(*q.shape[:-1], 1)
    sink = F.pad(products.to(k.dtype).view(1, heads, 1, 1), (k.shape[-1], _SINK_DIMS - 1))
    return [
        F.pad(torch.cat([q, ones], -1), (0, _SINK_DIMS - 1)),
        torch.cat([sink.expand(len(k), -1, -1, -1), F.pad(k, (0, _SINK_DIMS))], 2),
        F.pad(v, (0, k.shape[-1] + _SINK_DIMS - v.shape[-1], 1, 0)),
    ]


def _scatter(x: torch.Tensor, places: torch.Tensor, size: int) -> torch.Tensor:
    """Put rows at distinct places of a larger zero tensor. The gradient is a plain selection, which
    autograd's own index operations do not know (they accumulate)."""
    return x.new_zeros(size, *x.shape[1:]).index_copy_(0, places, x)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
# The packing says which tokens see each other; a mask over all packed tokens would be quadratic.
AttentionMaskInterface.register(PACKED_ATTENTION, lambda *_, **__: None)

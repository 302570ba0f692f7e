"""What kernels of flash attention promise, which need a GPU: by all scores of a sample at once."""

import itertools

import torch


def _blocks_of(q, k, cu_q, cu_k, scale, causal, window):
    """Places of each sample's queries and keys, and their scores `[heads, queries, keys]`. A window
    looks back so many tokens; below 0 there is none."""
    bounds = (itertools.pairwise(x.tolist()) for x in (cu_q, cu_k))
    for queries, keys in zip(*(itertools.starmap(slice, one) for one in bounds), strict=True):
        of_keys = k[keys].repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("qhd,khd->hqk", q[queries], of_keys) * scale
        seen = torch.ones(scores.shape[1:], dtype=torch.bool)
        seen = seen.tril() if causal or window >= 0 else seen
        seen = seen.triu(-window) if window >= 0 else seen
        yield queries, keys, scores.masked_fill(~seen, -torch.inf)


def attend(q, k, v, cu_q, cu_k, scale, causal, window=-1):
    """Return the output, and the logarithm of the sums of exponentials `[heads, queries]`."""
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    for queries, keys, scores in _blocks_of(q, k, cu_q, cu_k, scale, causal, window):
        values = v[keys].repeat_interleave(q.shape[1] // k.shape[1], 1)
        lse[:, queries] = scores.logsumexp(-1)
        out[queries] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return out, lse


def differentiate(grad, q, k, v, out, lse, cu_q, cu_k, scale, causal, window=-1):
    """Return the gradients of q, k and v, by `out` and `lse` as they are given."""
    found, groups = [torch.zeros_like(x) for x in (q, k, v)], q.shape[1] // k.shape[1]
    for queries, keys, scores in _blocks_of(q, k, cu_q, cu_k, scale, causal, window):
        weights = (scores - lse[:, queries, None]).exp()
        of_keys, values = (x[keys].repeat_interleave(groups, 1) for x in (k, v))
        delta = (grad[queries] * out[queries]).sum(-1).T[..., None]
        of_scores = torch.einsum("qhd,khd->hqk", grad[queries], values) - delta
        of_scores = weights * of_scores * scale
        found[0][queries] = torch.einsum("hqk,khd->qhd", of_scores, of_keys)
        for n, (left, right) in ((1, (of_scores, q)), (2, (weights, grad))):
            part = torch.einsum("hqk,qhd->khd", left, right[queries])
            found[n][keys] = part.unflatten(1, (-1, groups)).sum(2)
    return tuple(found)


def _check_call(tensors, cu_q, cu_k, max_q, max_k, dropout, causal, window, right):
    assert all(x.is_contiguous() for x in tensors) and dropout == 0.0
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (int(cu_q.diff().max()), int(cu_k.diff().max())) == (max_q, max_k)
    # With a window it is causal by its right end.
    assert right == (0 if causal or window >= 0 else -1) and not (causal and window >= 0)


def aten_forward(
    *arguments, return_debug_mask, scale, window_size_left, window_size_right
) -> tuple[torch.Tensor | None, ...]:
    """As `torch.ops.aten._flash_attention_forward`."""
    q, k, v, cu_q, cu_k, *_, causal = arguments
    assert not return_debug_mask
    _check_call((q, k, v), *arguments[3:], window_size_left, window_size_right)
    return *attend(q, k, v, cu_q, cu_k, scale, causal, window_size_left), None, None, None


def aten_backward(
    *arguments, scale, window_size_left, window_size_right
) -> tuple[torch.Tensor, ...]:
    """As `torch.ops.aten._flash_attention_backward`."""
    *tensors, cu_q, cu_k, _, _, _, causal, state, unused = arguments
    assert state.dtype == torch.uint64 and not unused.numel()
    _check_call(tensors, *arguments[6:-2], window_size_left, window_size_right)
    return differentiate(*tensors, cu_q, cu_k, scale, causal, window_size_left)

"""Block attention without a variable-length kernel: samples of similar length are padded to
rectangles and processed in slices of queries, so that scores take bounded memory. Computes in
float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.models.packed_samples import AttentionBucket, group_similar_samples

SLICE_ELEMENTS = 1 << 20
"""Scores held at a time."""


@dataclass(frozen=True, eq=False)
class PaddedRectangle:
    """Samples of similar length, padded to the longest.

    What a padded query gives is left out, and its gradient is 0. A padded key is masked, unless
    the block is causal: then no real query sees it.

    Attributes:
        queries: Where the real queries stand among the block's, and in the flattened rectangle.
        keys: The same for keys.
        causal: Query i of a row sees its keys 0 to i.
        no_key: bool `[rows, longest]`, where keys are padding; None if nowhere.
    """

    queries: AttentionBucket
    keys: AttentionBucket
    causal: bool
    no_key: Tensor | None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor
    ) -> None:
        """Write the part of `out` and `lse` of these samples; see `block_attention_forward`."""
        groups = q.shape[1] // k.shape[1]
        queries, keys, values = self._queries(q, groups), self._keys(k), self._keys(v)
        dense_out, dense_lse = torch.empty_like(queries), torch.empty_like(queries[..., :1])
        for part, seen in self._slices(q.shape[1]):
            scores = self._scores(queries, keys, part, seen, scale)
            highest = scores.amax(-1, keepdim=True)
            total = scores.sub_(highest).exp_().sum(-1, keepdim=True)
            dense_lse[:, :, :, part] = highest + total.log()
            dense_out[:, :, :, part] = _times(scores, values[:, :, seen]) / total
        self._put_queries(dense_out, out)
        self._put_queries(dense_lse, lse[..., None])

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        delta: Tensor,
        lse: Tensor,
        scale: float,
        into: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Write the part of the gradients of q, k and v of these samples to `into`.

        Args:
            delta: For each query and head the product of output and its gradient,
                `[queries, heads]`.
        """
        groups = q.shape[1] // k.shape[1]
        queries, grads = self._queries(q, groups), self._queries(grad, groups)
        sums, deltas = (
            self._queries(lse[..., None], groups),
            self._queries(delta[..., None], groups),
        )
        keys, values = self._keys(k), self._keys(v)
        found_q, found_k, found_v = (torch.zeros_like(x) for x in (queries, keys, values))
        for part, seen in self._slices(q.shape[1]):
            scores = self._scores(queries, keys, part, seen, scale)
            weights = scores.sub_(sums[:, :, :, part]).exp_()
            found_v[:, :, seen] += _across(weights, grads[:, :, :, part])
            grad_scores = _times(grads[:, :, :, part], values[:, :, seen].transpose(2, 3))
            grad_scores = grad_scores.sub_(deltas[:, :, :, part]).mul_(weights).mul_(scale)
            found_q[:, :, :, part] = _times(grad_scores, keys[:, :, seen])
            found_k[:, :, seen] += _across(grad_scores, queries[:, :, :, part])
        self._put_queries(found_q, into[0])
        self._put_keys(found_k, into[1])
        self._put_keys(found_v, into[2])

    def _queries(self, x: Tensor, groups: int) -> Tensor:
        """Reshape `[queries, heads, n]` to `[rows, key-value heads, groups, longest, n]`."""
        dense = _dense(x, self.queries)
        return dense.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).contiguous()

    def _keys(self, x: Tensor) -> Tensor:
        """Reshape `[keys, key-value heads, n]` to `[rows, key-value heads, longest, n]`."""
        dense = _dense(x, self.keys)
        return dense.transpose(1, 2).contiguous()

    def _put_queries(self, dense: Tensor, x: Tensor) -> None:
        flat = dense.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        x[self.queries.source] = flat.index_select(0, self.queries.target)

    def _put_keys(self, dense: Tensor, x: Tensor) -> None:
        flat = dense.transpose(1, 2).flatten(0, 1)
        x[self.keys.source] = flat.index_select(0, self.keys.target)

    def _slices(self, heads: int) -> Iterator[tuple[slice, slice]]:
        """Yield slices of queries whose scores fit the limit, each with the keys that it may
        see."""
        queries, keys = self.queries.longest, self.keys.longest
        step = max(1, SLICE_ELEMENTS // (self.keys.rows * heads * keys))
        for start in range(0, queries, step):
            stop = min(start + step, queries)
            yield slice(start, stop), slice(0, stop if self.causal else keys)

    def _scores(
        self, queries: Tensor, keys: Tensor, part: slice, seen: slice, scale: float
    ) -> Tensor:
        """Compute the scores `[rows, key-value heads, groups, queries of the part, keys seen]`."""
        scores = _times(queries[:, :, :, part], keys[:, :, seen].transpose(2, 3)).mul_(scale)
        if self.causal:
            shape = scores.shape[-2:]
            later = torch.ones(shape, dtype=torch.bool, device=scores.device).triu(1 + part.start)
            scores.masked_fill_(later, -torch.inf)
        elif self.no_key is not None:
            scores.masked_fill_(self.no_key[:, None, None, None, seen], -torch.inf)
        return scores


def make_rectangles(
    query_lengths: Tensor, key_lengths: Tensor, causal: bool, device: torch.device
) -> list[PaddedRectangle]:
    """Divide samples into few rectangles with little padding.

    Args:
        query_lengths: int64 `[samples]`, at least 1 each; the queries stand sample after sample.
        key_lengths: As `query_lengths`; equal to it if `causal`.
    """
    found = []
    for samples in group_similar_samples(torch.stack([query_lengths, key_lengths], 1).tolist()):
        queries = AttentionBucket.of(samples, query_lengths, device)
        keys = AttentionBucket.of(samples, key_lengths, device)
        no_key, lengths = None, key_lengths[samples]
        if not causal and int(lengths.min()) < keys.longest:
            no_key = (torch.arange(keys.longest) >= lengths[:, None]).to(device)
        found.append(PaddedRectangle(queries, keys, causal, no_key))
    return found


def _dense(x: Tensor, bucket: AttentionBucket) -> Tensor:
    """Copy `[tokens, heads, n]` into a padded `[rows, longest, heads, n]` of float32."""
    shape = bucket.rows, bucket.longest
    dense = torch.zeros(shape[0] * shape[1], *x.shape[1:], dtype=torch.float32, device=x.device)
    dense.index_copy_(0, bucket.target, x.index_select(0, bucket.source).float())
    return dense.unflatten(0, shape)


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Multiply `[rows, heads, groups, m, n]` by `[rows, heads, n, o]` in one product for all
    groups; broadcasting would copy the right side for each."""
    product = left.flatten(2, 3) @ right
    return product.unflatten(2, left.shape[2:4])


def _across(left: Tensor, right: Tensor) -> Tensor:
    """Multiply `[rows, heads, groups, m, n]` with `[rows, heads, groups, m, o]`, summed over groups
    and m, to `[rows, heads, n, o]`."""
    return left.flatten(2, 3).transpose(2, 3) @ right.flatten(2, 3)

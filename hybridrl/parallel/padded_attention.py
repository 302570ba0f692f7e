"""Block attention without a variable-length kernel: samples of similar length are padded to
rectangles and processed in slices of queries, so that scores take bounded memory. Computes in
float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.models.packed_models import MAX_PADDING_RATIO
from hybridrl.parallel.zigzag import concatenate_ranges

SLICE_ELEMENTS = 1 << 20
"""Scores held at a time."""


@dataclass(frozen=True, eq=False)
class PaddedRectangle:
    """Samples of similar length, padded to the longest.

    What a padded query gives is left out, and its gradient is 0. A padded key is masked, unless
    the block is causal: then no real query sees it.

    Attributes:
        rows: Samples.
        longest_query: Queries of a row, padding included.
        longest_key: Keys of a row, padding included.
        query_source: Where the real queries stand among the block's.
        query_target: Where they stand in the flattened rectangle.
        key_source: As `query_source`, for keys.
        key_target: As `query_target`, for keys.
        causal: Query i of a row sees its keys 0 to i.
        no_key: bool `[rows, longest_key]`, where keys are padding; None if nowhere.
    """

    rows: int
    longest_query: int
    longest_key: int
    query_source: Tensor
    query_target: Tensor
    key_source: Tensor
    key_target: Tensor
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
        """Reshape `[queries, heads, n]` to `[rows, key-value heads, groups, longest_query, n]`."""
        dense = _dense(x, self.query_source, self.query_target, self.rows, self.longest_query)
        return dense.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).contiguous()

    def _keys(self, x: Tensor) -> Tensor:
        """Reshape `[keys, key-value heads, n]` to `[rows, key-value heads, longest_key, n]`."""
        dense = _dense(x, self.key_source, self.key_target, self.rows, self.longest_key)
        return dense.transpose(1, 2).contiguous()

    def _put_queries(self, dense: Tensor, x: Tensor) -> None:
        flat = dense.permute(0, 3, 1, 2, 4).flatten(2, 3).flatten(0, 1)
        x[self.query_source] = flat.index_select(0, self.query_target)

    def _put_keys(self, dense: Tensor, x: Tensor) -> None:
        flat = dense.transpose(1, 2).flatten(0, 1)
        x[self.key_source] = flat.index_select(0, self.key_target)

    def _slices(self, heads: int) -> Iterator[tuple[slice, slice]]:
        """Yield slices of queries whose scores fit the limit, each with the keys that it may
        see."""
        step = max(1, SLICE_ELEMENTS // (self.rows * heads * self.longest_key))
        for start in range(0, self.longest_query, step):
            stop = min(start + step, self.longest_query)
            yield slice(start, stop), slice(0, stop if self.causal else self.longest_key)

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
    queries, keys = query_lengths.tolist(), key_lengths.tolist()
    order = sorted(range(len(queries)), key=lambda i: -(queries[i] + keys[i]))
    groups: list[list[int]] = []
    longest_query = longest_key = real = 0
    for i in order:
        wide, high = max(longest_key, keys[i]), max(longest_query, queries[i])
        tokens = real + queries[i] + keys[i]
        if groups and (wide + high) * (len(groups[-1]) + 1) <= MAX_PADDING_RATIO * tokens:
            groups[-1].append(i)
            longest_query, longest_key, real = high, wide, tokens
        else:
            groups.append([i])
            longest_query, longest_key, real = queries[i], keys[i], queries[i] + keys[i]
    query_starts = query_lengths.cumsum(0) - query_lengths
    key_starts = key_lengths.cumsum(0) - key_lengths
    found = []
    for group in groups:
        rows = torch.tensor(sorted(group))
        of_queries, of_keys = query_lengths[rows], key_lengths[rows]
        longest_query, longest_key = int(of_queries.max()), int(of_keys.max())
        row = torch.arange(len(rows))
        no_key = None
        if not causal and int(of_keys.min()) < longest_key:
            no_key = (torch.arange(longest_key) >= of_keys[:, None]).to(device)
        found.append(
            PaddedRectangle(
                rows=len(rows),
                longest_query=longest_query,
                longest_key=longest_key,
                query_source=concatenate_ranges(query_starts[rows], of_queries).to(device),
                query_target=concatenate_ranges(row * longest_query, of_queries).to(device),
                key_source=concatenate_ranges(key_starts[rows], of_keys).to(device),
                key_target=concatenate_ranges(row * longest_key, of_keys).to(device),
                causal=causal,
                no_key=no_key,
            )
        )
    return found


def _dense(x: Tensor, source: Tensor, target: Tensor, rows: int, longest: int) -> Tensor:
    """Copy `[tokens, heads, n]` into a padded `[rows, longest, heads, n]` of float32."""
    dense = torch.zeros(rows * longest, *x.shape[1:], dtype=torch.float32, device=x.device)
    return dense.index_copy_(0, target, x.index_select(0, source).float()).unflatten(
        0, (rows, longest)
    )


def _times(left: Tensor, right: Tensor) -> Tensor:
    """Multiply `[rows, heads, groups, m, n]` by `[rows, heads, n, o]` in one product for all
    groups; broadcasting would copy the right side for each."""
    product = left.flatten(2, 3) @ right
    return product.unflatten(2, left.shape[2:4])


def _across(left: Tensor, right: Tensor) -> Tensor:
    """Multiply `[rows, heads, groups, m, n]` with `[rows, heads, groups, m, o]`, summed over groups
    and m, to `[rows, heads, n, o]`."""
    return left.flatten(2, 3).transpose(2, 3) @ right.flatten(2, 3)

"""Attention of one block: some queries of every sample against some of its keys.

Ring attention is a sum over such blocks. Each gives its output together with the logarithm of its
softmax's denominator (`lse`), from which blocks are merged; the backward pass of a block takes the
output and `lse` of all blocks together, so that nothing of the size queries x keys is ever kept.
On CUDA half-precision blocks run on variable-length flash attention; elsewhere, and in float32, on
`make_rectangles`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrl.models.flash_attention import FlashCase, flash_backward, flash_forward
from hybridrl.models.token_ranges import concatenate_ranges
from hybridrl.parallel.padded_attention import PaddedRectangle, make_rectangles
from hybridrl.parallel.zigzag import RingRow
from hybridrl.system.device_traits import copy_to_device, fits_flash


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """A block of attention: the tokens of a row of queries and the tokens of a row of keys that
    they see.

    Attributes:
        queries: Indices of the block's queries in their row, sample after sample; None for all.
        keys: The same for keys.
        query_lengths: int64 `[samples]`, on the CPU; samples without queries or without keys are
            left out.
        key_lengths: int64 `[samples]`.
        causal: Query i of a sample sees its keys 0 to i; otherwise it sees all of them.
        device: Where the kernels run.
    """

    queries: Tensor | None
    keys: Tensor | None
    query_lengths: Tensor
    key_lengths: Tensor
    causal: bool
    device: torch.device

    @classmethod
    def between(
        cls, reader: RingRow, source: RingRow, distance: int, device: torch.device
    ) -> AttentionBlock | None:
        """Build the block of the reader's queries and the source's keys that they see; None if no
        query sees any.

        Of an earlier rank only the early chunks lie before anything here, and they lie before
        everything. Both chunks of a later rank lie before the late chunks here, and after the
        early ones. So no mask is needed, but for a rank's own keys, and there the tokens stand in
        the order of the sample.

        Args:
            distance: The reader's place in the ring minus the source's.
        """
        queries = reader.late if distance < 0 else reader.lengths
        keys = source.early if distance > 0 else source.lengths
        kept = (queries > 0) & (keys > 0)
        if not kept.any():
            return None
        skipped = reader.early if distance < 0 else torch.zeros_like(reader.early)
        starts = _starts(reader.lengths) + skipped
        return cls(
            queries=_indices(starts[kept], queries[kept], len(reader.places), device),
            keys=_indices(_starts(source.lengths)[kept], keys[kept], len(source.places), device),
            query_lengths=queries[kept],
            key_lengths=keys[kept],
            causal=distance == 0,
            device=device,
        )

    @classmethod
    def of_ranges(
        cls,
        queries: tuple[Tensor, Tensor],
        keys: tuple[Tensor, Tensor],
        reader: RingRow,
        source: RingRow,
        device: torch.device,
    ) -> AttentionBlock | None:
        """Build the block in which each range of the reader's tokens sees all of a range of the
        source's; None if no query sees any key. Ranges are starts and lengths."""
        kept = (queries[1] > 0) & (keys[1] > 0)
        if not kept.any():
            return None
        return cls(
            _indices(queries[0][kept], queries[1][kept], len(reader.places), device),
            _indices(keys[0][kept], keys[1][kept], len(source.places), device),
            *(queries[1][kept], keys[1][kept], False, device),
        )

    def flash_case(self, scale: float) -> FlashCase:
        """Return the block as flash attention takes it."""
        lengths = (self.query_lengths, self.key_lengths)
        (queries, keys), (longest, longest_key) = self._bounds, (int(x.max()) for x in lengths)
        return FlashCase(queries, longest, keys, longest_key, self.causal, scale)

    @cached_property
    def _bounds(self) -> tuple[Tensor, Tensor]:
        queries, keys = (
            copy_to_device(F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32), self.device)
            for lengths in (self.query_lengths, self.key_lengths)
        )
        return queries, keys

    @cached_property
    def rectangles(self) -> list[PaddedRectangle]:
        """The samples as padded rectangles, for the portable kernel."""
        return make_rectangles(self.query_lengths, self.key_lengths, self.causal, self.device)


def block_attention_forward(
    q: Tensor, k: Tensor, v: Tensor, block: AttentionBlock, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the attention of a block.

    Args:
        q: `[queries, heads, head_dim]`, those of the block only.
        k: `[keys, key-value heads, head_dim]`; each serves as many neighbouring heads as fit.
        v: As `k`.
        scale: Scores are multiplied by it.

    Returns:
        Output `[queries, heads, head_dim]` and `lse` `[queries, heads]`, float32.
    """
    if fits_flash(q):
        tensors = (x.contiguous() for x in (q, k, v))
        half, lse = flash_forward(*tensors, block.flash_case(scale))
        return half.float(), lse.T
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for rectangle in block.rectangles:
        rectangle.forward(q, k, v, scale, out, lse)
    return out, lse


def block_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    block: AttentionBlock,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the float32 gradients of a block's queries, keys and values.

    Args:
        grad: Gradient of the merged output, `[queries, heads, head_dim]`.
        out: Output merged from all that the queries see, of the type of `q`.
        lse: Likewise, `[queries, heads]` in float32.
    """
    if fits_flash(q):
        tensors = (x.contiguous() for x in (grad, q, k, v, out, lse.T))
        grad_q, grad_k, grad_v = flash_backward(*tensors, block.flash_case(scale))
        return grad_q.float(), grad_k.float(), grad_v.float()
    found = tuple(torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    delta = (grad.float() * out.float()).sum(-1)
    for rectangle in block.rectangles:
        rectangle.backward(grad, q, k, v, delta, lse, scale, found)
    return found


def merge_correction(
    out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the terms to add to the output and `lse` over some keys to include the keys of a block
    as well."""
    share = torch.sigmoid(block_lse - lse)
    return share[..., None] * (block_out - out), -F.logsigmoid(lse - block_lse)


def _starts(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0) - lengths


def _indices(starts: Tensor, lengths: Tensor, tokens: int, device: torch.device) -> Tensor | None:
    return None if int(lengths.sum()) == tokens else concatenate_ranges(starts, lengths).to(device)

"""The value that a loss returns, and the losses that need no advantages."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.algorithms.segments import apply_mask, as_float


class TokenLoss(NamedTuple):
    """A loss per token, to be minimised, and metrics per token.

    The loss of a mini-batch is ``(weights * loss).sum()`` with weights from `token_weights`;
    metrics are detached and averaged under the same mask. A metric named ``*_by_row`` has a value
    for each sample instead, and is averaged over the samples.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


def negative_log_likelihood(log_probs: Tensor, *, mask: Tensor | None = None) -> TokenLoss:
    """Return the supervised loss, -log_probs, on tokens of any shape; 0 off a given mask."""
    (log_probs,) = as_float(log_probs)
    return TokenLoss(-apply_mask(log_probs, mask), {})


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    clip: float | None = None,
    *,
    mask: Tensor | None = None,
) -> TokenLoss:
    """Return the critic's loss, 0.5 max((v - R)^2, (clamp(v, old - clip, old + clip) - R)^2).

    Without ``clip`` it is 0.5 (v - R)^2. The metric ``clip_fraction`` is 1 where the clipped
    square is the larger, so that the token has no gradient. Any shape, all alike; with a
    ``mask`` everything is 0 off it, for any input there.
    Clipping as in Engstrom 2020, arXiv:2005.12729.
    """
    values, old_values, returns = as_float(values, old_values.detach(), returns.detach())
    values, old_values, returns = (apply_mask(x, mask) for x in (values, old_values, returns))
    squares = (values - returns).square()
    clipped = torch.zeros_like(squares)
    if clip is not None:
        near_old = values.clamp(old_values - clip, old_values + clip)
        clipped_squares = (near_old - returns).square()
        clipped = (clipped_squares > squares).to(squares.dtype)
        squares = torch.maximum(squares, clipped_squares)
    return TokenLoss(0.5 * squares, {"clip_fraction": clipped})

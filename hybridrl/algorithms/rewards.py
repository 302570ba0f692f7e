"""Shaping of rewards before advantages are taken."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.kl import kl
from hybridrl.algorithms.masking import as_float, on_mask
from hybridrl.algorithms.segments import Segments, samples_of
from hybridrl.errors import ConfigError


@torch.no_grad()
def shape_rewards(
    scores: Tensor,
    mask: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    coefficient: float,
    estimator: str,
    *,
    segments: Segments | None = None,
) -> Tensor:
    """Rewards per token: the score on the last token of its row, minus coefficient * kl on each.

    scores: ``[rows]``; the others ``[rows, time]``, or packed ``[tokens]`` with ``segments``. The
    last token is the last under the mask; a row without tokens has no place for its score, and
    rows do not depend on each other. estimator: see `kl`; in a reward it should be ``k1``.
    Ziegler 2019, arXiv:1909.08593, section 2.
    """
    samples = samples_of(mask, segments)
    penalty = coefficient * kl(log_probs, ref_log_probs, estimator, mask=samples.mask)
    scores, penalty = as_float(scores, penalty)
    return on_mask(samples.spread(scores), samples.ends) - penalty


@torch.no_grad()
def overlong_penalty(lengths: Tensor, limit: int, buffer: int, factor: float = 1.0) -> Tensor:
    """A soft punishment of answers that near the limit, to be added to their scores.

    0 up to limit - buffer tokens, then linearly down to -factor at the limit, and -factor
    beyond it. With a buffer of 0 only what is beyond the limit is punished.
    lengths: ``[rows]``, tokens. DAPO, Yu 2025, arXiv:2503.14476, equation 13.
    """
    if not 0 <= buffer <= limit:
        raise ConfigError(
            f"The overlong `buffer` is {buffer} tokens; expected 0 to the `limit`, {limit}."
        )
    (lengths,) = as_float(lengths)
    if buffer == 0:
        return torch.zeros_like(lengths).masked_fill(lengths > limit, -factor)
    return -factor * ((lengths - (limit - buffer)) / buffer).clamp(0.0, 1.0)

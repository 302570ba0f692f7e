"""Terms that are added to rewards before advantages are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.kl_divergence import estimate_kl
from hybridrl.algorithms.segments import (
    RowGroups,
    TokenSegments,
    apply_mask,
    as_float,
    resolve_segments,
)
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
    segments: TokenSegments | None = None,
) -> Tensor:
    """Compute rewards per token: the score on a row's last token, minus coefficient * kl on each.

    scores: ``[rows]``; the others ``[rows, time]``, or packed ``[tokens]`` with ``segments``. The
    last token is the last under the mask; a row without tokens has no place for its score, and
    rows do not depend on each other. estimator: see `estimate_kl`; in a reward it should be ``k1``.
    Ziegler 2019, arXiv:1909.08593, section 2.
    """
    samples = resolve_segments(mask, segments)
    penalty = coefficient * estimate_kl(log_probs, ref_log_probs, estimator, mask=samples.mask)
    scores, penalty = as_float(scores, penalty)
    return apply_mask(samples.spread(scores), samples.ends) - penalty


@torch.no_grad()
def overlong_penalty(lengths: Tensor, limit: int, buffer: int, factor: float = 1.0) -> Tensor:
    """Compute a soft penalty for responses near the length limit, to be added to their scores.

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


@torch.no_grad()
def relative_length_reward(lengths: Tensor, right: Tensor, groups: Tensor) -> Tensor:
    """Compute a reward for being shorter than the others of a group, to be added to scores.

    With s = 0.5 - (length - shortest) / (longest - shortest) of its group: s where the answer is
    right, and min(0, s) where it is not, so that no wrong answer gains by being short. 0 where all
    are of one length. Groups do not depend on each other. lengths, groups: ``[rows]``; right: bool
    ``[rows]``. Kimi k1.5 2025, arXiv:2501.12599, section 2.3.3.
    """
    members = RowGroups.of(groups)
    (lengths,) = as_float(lengths)
    shortest, longest = members.min(lengths), members.max(lengths)
    spread = longest - shortest
    share = 0.5 - (lengths - shortest) / spread.clamp(min=1.0)
    found = torch.where(right, share, share.clamp(max=0.0))
    return torch.where(spread > 0, found, 0.0)

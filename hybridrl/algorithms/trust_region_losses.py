"""Policy losses that leave out tokens which have moved too far from the policy that sampled them,
by how much of the probability has moved rather than by the ratio.

A ratio says little of a rare token, whose probability may double and still be nearly nothing, and
little of a likely one, whose ratio cannot exceed 1 by much.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.policy_losses import build_token_loss, prepare_loss_inputs
from hybridrl.algorithms.segments import apply_mask, as_float
from hybridrl.algorithms.token_loss import TokenLoss


def dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    mask: Tensor | None = None,
) -> TokenLoss:
    """Return the DPPO loss with the total variation of a token, |p - q|: -A r, and 0 where that
    exceeds `clip_high` and A > 0 would raise it further, or `clip_low` and A < 0 would.

    p is the probability of the token, q that under the policy that sampled it.
    DPPO: Qi 2026, arXiv:2602.04879, binary approximation, equation 13.
    """
    return _bounded_loss(log_probs, old_log_probs, advantages, clip_low, clip_high, mask, False)


def dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    mask: Tensor | None = None,
) -> TokenLoss:
    """Return `dppo_tv` with `compute_binary_kl` of the policy that sampled and the one that learns
    as divergence, equation 14 of the paper.
    """
    return _bounded_loss(log_probs, old_log_probs, advantages, clip_low, clip_high, mask, True)


def compute_binary_kl(log_probs: Tensor, other_log_probs: Tensor) -> Tensor:
    """Return, per token, the KL(p || q) of two policies' choices between this token and all others,
    p log(p / q) + (1 - p) log((1 - p) / (1 - q)), in float64.

    Args:
        log_probs: log p of the token.
        other_log_probs: Its log q.
    """
    # The terms nearly cancel: in float32 what is left would be their rounding.
    p, q = log_probs.double(), other_log_probs.double()
    others, others_q = (-torch.expm1(x).clamp(max=-1e-8) for x in (p, q))
    return p.exp() * (p - q) + others * (others / others_q).log()


def _bounded_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    mask: Tensor | None,
    by_kl: bool,
) -> TokenLoss:
    (sampled,) = as_float(apply_mask(old_log_probs.detach(), mask))
    log_probs, difference, advantages = prepare_loss_inputs(
        log_probs, old_log_probs, advantages, mask
    )
    ratio, now = difference.exp(), log_probs.detach()
    divergence = (now.exp() - sampled.exp()).abs()
    if by_kl:
        divergence = compute_binary_kl(sampled, now)
    raised = (advantages > 0) & (now > sampled) & (divergence > clip_high)
    lowered = (advantages < 0) & (now < sampled) & (divergence > clip_low)
    far = raised | lowered
    loss = torch.where(far, 0.0, -advantages * ratio)
    return build_token_loss(loss, ratio, difference, mask, far)
